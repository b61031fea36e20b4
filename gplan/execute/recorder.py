"""Notes when each action of a step ran and how long the processor was at hand for it.

On a GPU two events on its stream enclose an action; they are read when the step is over, and count from a moment at
which the GPU had nothing to do. (This half has been run on no GPU yet.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from gplan.execute.whereabouts import Whereabouts
from gplan.nouns import Action


@dataclass(frozen=True, slots=True)
class Noted:
    """One action: start and end by `time.perf_counter`, which the processes of a host share, and processor seconds."""

    action: Action
    start_s: float
    end_s: float
    busy_s: float


@dataclass(slots=True)
class Recorder:
    """The actions of the step under way."""

    noted: list[Noted] = field(default_factory=list)
    under_way: Action | None = None  # after an error, what failed
    whereabouts: Whereabouts = field(default_factory=Whereabouts)  # for whoever watches this process
    is_on_gpu: bool = False
    _events: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    _start: tuple[float, torch.cuda.Event] | None = None  # a moment by the host's clock and the GPU's

    @contextmanager
    def note(self, action: Action) -> Iterator[None]:
        """Record what runs inside the block; an action noted twice is stretched, its loss included in its forward."""
        self.under_way = action
        self.whereabouts.enter_action(action.kind, action.stage, action.microbatch)
        with self._on_gpu(action) if self.is_on_gpu else self._on_cpu(action):
            yield
        self.under_way = None

    def take(self) -> tuple[Noted, ...]:
        """What was recorded since the last call."""
        if self._start is not None:
            torch.cuda.synchronize()
            base_s, base = self._start
            for action, start, end in self._events:
                times_s = [base_s + base.elapsed_time(x) / 1e3 for x in (start, end)]
                self._add(Noted(action, times_s[0], times_s[1], times_s[1] - times_s[0]))
            self._events.clear()
            self._start = None
        taken = tuple(self.noted)
        self.noted.clear()
        return taken

    @contextmanager
    def _on_cpu(self, action: Action) -> Iterator[None]:
        busy_s, start_s = time.thread_time(), time.perf_counter()
        yield
        end_s, busy_s = time.perf_counter(), time.thread_time() - busy_s
        self._add(Noted(action, start_s, end_s, busy_s))

    @contextmanager
    def _on_gpu(self, action: Action) -> Iterator[None]:
        if self._start is None:
            torch.cuda.synchronize()
            self._start = time.perf_counter(), _recorded()
        start = _recorded()
        yield
        self._events.append((action, start, _recorded()))

    def _add(self, noted: Noted) -> None:
        if self.noted and self.noted[-1].action == noted.action:
            before = self.noted.pop()
            noted = Noted(noted.action, before.start_s, noted.end_s, before.busy_s + noted.busy_s)
        self.noted.append(noted)


def _recorded() -> torch.cuda.Event:
    """An event on the current stream, now."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
