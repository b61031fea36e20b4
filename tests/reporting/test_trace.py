"""The Chrome trace: what the viewers' format demands, and the timelines' own numbers."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gplan.nouns import ActionKind, Link
from gplan.reporting.frames import Subject
from gplan.reporting.trace import trace_json
from gplan.simulator import simulate
from tests.reporting.subjects import make_layered_profile, make_plan, make_run, make_scheduled_plan

Event = dict[str, Any]


def events_of(subject: Subject) -> list[Event]:
    events = json.loads(trace_json(subject))["traceEvents"]
    assert isinstance(events, list)
    return events


def only(events: list[Event], phase: str) -> list[Event]:
    return [event for event in events if event["ph"] == phase]


def thread_names(events: list[Event]) -> dict[tuple[int, int], str]:
    return {(x["pid"], x["tid"]): x["args"]["name"] for x in only(events, "M") if x["name"] == "thread_name"}


def crowded_plan() -> Any:
    """Transfers that take longer than the computing between them, so that they overlap."""
    slow = Link(latency_s=0.05, bytes_per_s=1e9)
    return make_plan(profile=replace(make_layered_profile(8), link=slow))


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return events_of(make_run())


def test_devices_of_the_prediction_come_before_those_of_the_measurement(events: list[Event]) -> None:
    names = {x["pid"]: x["args"]["name"] for x in only(events, "M") if x["name"] == "process_name"}
    assert names[0] == "predicted (computed): device 0"
    assert names[4] == "measured (torch engine): device 0"
    assert sorted(names) == list(range(8))


def test_the_virtual_engine_is_in_the_name_of_its_devices() -> None:
    names = [x["args"]["name"] for x in only(events_of(make_run(engine="virtual")), "M") if x["name"] == "process_name"]
    assert names[-1] == "measured (virtual engine): device 3"


def test_every_action_is_an_event_of_its_device_in_microseconds(events: list[Event]) -> None:
    run = make_run()
    for first_pid, timeline in ((0, simulate(run.plan)), (4, run.timeline)):
        for span in timeline.spans:
            if span.action.kind is ActionKind.OPTIMIZER:
                continue
            found = [
                x for x in only(events, "X") if x["pid"] == first_pid + span.device and x["name"] == str(span.action)
            ]
            assert len(found) == 1
            assert found[0]["ts"] == pytest.approx(1e6 * span.start_s, abs=1e-3)
            assert found[0]["dur"] == pytest.approx(1e6 * span.duration_s, abs=2e-3)
            assert found[0]["args"]["microbatch"] == span.action.microbatch


def test_no_duration_is_negative(events: list[Event]) -> None:
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in only(events, "X"))


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


def test_every_track_that_is_used_has_a_name(events: list[Event]) -> None:
    assert {(x["pid"], x["tid"]) for x in only(events, "X")} <= set(thread_names(events))


def test_every_arrow_that_starts_ends_at_the_action_that_needed_the_transfer(events: list[Event]) -> None:
    starts, ends = ({x["id"]: x for x in only(events, phase)} for phase in "sf")
    assert len(starts) == len(only(events, "s"))
    assert len(ends) == len(only(events, "f"))
    assert set(starts) == set(ends)
    run = make_run()
    assert len(starts) == len(simulate(run.plan).transfers) + len(run.timeline.transfers)
    begun = {(x["pid"], x["tid"], x["ts"]): x["name"] for x in only(events, "X")}
    for flow, start in starts.items():
        end = ends[flow]
        sent = begun[start["pid"], start["tid"], start["ts"]].split()[0]
        received = begun[end["pid"], end["tid"], end["ts"]]
        assert sent[1:] == received[1:], "the same direction and micro-batch"
        assert abs(int(sent[0]) - int(received[0])) == 1, "of neighbouring stages"
        assert end["ts"] >= start["ts"]


@pytest.mark.parametrize("schedule", ["interleaved-1f1b:2", "zb-h1", "zb-v", "own:0F0 0I0 0W0 / 1F0 1B0"])
def test_processes_are_devices_whatever_stages_they_hold(schedule: str) -> None:
    plan = make_scheduled_plan(schedule, num_microbatches=1 if schedule.startswith("own") else 4)
    events, timeline = events_of(plan), simulate(plan)
    assert {event["pid"] for event in events} == {0, 1}
    places = {(x["args"]["stage"], x["pid"]) for x in only(events, "X") if x["tid"] == 0}
    assert places == set(enumerate(plan.devices))
    assert len(only(events, "s")) == len(only(events, "f")) == len(timeline.transfers)
    for start, end in zip(only(events, "s"), only(events, "f"), strict=True):
        assert start["pid"] != end["pid"]


def test_what_each_predicted_device_holds_is_a_counter_whose_most_is_its_peak() -> None:
    run = make_run(make_scheduled_plan("zb-v"))
    counters = only(events_of(run), "C")
    most = [max(sum(x["args"].values()) for x in counters if x["pid"] == i) for i in range(2)]
    assert most == list(run.plan.device_peak_bytes)
    assert {x["pid"] for x in counters} == {0, 1}, "of the prediction alone"


def test_a_plan_alone_has_no_measured_devices() -> None:
    assert {event["pid"] for event in events_of(make_plan())} == {0, 1, 2, 3}
