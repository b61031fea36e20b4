"""The dry run of a GPU: the recurrence of two clocks beside a queue that a thread runs, and the profile made with it."""

from __future__ import annotations

from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gplan.core import Profile
from gplan.core.two_clocks import Enqueued, both_done_s
from gplan.cost.reserved_bytes import NCCL_BYTES
from gplan.cost.stage_table import StageTable
from gplan.files.json_files import parse, to_json
from gplan.strategy_search.planner import balance
from gplan_profiler.measure import ProfileOptions, measure_profile
from gplan_profiler.model.load import model_in_memory
from gplan_profiler.timing.clock import CudaClock, Samples
from tests.made import FREE_LINK
from tests.profiler.device_queue import QUEUE, DeviceQueue, Kernels

SECONDS = st.integers(0, 9).map(float)
LAYERS = st.lists(st.builds(Enqueued, SECONDS, SECONDS, st.booleans()), max_size=8)


@settings(max_examples=100, deadline=None)
@given(LAYERS, st.integers(2, 6))
def test_recurrence_is_what_the_queue_does(layers: list[Enqueued], num_kernels: int) -> None:
    """Layers of equal kernels: a whole one is enqueued before its last kernel can end."""
    queue = DeviceQueue()
    for layer in layers:
        for _ in range(num_kernels):
            queue.launch(host_s=layer.host_s / num_kernels, device_s=layer.device_s / num_kernels)
        if layer.waits:
            queue.item()
    queue.synchronize()
    predicted = both_done_s(layers)
    slack = sum(max(x.host_s, x.device_s) for x in layers) / num_kernels  # of a layer's first and last kernel
    assert predicted - 1e-9 <= queue.host_s <= predicted + slack + 1e-9


def test_a_host_runs_ahead_as_far_as_its_queue() -> None:
    queue = DeviceQueue(depth=2)
    for name in "abcd":
        queue.launch(host_s=1.0, device_s=10.0, name=name)
    assert queue.host_s == 21.0  # until b is done
    queue.launch(host_s=30.0, device_s=0.0, name="e")
    queue.synchronize()
    assert queue.order.index("device a") < queue.order.index("host d")
    assert [x for x in queue.order if x.startswith("device")] == [f"device {x}" for x in "abcde"]
    assert queue.host_s == queue.device_s == 51.0
    assert both_done_s([*[Enqueued(1.0, 10.0)] * 4, Enqueued(30.0, 0.0)]) == 40.0  # without latency and a full queue


def test_a_layer_is_timed_by_both_clocks() -> None:
    """Host-bound, device-bound and one that waits, in every round; the first sample is the host's alone."""
    queue, samples = DeviceQueue(), [Samples(), Samples(), Samples()]
    clock = CudaClock(queue)
    for _ in range(12):
        clock.time_layer(samples[0], lambda: queue.launch(host_s=1e-3, device_s=1e-4))
        clock.time_layer(samples[1], lambda: queue.launch(host_s=1e-4, device_s=1e-3))
        clock.time_layer(samples[2], lambda: (queue.launch(host_s=1e-3, device_s=1e-3), queue.item()))
    clock.flush()
    assert [(x.on_host.timing().median_s, x.timing().median_s) for x in samples] == [
        pytest.approx(x) for x in ((1e-3, 1e-4), (1e-4, 1e-3), (2e-3, 2e-3))
    ]
    assert [(len(x.clean_s), len(x.refused_s), x.is_host_bound) for x in samples] == [
        (11, 0, True),
        (11, 0, False),
        (8, 3, False),
    ]


def test_a_layer_with_more_kernels_than_the_queue_holds_is_timed_without_a_spin() -> None:
    queue, samples = DeviceQueue(depth=8), Samples()
    clock = CudaClock(queue)
    for _ in range(12):
        clock.time_layer(samples, lambda: [queue.launch(host_s=1e-5, device_s=1e-4) for _ in range(40)])
    clock.flush()
    assert samples.timing().median_s == pytest.approx(40e-4 + 1e-5)
    assert queue.host_s < 1.0  # no spin that grows with what the host waits


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Of a host-bound layer, a device-bound one, and two that wait for the device, on a queue with clocks of its own."""
    queue = DeviceQueue()
    QUEUE[:] = [ref(queue)]
    model = nn.Sequential(
        Kernels(4, 1e-5, 1e-6),
        Kernels(4, 1e-5, 1e-4),
        Kernels(2, 1e-5, 5e-5, forward_waits=True),
        Kernels(2, 1e-5, 5e-5, backward_waits=True),
    )
    file = model_in_memory(model, inputs=torch.rand(2, 4), loss=lambda output, _: output.sum())
    options = ProfileOptions(contention=0, link=FREE_LINK, budget_s=0.2, microbatch_sizes=(2,))
    return measure_profile(file, options, clock=CudaClock(queue))


def test_profile_has_seconds_of_host_and_device(profile: Profile) -> None:
    found = [x.costs[0] for x in profile.layers]
    forward = [(x.host_forward.median_s, x.forward.median_s) for x in found if x.host_forward]
    backward = [(x.host_backward.median_s, x.backward.median_s) for x in found if x.host_backward]
    waiting = 1e-5 + 2 * 5e-5  # until the first kernel is there, and then all
    assert forward == [pytest.approx(x, rel=1e-3) for x in ((4e-5, 4e-6), (4e-5, 4e-4), (waiting,) * 2, (2e-5, 1e-4))]
    waiting += 2 * 5e-5
    assert backward == [pytest.approx(x, rel=1e-3) for x in ((8e-5, 8e-6), (8e-5, 8e-4), (4e-5, 2e-4), (waiting,) * 2)]
    assert [(x.forward_waits, x.backward_waits) for x in found] == [
        (False, False), (False, False), (True, False), (False, True)
    ]  # fmt: skip


def test_layers_that_wait_or_are_host_bound_are_named(profile: Profile) -> None:
    assert "host-bound, the GPU waits for its host: 0; larger micro-batches cost them little" in profile.notes
    assert any(x.startswith("the host waits for the GPU in 2, 3, as for .item()") for x in profile.notes)


def test_a_stage_takes_the_longer_clock(profile: Profile) -> None:
    table = StageTable(profile, num_microbatches=4)
    both, single = table.row(0, 2), table.row(0, 1)
    assert (single.forward_s, single.backward_s) == pytest.approx((4e-5, 8e-5), rel=1e-3)
    assert (both.forward_s, both.backward_s) == pytest.approx(
        (4.04e-4, 8.08e-4), rel=1e-3
    )  # not the sum of both maxima


def test_seconds_of_the_whole_model_follow_both_clocks(profile: Profile) -> None:
    """Forward, the host-bound layer comes first and nothing overlaps; backward, its kernels are enqueued ahead."""
    forward_s, backward_s = (x - profile.overhead_s for x in profile.one_stage_s(0))
    assert (forward_s, backward_s) == pytest.approx((6.5e-4, 1.218e-3), rel=1e-3)


def test_a_plan_says_what_a_gpu_reserves(profile: Profile) -> None:
    plan = balance(profile, num_devices=2, num_microbatches=4, schedule="1f1b")
    assert [x - y for x, y in zip(plan.reserved_bytes, plan.device_peak_bytes, strict=True)] > [0, 0]
    assert plan.context_bytes == NCCL_BYTES


def test_seconds_of_both_clocks_are_kept_in_a_file(profile: Profile) -> None:
    assert parse(Profile, to_json(profile), name="profile.json") == profile
