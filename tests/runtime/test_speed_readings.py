"""Readings of the yardstick in a run. The order of moments counts, not how long anything takes."""

from __future__ import annotations

import time
from functools import partial
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

from gplan.core import Action, ActionKind
from gplan.runtime.recorder import ActionRecorder
from gplan.runtime.run import speed_readings
from gplan.runtime.run.speed_readings import SpeedReadings
from profiler.timing import yardstick


def test_a_step_has_the_readings_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1e9]
    monkeypatch.setattr(speed_readings, "time", SimpleNamespace(time=lambda: now_s[0]))
    readings = SpeedReadings(torch.device("cpu"))
    monkeypatch.setattr(readings._yardstick, "_now", lambda: now_s[0])
    seconds = iter([1e-3, 3e-3, 8e-3])

    def read(self: yardstick.Yardstick, *_: object) -> None:
        found = next(seconds)
        for part in self.parts:
            part.add_clean(found, now_s[0])
            part.add_clean(3 * found, now_s[0])
        now_s[0] += 1.0

    monkeypatch.setattr(yardstick.Yardstick, "_read", read)

    def taken() -> list[float]:
        return [x.compute_s for x in readings.take()]

    assert taken() == []
    readings.between_actions()
    readings.between_actions()  # not due yet
    now_s[0] += 10.0
    readings.between_actions()
    assert taken() == pytest.approx([2e-3, 6e-3])
    now_s[0] += 10.0
    readings.between_actions()
    assert taken() == pytest.approx([16e-3])
    assert taken() == []


def test_products_run_as_often_before_a_reading_as_in_a_profile() -> None:
    """After layers that do few products, four of them left the fifth 1.2 times as long as the twelfth."""
    calls = list[str]()
    readings = SpeedReadings(torch.device("cpu"))
    readings._yardstick._parts = {name: (partial(calls.append, name), 1) for name in yardstick.PARTS}
    readings.between_actions()
    assert [len([*run]) for _, run in groupby(calls)] == [14 + 2, 1 + 2, 6 + 2]
    assert len(readings.take()) == 1


def test_only_backwards_that_did_not_fail_are_followed_by_a_reading() -> None:
    recorder, seen = ActionRecorder(), list[ActionKind]()
    for kind in ActionKind:
        recorder.between_actions = lambda kind=kind: seen.append(kind)  # type: ignore[misc]
        with pytest.raises(ValueError), recorder.note(Action(0, kind, 1)):
            raise ValueError
        for microbatch in range(2):
            with recorder.note(Action(0, kind, microbatch)):
                pass
        recorder.take()
        recorder.between_actions = lambda: None
        with recorder.note(Action(1, ActionKind.FORWARD, 0)):
            pass
    assert seen == [ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT]


def test_readings_come_right_before_the_next_action() -> None:
    """Not right after a backward: then it has not been sent, and the rank that waits for it does not compute."""
    recorder, read_at_s = ActionRecorder(), list[float]()
    recorder.between_actions = lambda: read_at_s.append(time.perf_counter())
    with recorder.note(Action(0, ActionKind.BACKWARD, 0)):
        pass
    time.sleep(0.01)
    sent_at_s = time.perf_counter()
    with recorder.note(Action(0, ActionKind.FORWARD, 1)):
        pass
    first, second = recorder.take()
    assert first.end_s <= sent_at_s <= read_at_s[0] <= second.start_s
