"""The Chrome trace: what the documented format demands, and the timelines' own numbers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gplan.core import IdleCause, Link
from gplan.reporting.chrome_trace import trace_json
from gplan.reporting.subject import Subject
from gplan.schedules.registry import every_schedule
from gplan.simulation.bubble import idle_by_cause
from gplan.simulation.simulator import simulate
from tests.reporting.subjects import make_layered_profile, make_plan, make_run, make_scheduled_plan
from tests.reporting.trace_format import breaches

Event = dict[str, Any]

SCHEDULES = (*every_schedule(), "custom:0F0 0I0 0W0 / 1F0 1B0")


def events_of(subject: Subject) -> list[Event]:
    events = json.loads(trace_json(subject))["traceEvents"]
    assert isinstance(events, list)
    return events


def only(events: list[Event], phase: str) -> list[Event]:
    return [event for event in events if event["ph"] == phase]


def thread_names(events: list[Event]) -> dict[tuple[int, int], str]:
    return {(x["pid"], x["tid"]): x["args"]["name"] for x in only(events, "M") if x["name"] == "thread_name"}


def process_names(events: list[Event]) -> dict[int, str]:
    return {x["pid"]: x["args"]["name"] for x in only(events, "M") if x["name"] == "process_name"}


def scheduled(schedule: str) -> Any:
    return make_scheduled_plan(schedule, num_microbatches=1 if schedule.startswith("custom") else 4)


def crowded_plan() -> Any:
    """Transfers that take longer than the computing between them, so that they overlap."""
    slow = Link(latency_s=0.05, bytes_per_s=1e9)
    return make_plan(profile=replace(make_layered_profile(8), link=slow))


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return events_of(make_run())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("is_run", [False, True], ids=["plan", "run"])
def test_the_trace_of_every_schedule_keeps_the_documented_rules(schedule: str, is_run: bool) -> None:
    plan = scheduled(schedule)
    assert breaches(trace_json(make_run(plan) if is_run else plan)) == []


@pytest.mark.parametrize("subject", [make_run(crowded_plan()), make_run(engine="virtual"), make_plan(num_stages=1)])
def test_so_do_traces_of_slow_links_of_the_virtual_engine_and_of_one_device(subject: Subject) -> None:
    assert breaches(trace_json(subject)) == []


def _first(events: list[Event], phase: str) -> Event:
    return next(x for x in events if x["ph"] == phase)


def _longer(events: list[Event]) -> None:
    waited = sorted((x for x in only(events, "X") if x["tid"] == 1), key=lambda x: (x["pid"], x["ts"]))
    waited[0]["dur"] = waited[1]["ts"] + waited[1]["dur"] / 2 - waited[0]["ts"]


BREACHES: list[tuple[Callable[[list[Event]], object], str]] = [
    (lambda events: _first(events, "X").pop("dur"), "needs a dur"),
    (lambda events: _first(events, "X").update(ts="1.5"), "number of microseconds"),
    (lambda events: _first(events, "X").update(ts=-1.0), "number of microseconds"),
    (lambda events: _first(events, "X").update(pid=77), "has no name"),
    (lambda events: _first(events, "X").update(ph="Y"), "phase 'Y'"),
    (lambda events: _first(events, "C")["args"].update(activations="many"), "no number"),
    (lambda events: _first(events, "M").update(name="process_nam"), "known name"),
    (_longer, "overlap"),
]


@pytest.mark.parametrize(("spoil", "told"), BREACHES, ids=[told for _, told in BREACHES])
def test_the_rules_find_what_is_against_them(spoil: Callable[[list[Event]], object], told: str) -> None:
    trace = json.loads(trace_json(crowded_plan()))
    spoil(trace["traceEvents"])
    assert any(told in said for said in breaches(json.dumps(trace).encode()))


def test_devices_of_the_prediction_come_before_those_of_the_measurement(events: list[Event]) -> None:
    names = process_names(events)
    assert names[1] == "predicted: device 0"
    assert names[5] == "measured (torch engine): device 0"
    assert sorted(names) == list(range(1, 9))


def test_the_virtual_engine_is_in_the_name_of_its_devices() -> None:
    assert process_names(events_of(make_run(engine="virtual")))[8] == "measured (virtual engine): device 3"


def test_every_action_is_an_event_of_its_device_in_microseconds(events: list[Event]) -> None:
    run = make_run()
    for first_pid, timeline in ((1, simulate(run.plan)), (5, run.timeline)):
        begun = {(x["pid"], x["name"]): x for x in only(events, "X") if x["cat"] == "action"}
        for span in timeline.loop_spans:
            found = begun[first_pid + span.device, str(span.action)]
            assert found["ts"] == pytest.approx(1e6 * span.start_s, abs=1e-3)
            assert found["dur"] == pytest.approx(1e6 * span.duration_s, abs=2e-3)
    actions = [x for x in only(events, "X") if x["cat"] == "action"]
    assert len(actions) == len(simulate(run.plan).spans) + len(run.timeline.spans)


def test_every_event_says_stage_microbatch_kind_and_layers(events: list[Event]) -> None:
    for event in events:
        if event["ph"] == "X" and event["cat"] != "idle":
            assert {"stage", "microbatch", "kind", "layers"} <= set(event["args"]), event
    forward = next(x for x in only(events, "X") if x["name"] == "2F5")
    assert forward["args"] == {"stage": 2, "microbatch": 5, "kind": "forward", "layers": "e … f (2)"}
    update = next(x for x in only(events, "X") if x["name"] == "optimizer")
    assert (update["args"]["stage"], update["args"]["microbatch"], update["args"]["kind"]) == (0, None, "optimizer")


def test_a_transfer_says_where_it_goes_and_what_it_carries(events: list[Event]) -> None:
    sent = next(x for x in only(events, "X") if x["name"] == "1B3 to device 0")
    assert sent["args"]["kind"] == "communication: gradients"
    assert (sent["args"]["stage"], sent["args"]["to_stage"], sent["args"]["num_bytes"]) == (1, 0, 2**20)


def test_the_waiting_of_each_cause_adds_up_to_the_bubble() -> None:
    plan = make_scheduled_plan("zb-v")
    waiting = [x for x in only(events_of(plan), "X") if x["cat"] == "idle"]
    idle = idle_by_cause(simulate(plan))
    for cause in (IdleCause.WARM_UP, IdleCause.DRAIN, IdleCause.IMBALANCE, IdleCause.COMMUNICATION):
        found_us = sum(x["dur"] for x in waiting if x["name"] == f"idle: {cause.value}")
        assert found_us == pytest.approx(1e6 * idle[cause], abs=1e-2)


@pytest.mark.parametrize("subject", [make_run(), make_run(crowded_plan()), make_plan(schedule="gpipe")])
def test_events_on_one_track_never_overlap(subject: Subject) -> None:
    tracks = defaultdict(list)
    for event in only(events_of(subject), "X"):
        tracks[event["pid"], event["tid"]].append((round(1e3 * event["ts"]), round(1e3 * event["dur"])))
    for spans in tracks.values():
        for (start, duration), (after, _) in pairwise(sorted(spans)):
            assert start + duration <= after


def test_transfers_that_overlap_get_further_communication_tracks() -> None:
    names = set(thread_names(events_of(crowded_plan())).values())
    assert {"compute", "waiting", "communication 1", "communication 2"} <= names


@pytest.mark.parametrize("schedule", ["interleaved-1f1b:2", "zb-h1", "zb-v", "custom:0F0 0I0 0W0 / 1F0 1B0"])
def test_processes_are_devices_whatever_stages_they_hold(schedule: str) -> None:
    plan = scheduled(schedule)
    events = events_of(plan)
    assert {event["pid"] for event in events} == {1, 2}
    places = {(x["args"]["stage"], x["pid"] - 1) for x in only(events, "X") if x["cat"] == "action"}
    assert places == set(enumerate(plan.devices))


def test_what_each_predicted_device_holds_is_a_counter_whose_most_is_its_peak() -> None:
    run = make_run(make_scheduled_plan("zb-v"))
    counters = [x for x in only(events_of(run), "C") if x["name"] == "memory in bytes"]
    most = [max(sum(x["args"].values()) for x in counters if x["pid"] == 1 + i) for i in range(2)]
    assert most == list(run.plan.device_peak_bytes)
    assert {x["pid"] for x in counters} == {1, 2}, "of the prediction alone"


def test_a_plan_alone_has_no_measured_devices() -> None:
    assert {event["pid"] for event in events_of(make_plan())} == {1, 2, 3, 4}
