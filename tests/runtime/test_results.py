"""Runs from synthetic steps: timelines, disturbed steps, notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gplan.core import Action, ActionKind, HostLoad, IdleCause, MachineDevice, Plan, Run
from gplan.evaluate.compare import PEAK_MEMORY, compare
from gplan.reporting.text.run import run_view
from gplan.runtime.recorder import ActionTiming
from gplan.runtime.run.results import on_one_clock, torch_run, virtual_run
from gplan.runtime.run.run_options import RunOptions, StepRecord
from gplan.simulation.bubble import idle_by_cause
from gplan.simulation.simulator import dependency_order, planned_s, schedule_of, timeline_of
from tests.reporting.text.printed import printed
from tests.scheduled import scheduled_plan

ACTION_S = 0.1
ELAPSED_S = 1.0  # of a step, for the process that runs all devices


def run_of(plan: Plan, *, num_steps: int, num_clean: int, load: HostLoad | None = None) -> Run:
    """A run whose last steps are undisturbed; in the others the processor was available half of the time."""
    steps = [step_of(plan, busy=1.0 if num_steps - i <= num_clean else 0.5) for i in range(num_steps)]
    loads = [] if load is None else [load]
    return virtual_run(plan, steps, peak_bytes=[1, 1], options=RunOptions(num_steps=num_steps), loads=loads)


def step_of(plan: Plan, *, busy: float = 1.0, action_s: float = ACTION_S) -> StepRecord:
    """Equal actions with this share of processor time."""
    actions = [ActionTiming(x, 0.0, action_s, busy * action_s) for x in dependency_order(schedule_of(plan))]
    return StepRecord(loss=1.0, actions=tuple(actions), start_s=0.0, end_s=ELAPSED_S)


def ranks_of(plan: Plan, times_s: Sequence[tuple[float, float]]) -> list[list[StepRecord]]:
    """Steps by device: in each, actions of the first length with gaps of the second."""

    def step(device: int, action_s: float, gap_s: float) -> StepRecord:
        order = schedule_of(plan).orders[device]
        starts = [i * (action_s + gap_s) for i in range(len(order))]
        actions = [ActionTiming(x, start, start + action_s, action_s) for x, start in zip(order, starts, strict=True)]
        return StepRecord(loss=1.0, actions=tuple(actions), start_s=0.0, end_s=starts[-1] + action_s)

    return [[step(device, *times) for times in times_s] for device in range(plan.num_devices)]


@pytest.mark.parametrize(("num_clean", "counted", "is_told"), [(2, 5, True), (3, 3, False), (5, 5, False)])
def test_disturbed_steps_noted(num_clean: int, counted: int, is_told: bool) -> None:
    warm_up = RunOptions(num_steps=10).num_warmup_steps
    run = run_of(scheduled_plan("gpipe"), num_steps=warm_up + 5, num_clean=num_clean)
    assert (run.num_counted, run.num_disturbed) == (counted, 5 - num_clean)
    told = [x for x in run.notes if "steps that count although" in x]
    assert len(told) == is_told
    assert all(x.startswith("steps that count although they were interrupted: 3 of 5") for x in told)


@pytest.mark.parametrize(("num_growing", "left_out"), [(2, 2), (3, 0)])
def test_steps_in_which_memory_grows_are_left_out_if_enough_remain(num_growing: int, left_out: int) -> None:
    plan = scheduled_plan("gpipe")
    options = RunOptions(num_steps=RunOptions(num_steps=10).num_warmup_steps + 5)
    steps = [step_of(plan) for _ in range(options.num_steps)]
    table_pages = 24_000  # of a vocabulary's table of 98 MB
    for i in range(num_growing):
        steps[-1 - i] = replace(steps[-1 - i], num_page_faults=table_pages)
    run = virtual_run(plan, steps, peak_bytes=[1, 1], options=options)
    assert (run.num_growing, run.num_counted, run.num_disturbed) == (left_out, 5 - left_out, 0)
    assert ("2 left out as memory still grew" in run.steps_text) == (left_out == 2)
    told = "3 of 5 steps that count ran while the memory of a process still grew" in " ".join(run.notes)
    assert told == (left_out == 0)


@pytest.mark.parametrize(
    ("load", "words"),
    [(HostLoad(steal_share=0.3), "disturbed by other work (0.0 % of"), (HostLoad(), "interrupted by an unknown cause")],
)
def test_steps_are_disturbed_only_with_evidence(load: HostLoad, words: str) -> None:
    run = run_of(scheduled_plan("gpipe"), num_steps=8, num_clean=2, load=load)
    assert words in " ".join(run.notes) and run.host_load == load
    assert any(words in x for x in run.notes)
    assert ("run again on an idle host" in " ".join(run.notes)) == load.is_evidence


@pytest.mark.parametrize(("num_hosts", "is_noted"), [(1, True), (2, False)])
def test_only_a_run_on_one_host_is_compared_with_the_machine_of_the_plan(num_hosts: int, is_noted: bool) -> None:
    plan = scheduled_plan("gpipe")
    stages = (
        replace(stage, machine_device=MachineDevice(name="x", host=f"host{stage.index}")) for stage in plan.stages
    )
    plan = replace(plan, stages=tuple(stages))
    ranks, options = ranks_of(plan, [(0.1, 0.0)] * 8), RunOptions(num_steps=8)
    run = torch_run(plan, ranks, peak_bytes=[1, 1], options=options, num_hosts=num_hosts)
    assert any("made for another machine" in note for note in run.notes) == is_noted


def test_short_run_noted() -> None:
    run = run_of(scheduled_plan("gpipe"), num_steps=2, num_clean=2)
    assert any("too few steps for a warm-up" in x for x in run.notes)


def test_late_inputs_are_not_engine_time() -> None:
    """In the mean step the input is early."""
    plan, options = scheduled_plan("gpipe", times_s=(1.0,), transfer_s=0.0), RunOptions(num_steps=7)
    schedule, costs = schedule_of(plan), [stage.cost for stage in plan.stages]
    usual_s = planned_s(schedule, costs, plan.recompute)
    ranks: list[list[StepRecord]] = [[] for _ in range(plan.num_devices)]
    for slow in (0, 0, 0, 0, 1, 0, 1):  # the stage; three steps to warm up
        timeline = timeline_of(
            schedule,
            costs,
            duration_s=lambda x, slow=slow: usual_s(x) * (2 if x.stage == slow else 1),
            origin="measured",
        )
        for device, steps in enumerate(ranks):
            own = [x for x in timeline.spans if x.device == device]
            actions = tuple(ActionTiming(x.action, x.start_s, x.end_s, x.duration_s) for x in own)
            steps.append(StepRecord(loss=1.0, actions=actions, start_s=0.0, end_s=timeline.step_s))
    run = torch_run(plan, ranks, peak_bytes=[1] * plan.num_devices, options=options)
    idle = idle_by_cause(run.timeline)
    assert (idle[IdleCause.ENGINE], idle[IdleCause.COMMUNICATION]) == pytest.approx((0.0, 0.0), abs=1e-9)
    assert idle[IdleCause.IMBALANCE] > 1.0


def test_split_updates_add_up() -> None:
    """In one process the moving averages of all devices come before the first optimizer."""
    plan, options = scheduled_plan("gpipe", num_devices=2), RunOptions(num_steps=1)
    pieces = [
        ActionTiming(Action(stage, ActionKind.OPTIMIZER, 0), 5.0, 5.0 + s, s)
        for stage, s in [*enumerate((0.5, 0.25))] * 2
    ]
    step = step_of(plan)
    step = replace(step, actions=(*step.actions, *pieces))
    run = virtual_run(plan, [step], peak_bytes=[1, 1], options=options)
    assert [run.timeline.update_s(device) for device in range(2)] == pytest.approx([1.0, 0.5])


def test_timeline_is_the_mean_of_all_steps_that_count() -> None:
    """Durations and gaps are means that add up to the mean step; slow steps count too."""
    plan, options = scheduled_plan("gpipe"), RunOptions(num_steps=8, keeps_steps=True)
    warm_up = [(100.0, 0.0)] * options.num_warmup_steps
    counted = [(1.0, 0.25), (2.0, 0.0), (5.0, 0.5), (1.5, 0.5), (1.0, 0.0)]
    run = torch_run(plan, ranks_of(plan, [*warm_up, *counted]), peak_bytes=[1, 1], options=options)
    first, second = run.timeline.loop_spans[:2]
    assert first.duration_s == pytest.approx(10.5 / 5)
    assert second.start_s - first.end_s == pytest.approx(1.25 / 5)
    assert run.timeline.loop_end_s == pytest.approx(sum(run.step_s[options.num_warmup_steps :]) / 5)
    assert [x.loop_spans[0].duration_s for x in run.step_timelines] == [x for x, _ in counted]
    alone = [step_of(plan, action_s=x) for x, _ in [*warm_up, *counted]]
    virtual = virtual_run(plan, alone, peak_bytes=[1, 1], options=options)
    assert virtual.timeline.loop_spans[0].duration_s == pytest.approx(10.5 / 5)


@pytest.mark.parametrize(("reserved", "expected"), [((7, 3, 5, 9), (7, 9)), ((0, 0, 0, 0), ()), ((), ())])
def test_reserved_memory_is_that_of_the_largest_replica_where_it_is_known(
    reserved: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    plan = scheduled_plan("gpipe")
    plan = replace(plan, num_replicas=2)
    ranks = ranks_of(plan, [(1.0, 0.0)] * 3) * 2
    run = torch_run(plan, ranks, peak_bytes=[1, 2, 2, 1], reserved_bytes=reserved, options=RunOptions(num_steps=3))
    assert (run.peak_bytes, run.reserved_bytes) == ((2, 2), expected)
    row = compare(run).row(PEAK_MEMORY, device=1)
    assert row.reserved == (expected[1] if expected else None)
    assert any("reserved" in x for x in printed(run_view(run))) == bool(expected)


def later(step: StepRecord, seconds: float) -> StepRecord:
    actions = tuple(replace(x, start_s=x.start_s + seconds, end_s=x.end_s + seconds) for x in step.actions)
    return replace(step, actions=actions, start_s=step.start_s + seconds, end_s=step.end_s + seconds)


def test_ranks_of_other_hosts_are_brought_to_one_clock() -> None:
    plan = scheduled_plan("gpipe")
    ranks = ranks_of(plan, [(0.1, 0.02), (0.1, 0.02), (0.2, 0.0)])
    drifting = [[later(x, 1000.0 + i) for i, x in enumerate(own)] for own in ranks[1:]]
    found = on_one_clock([ranks[0], *drifting], ["a", *("b" for _ in drifting)])
    for own, expected in zip(found, ranks, strict=True):
        for step, same in zip(own, expected, strict=True):
            assert (step.start_s, step.end_s) == pytest.approx((same.start_s, same.end_s))
            assert [x.end_s for x in step.actions] == pytest.approx([x.end_s for x in same.actions])
    assert on_one_clock(ranks, ["a"] * len(ranks)) == [list(x) for x in ranks]


def test_what_replicas_wait_for_is_no_interruption() -> None:
    plan = replace(scheduled_plan("gpipe"), num_replicas=2)
    options = RunOptions(num_steps=8)
    ranks = [[_waiting(step, ActionKind.OPTIMIZER) for step in own] for own in ranks_of(plan, [(0.1, 0.0)] * 8) * 2]
    run = torch_run(plan, ranks, peak_bytes=[1] * 4, options=options, loads=[HostLoad(wait_share=0.9)] * 4)
    assert run.num_disturbed == 0
    ranks = [[_waiting(step, ActionKind.FORWARD) for step in own] for own in ranks]
    assert torch_run(plan, ranks, peak_bytes=[1] * 4, options=options).num_disturbed == 5
    sharded = replace(plan, sharding="weights")
    assert torch_run(sharded, ranks, peak_bytes=[1] * 4, options=options).num_disturbed == 0


def _waiting(step: StepRecord, kind: ActionKind) -> StepRecord:
    """The step, with no processor time in actions of a kind."""
    return replace(step, actions=tuple(replace(x, busy_s=0.0) if x.action.kind is kind else x for x in step.actions))


@pytest.mark.parametrize(("num_cores", "is_told"), [(1, True), (2, False), (None, False)])
def test_ranks_that_share_cores_are_no_other_work(num_cores: int | None, is_told: bool) -> None:
    plan = scheduled_plan("gpipe")
    ranks, loads = ranks_of(plan, [(0.1, 0.0)] * 8), [HostLoad(wait_share=0.9)] * 2
    run = torch_run(plan, ranks, peak_bytes=[1, 1], options=RunOptions(num_steps=8), loads=loads, num_cores=num_cores)
    assert any("2 processes of 1 thread share 1 core" in x for x in run.notes) is is_told
    assert (run.host_load is None) is is_told


def test_passes_of_replicas_in_one_process_are_averaged() -> None:
    plan = scheduled_plan("gpipe")
    options = RunOptions(num_steps=8)

    def run(num_replicas: int) -> Run:
        step = step_of(plan)
        passes = [x for x in step.actions if x.action.kind is not ActionKind.OPTIMIZER]
        step = replace(step, actions=(*step.actions, *passes * (num_replicas - 1)))
        whole = replace(plan, num_replicas=num_replicas)
        return virtual_run(whole, [step] * 8, peak_bytes=[1, 1], options=options)

    assert run(3).timeline.step_s == pytest.approx(run(1).timeline.step_s)
