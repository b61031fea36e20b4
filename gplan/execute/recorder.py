"""Notes when each action of a step ran and how long the processor was at hand for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

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

    @contextmanager
    def note(self, action: Action) -> Iterator[None]:
        """Record what runs inside the block; an action noted twice is stretched, its loss included in its forward."""
        self.under_way = action
        self.whereabouts.enter_action(action.kind, action.stage, action.microbatch)
        busy_s, start_s = time.thread_time(), time.perf_counter()
        yield
        end_s, busy_s = time.perf_counter(), time.thread_time() - busy_s
        if self.noted and self.noted[-1].action == action:
            before = self.noted.pop()
            start_s, busy_s = before.start_s, busy_s + before.busy_s
        self.noted.append(Noted(action, start_s, end_s, busy_s))
        self.under_way = None

    def take(self) -> tuple[Noted, ...]:
        """What was recorded since the last call."""
        taken = tuple(self.noted)
        self.noted.clear()
        return taken
