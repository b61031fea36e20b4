"""The best plan of a space within a memory: the most promising settings first, until bounds rule out all others.

The first plan is looked for among the simplest schedules, which are settled soonest. Once there is a plan, every second time the setting with the smallest bound is looked at instead of the one with the
smallest guess, so that the proof grows with the plan. What would take longer than the time that is left is left out; its bound counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from gplan.nouns import Plan
from gplan.schedules import named
from gplan.searcher.engine import INFINITY, Engine, Open
from gplan.searcher.space import SIMPLEST, Setting
from gplan.units import counted, seconds_text

_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search within a memory came to."""

    plan: Plan | None
    lower_bound: float  # of the cost of every plan within the memory
    num_left: int = 0  # settings that were neither solved nor ruled out
    is_interrupted: bool = False


def best_within(engine: Engine, memory_bytes: int | None, *, deadline_s: float, share: tuple[float, float]) -> Found:
    """The best plan within the memory, as far as the time allows; `share` is where progress begins and ends.

    An interrupt ends the search with the best plan so far; without one it is raised.
    """
    race = _Race(engine, memory_bytes=memory_bytes, deadline_s=deadline_s, share=share)
    try:
        race.run()
        race.settle_ties()
    except KeyboardInterrupt:
        if race.best is None:
            raise
        return replace(race.found(), is_interrupted=True)
    return race.found()


@dataclass
class _Race:
    """One search: the settings that are left, and the best plan so far."""

    engine: Engine
    memory_bytes: int | None
    deadline_s: float
    share: tuple[float, float]
    best: Plan | None = None
    left: list[Open] = field(default_factory=list)
    skipped: list[Open] = field(default_factory=list)
    solved_bound: float = INFINITY

    def run(self) -> None:
        """Look at settings until all are ruled out or the time is up."""
        engine, started_s = self.engine, time.perf_counter()
        limit = self.memory_bytes
        fitting = [x for x in engine.plans if limit is None or x.peak_bytes <= limit]
        self.best = min(fitting, key=engine.cost_of, default=None)
        self.left = engine.opened(limit)
        num_looks = 0
        while time.perf_counter() < self.deadline_s:
            self.left = [x for x in self.left if x.bound < self._worth]
            if not self.left:
                return
            by_bound = num_looks % 2 == 1
            soon = [x for x in self.left if x.setting.schedule in SIMPLEST] if self.best is None else []
            one = min(soon or self.left, key=lambda x: x.bound if by_bound else x.guess)  # the simplest of equal ones
            num_looks += self.best is not None
            self._report(one, started_s)
            self._look(one)

    def settle_ties(self) -> None:
        """The other schedules with the same numbers: one that takes as long is better if it needs less memory, or is simpler."""
        engine = self.engine
        order = [x.schedule for x in engine.space.settings]
        for setting in engine.space.settings:
            best = self.best
            if best is None or time.perf_counter() > self.deadline_s:
                return
            most = engine.cost_of(best) * (1 + _ROUNDING)
            is_rival = _numbers(setting) == _numbers(best) and setting.schedule != best.schedule
            plan = self._plan_of(setting, best) if is_rival and engine.bound_of(setting) <= most else None
            if plan is not None and engine.cost_of(plan) <= most:
                self.best = min(best, plan, key=lambda plan: (plan.peak_bytes, order.index(plan.schedule)))

    def _plan_of(self, setting: Setting, best: Plan) -> Plan | None:
        """The best plan of a setting, recomputing as another plan does where it must."""
        one: Open | None = Open(setting=setting, recompute=None, bound=0.0, guess=0.0)
        while one is not None:
            left_s = max(1e-3, self.deadline_s - time.perf_counter())
            more, known = self.engine.looked_at(one, self.memory_bytes, time_limit_s=left_s)
            if known.plan is not None:
                return known.plan
            one = next((x for x in more if x.recompute == best.recompute), None)
        return None

    def found(self) -> Found:
        """What is known by now."""
        left = [x.bound for x in (*self.left, *self.skipped) if x.bound < self._worth]
        cost = INFINITY if self.best is None else self.engine.cost_of(self.best)
        return Found(plan=self.best, lower_bound=min([self.solved_bound, cost, *left]), num_left=len(left))

    @property
    def _worth(self) -> float:
        """Only plans below this are better by more than rounding."""
        return INFINITY if self.best is None else self.engine.cost_of(self.best) * (1 - _ROUNDING)

    def _look(self, one: Open) -> None:
        engine, left_s = self.engine, self.deadline_s - time.perf_counter()
        if self.best is not None and engine.seconds(one) > left_s:
            self.left.remove(one)
            self.skipped.append(one)
            return
        more, known = engine.looked_at(one, self.memory_bytes, time_limit_s=left_s)
        self.left.remove(one)
        self.left += more
        self.solved_bound = min(self.solved_bound, known.bound)
        if known.plan is not None and engine.cost_of(known.plan) < self._worth:
            self.best = known.plan

    def _report(self, one: Open, started_s: float) -> None:
        low, high = self.share
        done = (time.perf_counter() - started_s) / max(self.deadline_s - started_s, 1e-9)
        setting = one.setting
        best = "no plan yet" if self.best is None else f"best {seconds_text(self.best.prediction.step_s)}"
        self.engine.progress(
            f"{best}; {counted(setting.num_devices, 'device')}, {setting.num_microbatches} micro-batches, "
            f"{named(setting.schedule).title}",
            min(high, low + (high - low) * done),
        )


def _numbers(one: Setting | Plan) -> tuple[int, ...]:
    """All that a schedule leaves as it is."""
    return one.num_devices, one.num_replicas, one.num_microbatches, one.microbatch_size
