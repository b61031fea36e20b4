"""Traces of torch.profiler: what real recordings of every schedule become, and what every mistake is answered with."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import gplan
from gplan.core import ActionKind, Run
from gplan.core.errors import FileError
from gplan.evaluate.compare import BUBBLE, STEP_TIME, compare
from gplan.files.json_files import parse, to_json
from gplan.interop.traces.measured_run import Traced, read_traced, traced_run
from gplan.reporting.chrome_trace import trace_json
from gplan.schedules.registry import make_schedule
from gplan.simulation.bubble import idle_by_cause
from tests.interop.made_traces import RankWriter, made_traces
from tests.made import make_profile
from tests.reporting.subjects import make_scheduled_plan
from tests.reporting.trace_format import breaches

SAMPLES = Path(__file__).parent / "traces"
NUM_STEPS, NUM_MICROBATCHES = 4, 4
RECORDED = {
    "gpipe": ("gpipe", ((0,), (1,))),
    "1f1b": ("1f1b", ((0,), (1,))),
    "1f1b-stacks": ("1f1b", ((0,), (1,))),
    "interleaved": ("interleaved-1f1b:2", ((0, 2), (1, 3))),
    "zero-bubble": (None, ((0, 2), (1, 3))),
    "dualpipev": (None, ((0, 3), (1, 2))),
    "gplan-zb-v": ("zb-v", ((0, 3), (1, 2))),
}


def sample(name: str) -> list[Path]:
    return [SAMPLES / f"{name}.rank{rank}.json.gz" for rank in range(2)]


@pytest.fixture(scope="module")
def recorded() -> dict[str, Traced]:
    return {name: read_traced(sample(name)) for name in RECORDED}


@pytest.mark.parametrize("name", RECORDED)
def test_every_schedule_that_was_recorded_is_read_with_its_stages_and_order(
    recorded: dict[str, Traced], name: str
) -> None:
    traced, (schedule, stages) = recorded[name], RECORDED[name]
    assert (traced.schedule, traced.timeline.stages_by_device) == (schedule, stages)
    assert traced.timeline.num_microbatches == NUM_MICROBATCHES
    assert (len(traced.step_s), traced.num_warmup_steps, traced.num_counted) == (NUM_STEPS, 1, NUM_STEPS - 1)
    assert traced.timeline.origin == "measured"
    assert traced.notes == ()
    assert traced.clock == "the clock of the host that all ranks ran on"
    assert "processor's operations" in traced.basis


@pytest.mark.parametrize("name", RECORDED)
def test_waiting_and_computing_add_up_to_the_step(recorded: dict[str, Traced], name: str) -> None:
    timeline = recorded[name].timeline
    busy_s = sum(x.duration_s for x in timeline.spans)
    waited_s = sum(idle_by_cause(timeline).values())
    assert busy_s + waited_s == pytest.approx(timeline.num_devices * timeline.step_s, rel=1e-6)


@pytest.mark.parametrize("name", RECORDED)
def test_no_action_of_a_device_overlaps_its_next_one(recorded: dict[str, Traced], name: str) -> None:
    spans = recorded[name].timeline.spans
    for span, following in pairwise(spans):
        if span.device == following.device:
            assert following.start_s >= span.end_s - 1e-3 * recorded[name].timeline.step_s
    assert sum(x.action.kind is ActionKind.OPTIMIZER for x in spans) == 2


TRAINERS = {
    "torchtitan": ("1f1b", 3),  # torchtitan's first step, in which shapes are exchanged, is not in the order of 1F1B
    "torchtitan-interleaved": ("interleaved-1f1b:2", 4),
    "megatron": ("1f1b", 4),
    "megatron-interleaved": ("interleaved-1f1b:2", 4),
}


@pytest.mark.parametrize(("name", "expected"), TRAINERS.items())
def test_traces_of_trainers_have_stages_order_and_updates(name: str, expected: tuple[str, int]) -> None:
    schedule, num_steps = expected
    traced, plan = read_traced(sample(name)), make_scheduled_plan(schedule)
    assert (traced.schedule, len(traced.step_s), traced.notes) == (schedule, num_steps, ())
    assert all(traced.timeline.update_s(device) > 0 for device in range(2))
    run = traced_run(traced, plan)
    assert run.timeline.transfers
    assert not any("differs" in x for x in run.notes)
    assert compare(run).row(STEP_TIME).measured == traced.timeline.step_s


def test_megatrons_ranks_under_other_numbers_or_missing_are_refused(tmp_path: Path) -> None:
    """The order of interleaved 1F1B tells the chunks of a rank apart."""

    def swap(trace: dict[str, Any]) -> None:
        trace["distributedInfo"]["rank"] = 1 - trace["distributedInfo"]["rank"]

    with pytest.raises(FileError):
        read_traced(spoilt("megatron-interleaved", tmp_path, swap))
    with pytest.raises(FileError):
        read_traced(sample("megatron-interleaved")[:1])


def test_what_lies_between_sends_and_receives_is_what_the_stacks_say(tmp_path: Path) -> None:
    def without_stacks(trace: dict[str, Any]) -> None:
        trace["traceEvents"] = [x for x in trace["traceEvents"] if x["cat"] != "python_function"]

    found = read_traced(spoilt("1f1b-stacks", tmp_path, without_stacks)).timeline
    expected = read_traced(sample("1f1b-stacks")).timeline
    assert [x.action for x in found.spans] == [x.action for x in expected.spans]
    for one, other in zip(found.loop_spans, expected.loop_spans, strict=True):
        shared_s = min(one.end_s, other.end_s) - max(one.start_s, other.start_s)
        assert shared_s > 0.5 * other.duration_s


def test_the_wait_for_an_input_is_no_part_of_an_action() -> None:
    """The range `Forward 0` of the last stage begins with the receive."""
    with gzip.open(sample("gpipe")[1]) as file:
        events = json.load(file)["traceEvents"]
    ranges = [x["dur"] for x in events if x["name"] == "Forward 0"]
    span = next(x for x in read_traced(sample("gpipe")).timeline.spans if str(x.action) == "1F0")
    assert span.duration_s < 1e-6 * sorted(ranges)[0]


def test_times_are_the_medians_of_the_steps_after_the_first(tmp_path: Path) -> None:
    paths = made_traces(tmp_path, "1f1b", forward_s=[[9.0, 1.0, 2.0, 3.0], [1.0] * 4])
    timeline = read_traced(paths).timeline
    assert timeline.median_s(ActionKind.FORWARD, stage=0) == pytest.approx(2.0)
    assert timeline.median_s(ActionKind.BACKWARD, stage=1) == pytest.approx(2.0)
    assert read_traced(paths).period_s == pytest.approx(100.0)


def test_too_few_steps_all_count_and_that_is_said(tmp_path: Path) -> None:
    traced = read_traced(made_traces(tmp_path, "1f1b", forward_s=[[1.0, 3.0], [1.0, 1.0]]))
    assert (traced.num_warmup_steps, traced.num_counted) == (0, 2)
    assert "only 2 complete steps" in traced.notes[0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b:2", "zb-h1", "zb-v"])
def test_steps_without_the_profilers_numbers_are_told_apart_by_repetition(tmp_path: Path, schedule: str) -> None:
    traced = read_traced(made_traces(tmp_path, schedule, has_steps=False))
    assert (len(traced.step_s), traced.schedule) == (3, schedule)


def test_half_a_step_at_the_beginning_is_left_out(tmp_path: Path) -> None:
    traced = read_traced(made_traces(tmp_path, "1f1b", has_steps=False, first_events=7))
    assert len(traced.step_s) == 2
    assert "left out" in traced.notes[0]


def test_on_a_gpu_the_kernels_of_an_action_count(tmp_path: Path) -> None:
    """Launched within the range, by whichever thread, they run half a second later; sends and receives are no part."""
    traced = read_traced(made_traces(tmp_path, "1f1b", has_kernels=True))
    assert "GPU's kernels" in traced.basis
    assert traced.timeline.median_s(ActionKind.FORWARD, stage=0) == pytest.approx(1.0)
    assert traced.timeline.median_s(ActionKind.BACKWARD, stage=0) == pytest.approx(2.0)
    assert traced.step_s == pytest.approx(read_traced(made_traces(tmp_path, "1f1b")).step_s)


def test_on_a_gpu_an_action_without_kernels_takes_no_time_in_its_turn(tmp_path: Path) -> None:
    """The first stage has no input gradients to compute; its range ends long before the kernels launched before it."""
    traced = read_traced(made_traces(tmp_path, "zb-v", has_kernels=True))
    assert traced.schedule == "zb-v"
    assert traced.timeline.median_s(ActionKind.INPUT_GRADIENT, stage=0) == 0.0
    timeline = read_traced(made_traces(tmp_path, "zb-v")).timeline
    assert [x.action for x in traced.timeline.loop_spans] == [x.action for x in timeline.loop_spans]
    assert sum(idle_by_cause(traced.timeline).values()) == pytest.approx(sum(idle_by_cause(timeline).values()))


@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a")])
def test_clocks_of_other_hosts_are_aligned_by_causality(tmp_path: Path, hosts: tuple[str, str]) -> None:
    aligned = read_traced(made_traces(tmp_path, "1f1b"))
    traced = read_traced(made_traces(tmp_path, "1f1b", hosts=hosts, late_s=(0.0, -2.5)))
    assert "aligned by causality" in traced.clock
    assert ("2 hosts" in traced.clock) == (hosts == ("a", "b"))
    starts = [[x.start_s for x in t.timeline.spans] for t in (aligned, traced)]
    assert starts[0] == pytest.approx(starts[1], abs=0.3)


def test_a_trace_that_does_not_say_when_it_began_is_aligned_too(tmp_path: Path) -> None:
    traced = read_traced(made_traces(tmp_path, "1f1b", late_s=(0.0, 40.0), has_base=False))
    assert "does not name the start of its clock" in traced.clock
    assert traced.timeline.step_s < 30.0


def test_files_count_by_their_rank_not_by_their_order() -> None:
    assert read_traced(sample("interleaved")[::-1]) == read_traced(sample("interleaved"))


def test_a_plain_file_is_read_as_a_zipped_one(tmp_path: Path) -> None:
    assert read_traced(spoilt("zero-bubble", tmp_path, lambda _: None)) == read_traced(sample("zero-bubble"))


def test_a_run_beside_its_plan_is_written_read_and_compared(recorded: dict[str, Traced]) -> None:
    traced, plan = recorded["gplan-zb-v"], make_scheduled_plan("zb-v")
    run = traced_run(traced, plan)
    assert parse(Run, to_json(run), name="run") == run
    rows = compare(run)
    assert rows.row(STEP_TIME).measured == traced.timeline.step_s
    assert rows.row(BUBBLE).measured == traced.timeline.bubble
    sent = {x.action: x.num_bytes for x in run.timeline.transfers}
    assert set(sent.values()) == {2**20}
    assert any("imported from torch.profiler traces" in x for x in run.notes)
    assert any("neither losses nor memory;" in x for x in run.notes)
    assert not any("differs" in x for x in run.notes)


@pytest.mark.parametrize(("name", "schedule"), [("gplan-zb-v", "zb-v"), ("interleaved", "interleaved-1f1b:2")])
def test_the_trace_that_is_drawn_of_an_imported_run_keeps_the_documented_rules(
    recorded: dict[str, Traced], name: str, schedule: str
) -> None:
    assert breaches(trace_json(traced_run(recorded[name], make_scheduled_plan(schedule)))) == []


def test_ranks_are_the_plans_devices_by_their_stages(recorded: dict[str, Traced]) -> None:
    """A plan may hold the stages on other devices than the ranks were numbered."""
    swapped = replace(
        recorded["interleaved"],
        timeline=replace(
            recorded["interleaved"].timeline,
            spans=tuple(structs.replace(x, device=1 - x.device) for x in recorded["interleaved"].timeline.spans),
        ),
    )
    plan = make_scheduled_plan("interleaved-1f1b:2")
    assert traced_run(swapped, plan).timeline.spans == recorded["interleaved"].timeline.spans


def test_another_order_than_the_plans_is_said(recorded: dict[str, Traced]) -> None:
    notes = traced_run(recorded["gpipe"], make_scheduled_plan("gpipe")).notes
    assert any("ScheduleGPipe's backwards begin with the first micro-batch" in x for x in notes)
    other = traced_run(recorded["gpipe"], make_scheduled_plan("1f1b")).notes
    assert any("the order differs from 1f1b: device 0 ran 0F2 as action 2" in x for x in other)


@pytest.mark.parametrize(("forward_s", "is_doubted"), [(1.0, False), (0.5, False), (0.1, True), (10.0, True)])
def test_a_plan_whose_stages_take_quite_another_time_is_doubted(
    tmp_path: Path, forward_s: float, is_doubted: bool
) -> None:
    plan = gplan.balance(make_profile([forward_s] * 2), num_devices=2, num_microbatches=4, schedule="1f1b")
    notes = traced_run(read_traced(made_traces(tmp_path, "1f1b")), plan).notes
    assert any("it may be the plan of another model" in note for note in notes) == is_doubted, notes


def test_gplan_import_trace_is_the_run() -> None:
    run = gplan.import_trace(sample("1f1b"), plan=make_scheduled_plan("1f1b"))
    assert run.timeline.step_s == read_traced(sample("1f1b")).timeline.step_s


def spoilt(name: str, folder: Path, spoil: Callable[[dict[str, Any]], object], *, ranks: int = 2) -> list[Path]:
    """The sample as plain files, each changed first."""
    paths = []
    for path in sample(name)[:ranks]:
        trace = json.loads(gzip.decompress(path.read_bytes()))
        spoil(trace)
        paths.append(folder / path.name.removesuffix(".gz"))
        paths[-1].write_text(json.dumps(trace))
    return paths


def without(*prefixes: str) -> Callable[[dict[str, Any]], None]:
    def spoil(trace: dict[str, Any]) -> None:
        trace["traceEvents"] = [x for x in trace["traceEvents"] if not x["name"].startswith(prefixes)]

    return spoil


def test_a_trace_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no actions of a pipeline: neither ranges such as 'PP:0F1'"):
        read_traced(spoilt("gpipe", tmp_path, without("Forward", "Backward", "c10d::")))


def test_a_trace_of_evaluation_alone_has_no_whole_step(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no whole step: 16 actions"):
        read_traced(spoilt("gpipe", tmp_path, without("Backward")))


def test_an_update_ends_before_the_next_step_where_nothing_in_the_trace_marks_steps(tmp_path: Path) -> None:
    found = read_traced(spoilt("1f1b", tmp_path, without("ProfilerStep"))).timeline
    expected = read_traced(sample("1f1b")).timeline
    assert expected.update_s(0) > 0
    for device in range(2):
        assert found.update_s(device) == pytest.approx(expected.update_s(device), rel=0.5)


def test_a_missing_rank_is_named_by_its_stage() -> None:
    with pytest.raises(FileError, match="have stages 0, 2, and stage 1 is missing.*found 1"):
        read_traced(sample("interleaved")[:1])
    with pytest.raises(FileError, match="both of rank 0; expected one trace of every rank"):
        read_traced([sample("gpipe")[0], sample("gpipe")[0]])


def test_a_missing_rank_of_a_schedule_without_stages_is_noticed_by_its_sends() -> None:
    with pytest.raises(FileError, match="rank 0 sends to or receives from a rank whose trace is missing"):
        read_traced(sample("gpipe")[:1])
    with pytest.raises(FileError, match="rank 1 sends to or receives from"):
        read_traced(sample("gpipe")[1:])


def test_sends_and_receives_in_another_order_than_1f1b_are_refused(tmp_path: Path) -> None:
    """Here the ranks are said to be each other's."""

    def swap(trace: dict[str, Any]) -> None:
        trace["distributedInfo"]["rank"] = 1 - trace["distributedInfo"]["rank"]

    with pytest.raises(FileError, match=r"not in Schedule1F1B's order on stage 0 of 2; expected .* with_stack=True"):
        read_traced(spoilt("1f1b", tmp_path, swap))


def test_ranks_of_two_replicas_are_refused(tmp_path: Path) -> None:
    paths = made_traces(tmp_path, "1f1b")
    other = tmp_path / "replica.json"
    other.write_text(paths[0].read_text().replace('"rank": 0', '"rank": 2'))
    with pytest.raises(FileError, match="both have stage 0; expected the traces of one pipeline"):
        read_traced([*paths, other])


def test_steps_that_no_two_ranks_share_are_refused(tmp_path: Path) -> None:
    paths = made_traces(tmp_path, "1f1b")
    paths[1].write_text(paths[1].read_text().replace("ProfilerStep#", "ProfilerStep#9"))
    with pytest.raises(FileError, match=r"no step is whole in all traces: .* has steps 1, 2, 3"):
        read_traced(paths)


def test_more_stages_or_other_microbatches_than_the_plan_are_refused(recorded: dict[str, Traced]) -> None:
    with pytest.raises(FileError, match=r"4 stages on 2 devices \(0/2 and 1/3\); the plan has 2 stages on 2 devices"):
        traced_run(recorded["interleaved"], make_scheduled_plan("1f1b"))
    with pytest.raises(FileError, match="4 micro-batches a step; the plan has 8"):
        traced_run(recorded["1f1b"], make_scheduled_plan("1f1b", num_microbatches=8))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is no trace, or is cut off"),
        (b"not a trace", "is no trace, or is cut off"),
        (b'{"traceEvents": [{"ph": "X", "name": 1}]}', r"is no trace.*`\$.traceEvents\[0\].name`"),
        (b'{"traceEvents": [{"ph": "X", "name": "PP:0F0"}', "is cut off"),
        (b'{"traceEvents": [], "baseTimeNanoseconds": "soon"}', "baseTimeNanoseconds"),
        (b'{"traceEvents": []}', "no actions of a pipeline"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "cannot be read"),
        (b'{"traceEvents": [{"ph": "X", "name": "J\xfcrgen", "ts": 1, "dur": 1}]}', "cannot be read"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=told):
        read_traced([path])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"rank7.json cannot be read: No such file"):
        read_traced([tmp_path / "rank7.json"])


def test_two_actions_in_one_range_are_told_apart_where_the_backward_begins(tmp_path: Path) -> None:
    writer = RankWriter(0)
    for step in range(3):
        writer.overlapped(step)
    traced = read_traced([writer.write(tmp_path)])
    spans = {str(x.action): (x.start_s, x.end_s) for x in traced.timeline.loop_spans}
    assert spans["0F1"] == pytest.approx((2.0, 3.0))
    assert spans["0B0"] == pytest.approx((3.0, 5.0))


def test_the_made_traces_follow_the_schedules_that_they_name(tmp_path: Path) -> None:
    timeline = read_traced(made_traces(tmp_path, "zb-v")).timeline
    orders = make_schedule("zb-v", num_devices=2, num_microbatches=NUM_MICROBATCHES).orders
    for device, order in enumerate(orders):
        assert tuple(x.action for x in timeline.loop_spans if x.device == device) == order
