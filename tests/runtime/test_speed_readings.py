"""Readings of the yardstick in a run. The order of moments counts, not how long anything takes."""

from __future__ import annotations

import time
from functools import partial
from itertools import groupby

import pytest
import torch

from gplan.core import Action, ActionKind
from gplan.runtime.recorder import ActionRecorder
from gplan.runtime.run.speed_readings import SpeedReadings
from profiler.timing import yardstick


def test_a_step_has_the_mean_of_its_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1e9]
    readings = SpeedReadings(torch.device("cpu"))
    monkeypatch.setattr(readings._yardstick, "_now", lambda: now_s[0])
    seconds = iter([1e-3, 3e-3, 8e-3])

    def read(self: yardstick.Yardstick, samples: object, num_kept: int) -> None:
        found = next(seconds)
        for part in self.parts:
            part.add_clean(found, now_s[0])

    monkeypatch.setattr(yardstick.Yardstick, "_read", read)
    assert readings.take() is None
    readings.after_backward()
    now_s[0] += 10.0
    readings.after_backward()
    times = readings.take()
    assert times is not None and times.compute_s == times.memory_s == times.interpreter_s == pytest.approx(2e-3)
    now_s[0] += 10.0
    readings.after_backward()
    times = readings.take()
    assert times is not None and times.compute_s == pytest.approx(8e-3)
    assert readings.take() is None


def test_parts_run_a_few_times_right_after_layers() -> None:
    calls = list[str]()
    readings = SpeedReadings(torch.device("cpu"))
    readings._yardstick._parts = {name: (partial(calls.append, name), 1) for name in yardstick.PARTS}
    readings.after_backward()
    assert [len([*run]) for _, run in groupby(calls)] == [4 + 2, 1 + 2, 1 + 2]
    assert readings.take() is not None


def test_only_backwards_that_did_not_fail_are_followed_by_a_reading() -> None:
    recorder, seen = ActionRecorder(), list[ActionKind]()
    for kind in ActionKind:
        recorder.after_backward = lambda kind=kind: seen.append(kind)  # type: ignore[misc]
        with recorder.note(Action(0, kind, 0)):
            pass
        with pytest.raises(ValueError), recorder.note(Action(0, kind, 1)):
            raise ValueError
    assert seen == [ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT]


def test_readings_are_in_no_actions_time() -> None:
    recorder, read_at_s = ActionRecorder(), list[float]()
    recorder.after_backward = lambda: read_at_s.append(time.perf_counter())
    for i in range(2):
        with recorder.note(Action(0, ActionKind.BACKWARD, i)):
            pass
    first, second = recorder.take()
    assert first.end_s <= read_at_s[0] <= second.start_s
    assert second.end_s <= read_at_s[1]
