"""What one of several replicas holds and takes, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.core import Link, SharedWeight
from gplan.core.checks import SHARDINGS
from gplan.core.machine import Collective
from gplan.core.precision import Precision
from gplan.core.profile import ParameterSize, Profile
from gplan.corrections.sharding import division_gains, sharded
from gplan.cost.memory_moments import memory_at, peak_moments, stage_memory
from gplan.cost.stage_table import StageTable
from tests.made import make_profile
from tests.partition.problems import profiles

ROWS = (ParameterSize(num_rows=10, num_bytes=80), ParameterSize(num_rows=0, num_bytes=4))
"""A matrix whose ten rows are divided, padded to twelve, and a scalar that stays whole."""


def made(*, kind: str = "cpu") -> Profile:
    """Two layers of 84 bytes of parameters and 16 of buffers; state is twice the gradients."""
    profile = make_profile(
        [1.0, 1.0], weight_bytes=100, stash_bytes=7, workspace_bytes=5, link=Link(latency_s=0.5, bytes_per_s=8.0)
    )
    layers = tuple(replace(x, gradient_bytes=84, parameters=ROWS, largest_trained_bytes=80) for x in profile.layers)
    step = replace(profile.step, state_bytes=2 * 168)
    return replace(profile, layers=layers, step=step, device=replace(profile.device, kind=kind))


def costs_of(sharding: str, num_replicas: int = 4, *, kind: str = "cpu") -> StageTable:
    profile = sharded(made(kind=kind), num_replicas=num_replicas, sharding=sharding)
    return StageTable(profile, 2, num_replicas=num_replicas, sharding=sharding)


def peak(costs: StageTable, first: int = 0, end: int = 2) -> int:
    moments = peak_moments("gpipe", num_devices=1, num_microbatches=2, stages=(0,), recompute="never")
    return stage_memory(moments, costs.row_parts(first, end)).peak_bytes


def test_optimizer_is_divided() -> None:
    parts = costs_of("optimizer").row_parts(0, 2)
    part, gathered = 3 * 8, 4 * 3 * 8  # of each matrix: 10 rows of 8 bytes
    assert parts.weight == 2 * (20 + part + gathered)
    assert parts.gradient == 2 * 84
    assert parts.optimizer == 2 * 2 * (part + 4)
    assert parts.optimizer_workspace == 0  # a copy of the gradients, when the gathered parameters are freed
    assert parts.backward_workspace == 5


def test_weights_are_divided() -> None:
    parts = costs_of("weights").row_parts(0, 2)
    part, gathered = 3 * 8, 4 * 3 * 8
    assert parts.weight == 2 * (20 + part)
    assert (parts.gradient, parts.optimizer) == (2 * 84, 2 * 2 * (part + 4))
    assert parts.optimizer_workspace == gathered  # of the gradients of one layer
    assert parts.forward_workspace == 2 * gathered - 7  # when a layer begins, before there is its stash
    assert parts.backward_workspace == 2 * gathered


@pytest.mark.parametrize("sharding", ["optimizer", "weights"])
def test_part_of_master_weights_is_held_once(sharding: str) -> None:
    profile = replace(made(), precision=Precision.named("mixed"))
    whole, part = (sharded(x, num_replicas=4, sharding=sharding).layers[0].weight_bytes for x in (profile, made()))
    assert part - whole == 3 * 8


def test_messages_on_gpus() -> None:
    """Of layers before: one that is gathered in a backward meanwhile, one whose message a forward frees late."""
    costs, gathered = costs_of("weights", kind="cuda"), 4 * 3 * 8
    parts = costs.row_parts(0, 2)
    assert (parts.forward_workspace, parts.backward_workspace) == (3 * gathered - 7, 2 * gathered + 5)
    light = [replace(x, weight_bytes=0, gradient_bytes=0, parameters=()) for x in made(kind="cuda").layers[1:]]
    profile = replace(made(kind="cuda"), layers=(*made().layers[:1], *light))
    layers = sharded(profile, num_replicas=4, sharding="weights").layers
    assert [x.costs[0].forward_workspace_bytes for x in layers] == [2 * gathered + 5, gathered + 5]
    assert [x.costs[0].backward_workspace_bytes for x in layers] == [2 * gathered, gathered + 5]


def test_peaks_fall() -> None:
    peaks = [peak(costs_of(x)) for x in ("none", "optimizer", "weights")]
    held = 168 + 2 * 7 + 5  # gradients, both micro-batches, and what a layer's backward needs
    averaging = 2 * 168  # gradients and their copy
    assert peaks == [averaging + 2 * 100 + 336, held + 2 * 140 + 112, held - 5 + 2 * 44 + 112 + 2 * 96]


def test_copies_of_gradients_while_replicas_average_them() -> None:
    """Large ones are not copied, small ones 25 MiB at a time; with master weights in their type."""
    small, large = (ParameterSize(num_rows=1, num_bytes=x * 2**18) for x in (3, 4))
    layer = replace(made().layers[0], parameters=(small, large), gradient_bytes=7 * 2**18)
    profile = replace(made(), layers=(layer,))
    masters = replace(profile, step=replace(profile.step, master_bytes=14 * 2**18))
    many = replace(profile, layers=(replace(layer, parameters=40 * (small,), gradient_bytes=40 * small.num_bytes),))
    found = [
        StageTable(x, 2, num_replicas=num_replicas).row_parts(0, 1).optimizer_workspace
        for x, num_replicas in ((profile, 1), (profile, 2), (masters, 2), (many, 2))
    ]
    assert found == [0, small.num_bytes, (7 + 2 * 3) * 2**18, 25 * 2**20]


@pytest.mark.parametrize(
    ("sharding", "seconds"),
    [
        ("none", 2 * 3 * (0.5 + 168 / 4 / 8)),
        ("optimizer", 3 * (0.5 + 168 / 4 / 8) + 3 * (0.5 + 192 / 4 / 8)),
        ("weights", 3 * (0.5 + 168 / 4 / 8)),
    ],
)
def test_exchange_of_a_step(sharding: str, seconds: float) -> None:
    assert costs_of(sharding).row(0, 2).all_reduce_s == pytest.approx(seconds)


def test_gathering_takes_time() -> None:
    gather_s = 3 * (0.5 + 24 / 8)
    on_cpu, on_gpu = (costs_of("weights", kind=kind).row(0, 2) for kind in ("cpu", "cuda"))
    assert (on_cpu.forward_s, on_cpu.backward_s, on_cpu.recompute_s) == pytest.approx(
        (2 * (1 + gather_s), 2 * (2 + gather_s), 2 * (1 + gather_s))
    )
    assert (on_gpu.forward_s, on_gpu.backward_s) == pytest.approx((2 * gather_s, 2 * gather_s))


def test_update_takes_less_time() -> None:
    profile = replace(made(), step=make_profile([1], optimizer_s=84.0).step)
    times = [
        StageTable(sharded(profile, num_replicas=4, sharding=x), 2, num_replicas=4, sharding=x).row(0, 1)
        for x in ("none", "optimizer", "weights")
    ]
    assert [x.optimizer_s for x in times] == pytest.approx([42, 14, 14])


def test_update_of_a_divided_table_takes_less_time() -> None:
    """A replica updates 28 of 84 bytes, in as large a share of the seconds of the whole layer."""
    profile = made()
    layers = tuple(replace(x, update_s=2.0 if i == 0 else 0.5) for i, x in enumerate(profile.layers))
    profile = replace(profile, layers=layers, step=make_profile([1], optimizer_s=5.0).step)
    times = [
        StageTable(sharded(profile, num_replicas=4, sharding=x), 2, num_replicas=4, sharding=x).row(0, 1)
        for x in ("none", "optimizer")
    ]
    assert [x.optimizer_s for x in times] == pytest.approx([4.0, 4.0 / 3])


def test_tied_weight_is_divided() -> None:
    size = ParameterSize(num_rows=5, num_bytes=20)
    tied = SharedWeight(
        name="w", layers=(0, 2), num_parameters=5, weight_bytes=20, gradient_bytes=20, parameters=(size,)
    )
    profile = sharded(make_profile([1, 1, 1], shared_weights=(tied,)), num_replicas=2, sharding="weights")
    assert profile.shared_weights[0].weight_bytes == 3 * 4
    assert [x.costs[0].forward_workspace_bytes for x in profile.layers] == [2 * 24, 0, 2 * 24]


def test_one_replica_divides_nothing() -> None:
    profile = made()
    assert sharded(profile, num_replicas=1, sharding="weights") is profile
    assert sharded(profile, num_replicas=2, sharding="none") is profile


def test_measured_collectives() -> None:
    measured = tuple(
        Collective(kind=kind, num_devices=4, message=Link(latency_s=seconds, bytes_per_s=1e9))
        for kind, seconds in (("all_reduce", 1.0), ("reduce_scatter", 2.0), ("all_gather", 3.0))
    )
    profile = made()
    profile = replace(profile, link=replace(profile.link, collectives=measured))
    found = [
        StageTable(sharded(profile, num_replicas=4, sharding=x), 2, num_replicas=4, sharding=x).row(0, 2)
        for x in SHARDINGS
    ]
    assert [x.all_reduce_s for x in found] == pytest.approx([6 * 1.0, 3 * 2.0 + 3 * 3.0, 3 * 2.0])
    assert [x.forward_s for x in found] == pytest.approx([2, 2, 2 * (1 + 3 * 3.0)])


@settings(max_examples=60, deadline=None)
@given(profiles(max_layers=5), st.sampled_from([2, 3, 8]))
def test_gains_of_a_division(profile: Profile, num_replicas: int) -> None:
    """Where the search leaves whole stages out, no stage is better whole."""
    if not division_gains(profile, num_replicas=num_replicas):
        return
    whole, part = (
        StageTable(sharded(profile, num_replicas=num_replicas, sharding=x), 2, num_replicas=num_replicas, sharding=x)
        for x in ("none", "optimizer")
    )
    num_layers = len(profile.layers)
    for first, end in combinations(range(num_layers + 1), 2):
        bounds = np.array([first]), np.array([end])
        assert part.seconds(*bounds).before_update_s + part.update_alone_s(*bounds) <= (
            whole.seconds(*bounds).before_update_s + whole.update_alone_s(*bounds) + 1e-9
        )
        assert peak(part, first, end) <= peak(whole, first, end)


def test_layers_of_buffers_alone_stay_whole() -> None:
    profile = made()
    buffers = replace(
        profile.layers[0], parameters=(), num_parameters=0, gradient_bytes=0, largest_trained_bytes=0, weight_bytes=48
    )
    found = sharded(replace(profile, layers=(buffers, profile.layers[1])), num_replicas=4, sharding="weights")
    assert (found.layers[0].weight_bytes, found.layers[0].gathered_bytes) == (48, 0)


def test_what_is_freed_before_the_update_is_no_negative_workspace() -> None:
    profile = made()
    profile = replace(profile, layers=tuple(replace(x, gradient_bytes=80, parameters=()) for x in profile.layers))
    costs = StageTable(sharded(profile, num_replicas=2, sharding="optimizer"), 2, num_replicas=2, sharding="optimizer")
    parts = costs.row_parts(0, 2)
    assert parts.optimizer_workspace < 0
    moments = peak_moments("gpipe", num_devices=1, num_microbatches=2, stages=(0,), recompute="never")
    held = memory_at(moments.counts[moments.actions.index("optimizer"), 0], parts, action="update")
    assert held.workspace_bytes == 0
    assert held.weight_bytes == parts.weight + parts.optimizer_workspace
