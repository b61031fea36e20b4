"""The best plan of a space within a memory: the most promising settings first, until bounds rule out all others.

The first plan is looked for among the simplest schedules, which are settled soonest. Once there is a plan, every second
time the setting with the smallest bound is looked at instead of the one with the smallest guess, so that the proof
grows with the plan. What would take longer than the time that is left is left out; its bound counts.

The fewer problems are left, the more time each of them gets. Time that is left at the end goes to those that more time
may lead to a better plan, the best ones first.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace

from gplan.core import Plan
from gplan.core.units import counted, seconds_text
from gplan.schedules.registry import schedule_info
from gplan.strategy_search.cache import INFINITY, ONE_SOLVE_S, Engine, Known, Open
from gplan.strategy_search.space import SIMPLEST, Setting

_ROUNDING = 1e-12
_SHARE = 0.5  # of the time that is left, for what is to come
_WORTH_MORE_S = 0.5  # below this the rest of the time is left as it is
_NEARLY = 0.9  # of its time: what takes less has ended by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search within a memory came to."""

    plan: Plan | None
    lower_bound: float  # of the cost of every plan within the memory
    num_left: int = 0  # settings of which something was neither solved nor ruled out
    is_interrupted: bool = False


def best_within(engine: Engine, memory_bytes: int | None, *, deadline_s: float, share: tuple[float, float]) -> Found:
    """The best plan within the memory, as far as the time allows; `share` is where progress begins and ends.

    An interrupt ends the search with the best plan so far; without one it is raised.
    """
    race = _Race(engine, memory_bytes=memory_bytes, deadline_s=deadline_s, share=share)
    try:
        race.run()
        race.settle_ties()
        race.deepen()
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
    solved: dict[Open, Known] = field(default_factory=dict)  # what was looked at and did not lead to other problems
    ended: set[Open] = field(default_factory=set)  # of these: to which more time would add nothing
    started_s: float = field(default_factory=time.perf_counter)

    def run(self) -> None:
        """Look at settings until all are ruled out or the time is up."""
        engine, limit = self.engine, self.memory_bytes
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
            self._report(one)
            self._look(one)

    def settle_ties(self) -> None:
        """The other schedules with the same numbers: one that takes as long is better if it needs less memory,
        or is simpler."""
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
            limit_s = min(max(1e-3, self.deadline_s - time.perf_counter()), ONE_SOLVE_S)
            more, known = self.engine.looked_at(one, self.memory_bytes, time_limit_s=limit_s)
            if known.plan is not None:
                return known.plan
            one = next((x for x in more if x.recompute == best.recompute), None)
        return None

    def deepen(self) -> None:
        """Give more time to what may still lead to a better plan: half of what is left to one after the other."""
        num_times = Counter[Open]()
        while (left_s := self.deadline_s - time.perf_counter()) > _WORTH_MORE_S:
            unproven = [x for x, known in self.solved.items() if known.bound < self._worth and x not in self.ended]
            if not unproven:
                return
            one = min(unproven, key=lambda x: (num_times[x], self._cost(self.solved[x].plan), x.guess))
            num_times[one] += 1
            self._report(one)
            limit_s, now_s = min(left_s, max(ONE_SOLVE_S, _SHARE * left_s)), time.perf_counter()
            known = self.engine.again(one, self.memory_bytes, time_limit_s=limit_s)
            self._learn(one, known, is_ended=time.perf_counter() - now_s < _NEARLY * limit_s)

    def found(self) -> Found:
        """What is known by now."""
        left = [x for x in (*self.left, *self.skipped) if x.bound < self._worth]
        undecided = [x for x, known in self.solved.items() if known.plan is None and known.bound < self._worth]
        bounds = [*(x.bound for x in left), *(x.bound for x in self.solved.values())]
        return Found(
            plan=self.best,
            lower_bound=min([self._cost(self.best), *bounds]),
            num_left=len({x.setting for x in (*left, *undecided)}),
        )

    def _cost(self, plan: Plan | None) -> float:
        return INFINITY if plan is None else self.engine.cost_of(plan)

    @property
    def _worth(self) -> float:
        """Only plans below this are better by more than rounding."""
        return self._cost(self.best) * (1 - _ROUNDING)

    def _look(self, one: Open) -> None:
        engine, left_s = self.engine, self.deadline_s - time.perf_counter()
        if self.best is not None and engine.seconds(one) > left_s:
            self.left.remove(one)
            self.skipped.append(one)
            return
        limit_s, now_s = min(left_s, max(ONE_SOLVE_S, _SHARE * left_s / self._num_to_come)), time.perf_counter()
        more, known = engine.looked_at(one, self.memory_bytes, time_limit_s=limit_s)
        self.left.remove(one)
        self.left += more
        if not more:
            self._learn(one, known, is_ended=time.perf_counter() - now_s < _NEARLY * limit_s)

    @property
    def _num_to_come(self) -> int:
        """Problems to solve, if none is ruled out."""
        num_ways = 0 if self.memory_bytes is None else len(self.engine.space.recompute)
        return sum(1 + num_ways if x.recompute is None else 1 for x in self.left)

    def _learn(self, one: Open, known: Known, *, is_ended: bool) -> None:
        self.solved[one] = known
        if is_ended:
            self.ended.add(one)
        if self._cost(known.plan) < self._worth:
            self.best = known.plan

    def _report(self, one: Open) -> None:
        low, high = self.share
        done = (time.perf_counter() - self.started_s) / max(self.deadline_s - self.started_s, 1e-9)
        setting = one.setting
        best = "no plan yet" if self.best is None else f"best {seconds_text(self.best.prediction.step_s)}"
        self.engine.progress(
            f"{best}; {counted(setting.num_devices, 'device')}, {setting.num_microbatches} micro-batches, "
            f"{schedule_info(setting.schedule).title}",
            min(high, low + (high - low) * done),
        )


def _numbers(one: Setting | Plan) -> tuple[int, ...]:
    """All that a schedule leaves as it is."""
    return one.num_devices, one.num_replicas, one.num_microbatches, one.microbatch_size
