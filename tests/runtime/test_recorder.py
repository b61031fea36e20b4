"""The times of actions that are recorded in parts."""

from __future__ import annotations

from itertools import count

import pytest

from gplan.core import Action, ActionKind
from gplan.runtime.recorder import ActionRecorder


@pytest.mark.parametrize(("kind", "start_s"), [(ActionKind.FORWARD, 0.0), (ActionKind.OPTIMIZER, 4.0)])
def test_what_an_update_waits_for_between_its_parts_is_not_in_it(
    monkeypatch: pytest.MonkeyPatch, kind: ActionKind, start_s: float
) -> None:
    now_s = count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now_s)))
    recorder, action = ActionRecorder(), Action(0, kind, 0)
    with recorder.note(action):
        pass  # from 0 to 1
    for _ in range(3):
        next(now_s)
    with recorder.note(action):
        pass  # from 5 to 6
    (found,) = recorder.take()
    assert (found.start_s, found.end_s) == (start_s, 6.0)
