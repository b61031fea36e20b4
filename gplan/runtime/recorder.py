"""Records start, end and processor time of every action of a step.

On a GPU two events on its stream enclose an action. They are read after the step and count from a moment at which
the GPU was idle.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from gplan.core import Action, ActionKind
from gplan_profiler.host.heartbeat import Heartbeat


@dataclass(frozen=True, slots=True)
class ActionTiming:
    """Start and end of one action by `time.perf_counter`, which all processes of a host share, and processor seconds."""

    action: Action
    start_s: float
    end_s: float
    busy_s: float


_Raw = tuple[Action, float, float, float]  # the fields of an ActionTiming, which takes longer to build


class ActionRecorder:
    """The actions of the current step.

    Caches are cold between actions, so the hot path is minimal: a plain context manager per action, and everything
    that can wait is done in `take`.
    """

    def __init__(self) -> None:
        self.under_way: Action | None = None  # after an error, the action that failed
        self.heartbeat = Heartbeat()
        self.is_on_gpu = False
        self._noted: list[_Raw] = []
        self._events: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = []
        self._start: tuple[float, torch.cuda.Event] | None = None  # the same moment on the host's clock and the GPU's

    def note(self, action: Action) -> AbstractContextManager[None]:
        """Record what runs inside the block. Two blocks in a row of one action, a forward and its loss, count as one."""
        self.under_way = action
        self.heartbeat.enter_action(action.kind, action.stage, action.microbatch)
        return self._on_gpu(action) if self.is_on_gpu else _CpuBlock(self, self._noted, action)

    def take(self) -> tuple[ActionTiming, ...]:
        """Return the actions recorded since the last call."""
        if self._start is not None:
            torch.cuda.synchronize()
            base_s, base = self._start
            for action, start, end in self._events:
                times_s = [base_s + base.elapsed_time(x) / 1e3 for x in (start, end)]
                self._noted.append((action, times_s[0], times_s[1], times_s[1] - times_s[0]))
            self._events.clear()
            self._start = None
        taken = list[ActionTiming]()
        for action, start_s, end_s, busy_s in self._noted:
            if taken and taken[-1].action == action:
                before = taken.pop()
                is_update = action.kind is ActionKind.OPTIMIZER  # what it waits for between its parts comes before it
                start_s = start_s - (before.end_s - before.start_s) if is_update else before.start_s
                busy_s += before.busy_s
            taken.append(ActionTiming(action, start_s, end_s, busy_s))
        self._noted.clear()
        return tuple(taken)

    @contextmanager
    def _on_gpu(self, action: Action) -> Iterator[None]:
        if self._start is None:
            torch.cuda.synchronize()
            self._start = time.perf_counter(), _recorded()
        start = _recorded()
        yield
        self._events.append((action, start, _recorded()))
        self.under_way = None


class _CpuBlock(AbstractContextManager[None]):
    """A block on the CPU; one that raises is not recorded and stays `under_way`."""

    def __init__(self, recorder: ActionRecorder, noted: list[_Raw], action: Action) -> None:
        self._recorder, self._noted, self._action = recorder, noted, action

    def __enter__(self) -> None:
        self._busy_s, self._start_s = time.thread_time(), time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            end_s = time.perf_counter()
            self._noted.append((self._action, self._start_s, end_s, time.thread_time() - self._busy_s))
            self._recorder.under_way = None


def _recorded() -> torch.cuda.Event:
    """Record an event on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
