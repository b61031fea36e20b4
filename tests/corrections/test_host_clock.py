"""Two clocks in a plan: how far it is bound by its host, and what would help."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gplan
from gplan.core import Profile, Timing, Work
from gplan.core.two_clocks import Enqueued, both_done_s
from gplan.corrections.host_clock import with_cuda_graphs, without_host
from gplan.corrections.microbatch_size import at_microbatch_size
from gplan.cost.stage_table import StageTable
from gplan.evaluate.explain import explain
from gplan.files.json_files import parse, to_json
from gplan.reporting.analysis import PlanAnalysis
from gplan.reporting.page.document import page
from gplan.reporting.text.explanation import headline
from gplan.reporting.text.plan import plan_view
from tests.made import make_profile
from tests.partition.problems import with_costs_by_layer
from tests.reporting.text.printed import printed

MILLISECOND = Timing.exactly(1e-3)


def on_host(profile: Profile, forward_s: list[float], backward_s: list[float] | None = None) -> Profile:
    seconds = zip(forward_s, backward_s or [2 * x for x in forward_s], strict=True)
    times = [{"host_forward": Timing.exactly(x), "host_backward": Timing.exactly(y)} for x, y in seconds]
    return with_costs_by_layer(profile, times)


def test_a_stage_takes_the_longer_sum_of_two_clocks() -> None:
    row = StageTable(on_host(make_profile([1, 9]), [8, 3], [2, 1]), 4).row(0, 2)
    assert (row.forward_s, row.backward_s, row.recompute_s) == (11, 20, 11)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7))
def test_a_stage_takes_what_the_recurrence_gives_where_its_host_is_ahead(pairs: list[tuple[int, int]]) -> None:
    """In steps one after the other the order of layers plays no part: many passes take as many times the longer sum."""
    times_s, num = [Enqueued(float(h), float(d)) for h, d in pairs], 200
    profile = on_host(make_profile([d for _, d in pairs]), [h for h, _ in pairs])
    once_s = StageTable(profile, 1).row(0, len(pairs)).forward_s
    assert once_s <= both_done_s(times_s)
    assert both_done_s(times_s * num) / num == pytest.approx(once_s, abs=9 * len(pairs) / num)


def test_a_plan_states_how_far_its_host_binds_it() -> None:
    """Two stages of 16 ms for the host and 10 ms for the device; graphs of 1000 kernels each."""
    work = (Work(kind="matmul", num_operations=1000, num_flops=0, num_bytes=0),)
    costs = [{"forward_work": work, "backward_work": work}] * 2
    profile = on_host(with_costs_by_layer(make_profile([1e-2, 1e-2]), costs), [1.6e-2, 1.6e-2])
    plan = gplan.balance(profile, num_devices=2, num_microbatches=4, schedule="1f1b")
    found = plan.prediction.host_bound
    assert found is not None
    assert plan.prediction.step_s / found.device_step_s == pytest.approx(1.6)
    assert found.graphs_step_s == found.device_step_s  # 3.5 us are within 10 ms
    said = "host-bound: 38 % of the step; larger micro-batches, torch.compile or CUDA graphs would give up to 1.6 x"
    assert said in " ".join(printed(plan_view(plan), width=200))
    assert said[1:] in " ".join(headline(explain(plan, profile)))
    assert said in page(plan, [], PlanAnalysis(choices=()))
    assert parse(type(plan), to_json(plan), name="plan.json") == plan


def test_a_graph_launches_once_a_stage_and_leaves_out_layers_that_wait() -> None:
    work = (Work(kind="matmul", num_operations=4000, num_flops=0, num_bytes=0),)
    profile = on_host(make_profile([0, 0, 0]), [1, 1, 1])
    costs = [{"forward_work": work, "forward_waits": name == "c"} for name in "abc"]
    graphs = with_cuda_graphs(with_costs_by_layer(profile, costs), {0})
    assert [x.costs[0].host_forward and x.costs[0].host_forward.median_s for x in graphs.layers] == [
        pytest.approx(6.5e-6), pytest.approx(4e-6), 1.0
    ]  # fmt: skip


def test_a_profile_of_one_clock_has_no_word_of_a_host() -> None:
    profile = make_profile([1, 1])
    plan = gplan.balance(profile, num_devices=2, num_microbatches=4)
    assert plan.prediction.host_bound is None
    assert not any("host-bound" in x for x in printed(plan_view(plan)))
    assert without_host(profile) == profile


def test_seconds_of_the_host_are_interpolated_too() -> None:
    profile = make_profile([1, 1], microbatch_sizes=(2, 4))
    small, large = ({"host_forward": Timing.exactly(x), "host_backward": MILLISECOND} for x in (1.0, 2.0))
    layers = (
        replace(x, costs=(replace(x.costs[0], **small), replace(x.costs[1], **large, forward_waits=True)))
        for x in profile.layers
    )
    cost = at_microbatch_size(replace(profile, layers=tuple(layers)), 3).layers[0].costs[0]
    assert cost.host_forward is not None
    assert (cost.host_forward.median_s, cost.forward_waits) == (1.5, True)
