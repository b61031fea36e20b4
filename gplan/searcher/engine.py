"""The best plan of a space for a memory: the most promising settings first, until bounds rule out all others.

A setting is first solved as if memory had no limit: a plan that fits all the same is its best, whatever may be
recomputed. Otherwise each way to recompute is solved under the limit. Every second time the setting with the smallest
bound is looked at instead of the one with the smallest guess, so that the proof grows with the plan. What was found
serves other limits too: less memory makes no plan better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from gplan.balancer import solve
from gplan.balancer.largest import fits_memory
from gplan.balancer.price import Problem, Solution, nothing_recomputed, price, without_memory
from gplan.costs import Costs
from gplan.downsets import DownSets
from gplan.nouns import Plan, Profile, RecomputeMode, Wishes
from gplan.searcher.least import Least
from gplan.searcher.space import Setting, Space
from gplan.units import seconds_text

Progress = Callable[[str, float], None]

_ONE_SOLVE_S = 1.0
_ROUNDING = 1e-12
_MANY_ACTIONS = 512  # stages times micro-batches, from where on the time to solve grows with them
_FIRST_GUESS_S = 1e-4  # for each of them, until some were timed
INFINITY = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A setting that may still lead to the best plan; the bound and the guess are of the cost that is minimised."""

    setting: Setting
    recompute: RecomputeMode | None  # None: not looked at yet
    bound: float
    guess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search within a memory came to."""

    plan: Plan | None
    lower_bound: float  # of the cost of every plan within the memory
    num_left: int = 0  # settings that were neither solved nor ruled out
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """The best plan of a setting and a way to recompute within some memory, if there is one, and its bound."""

    memory_bytes: int | None
    plan: Plan | None
    bound: float


@dataclass
class Engine:
    """Searches one space within one memory after the other, and keeps what it learns."""

    profile: Profile
    space: Space
    wishes: Wishes
    downsets: DownSets | None
    progress: Progress
    plans: list[Plan] = field(default_factory=list)  # all that were found to fit a memory
    num_solved: int = 0
    _free: dict[Setting, Solution | None] = field(default_factory=dict)
    _free_plans: dict[Setting, _Known] = field(default_factory=dict)
    _known: dict[tuple[Setting, RecomputeMode], list[_Known]] = field(default_factory=dict)
    _least: dict[tuple[Setting, RecomputeMode], Least] = field(default_factory=dict)
    _action_s: float = _FIRST_GUESS_S

    def best(self, memory_bytes: int | None, *, deadline_s: float, share: tuple[float, float]) -> Found:
        """The best plan within the memory, as far as the time allows; `share` is where progress begins and ends.

        An interrupt ends the search with the best plan so far; without one it is raised.
        """
        race = _Race(self, memory_bytes=memory_bytes, deadline_s=deadline_s, share=share)
        try:
            race.run()
        except KeyboardInterrupt:
            if race.best is None:
                raise
            return replace(race.found(), is_interrupted=True)
        return race.found()

    def cost_of(self, plan: Plan) -> float:
        """What is minimised: the step, or the device seconds of one."""
        return plan.prediction.step_s * self.weight(plan.num_stages * plan.num_replicas)

    def weight(self, num_devices: int) -> int:
        """What a second on these devices counts."""
        return num_devices if self.space.per_device else 1

    def opened(self, memory_bytes: int | None) -> list[Open]:
        """Every setting, not looked at yet."""
        self.progress(f"bounding {len(self.space.settings)} settings", 0.0)
        return [self._open(setting, None) for setting in self.space.settings]

    def looked_at(self, one: Open, memory_bytes: int | None, *, time_limit_s: float) -> tuple[list[Open], _Known]:
        """What a look at a setting leads to: ways to recompute that are left to look at, or a plan and its bound."""
        if one.recompute is not None:
            return [], self._solved(one.setting, one.recompute, memory_bytes, time_limit_s)
        base = self.problem(one.setting, self.space.recompute[0], memory_bytes)
        left_s = one.bound
        if memory_bytes is None or not self.least(one.setting, "never").cannot_fit(memory_bytes):
            free = self._freely(one.setting, base, time_limit_s)
            if free is None:
                return [], _Known(memory_bytes=memory_bytes, plan=None, bound=INFINITY)
            if memory_bytes is None or fits_memory(nothing_recomputed(base), free):
                if one.setting not in self._free_plans:
                    self._free_plans[one.setting] = self._kept(base, free)
                return [], self._free_plans[one.setting]
            left_s = max(left_s, free.lower_bound_s * self.weight(one.setting.num_devices))
        more = [self._open(one.setting, mode) for mode in self._ways(one.setting, memory_bytes)]
        return [replace(x, bound=max(x.bound, left_s), guess=max(x.guess, left_s)) for x in more], _NOTHING

    def seconds(self, one: Open) -> float:
        """About how long a look at the setting takes."""
        return self._action_s * one.setting.num_stages * one.setting.num_microbatches

    def least(self, setting: Setting, recompute: RecomputeMode) -> Least:
        """The bounds of a setting."""
        key = (setting, recompute)
        if key not in self._least:
            self._least[key] = Least(self.problem(setting, recompute, None))
        return self._least[key]

    def problem(self, setting: Setting, recompute: RecomputeMode, memory_bytes: int | None) -> Problem:
        """The problem to balance that a setting is."""
        costs = Costs(
            self.profile, setting.microbatch_size, setting.num_microbatches, setting.num_stages, self.downsets
        )
        return Problem(
            costs=costs,
            num_stages=setting.num_stages,
            schedule=setting.schedule,
            recompute=recompute,
            minimize="step-time",
            memory_bytes=memory_bytes,
            wishes=self.wishes,
            num_replicas=setting.num_replicas,
        )

    def _open(self, setting: Setting, recompute: RecomputeMode | None) -> Open:
        least, weight = self.least(setting, recompute or self.space.recompute[0]), self.weight(setting.num_devices)
        bound, guess = least.step_s * weight, least.guess_s * weight
        return Open(setting=setting, recompute=recompute, bound=bound, guess=guess)

    def _ways(self, setting: Setting, memory_bytes: int | None) -> Iterator[RecomputeMode]:
        """The ways to recompute that may fit; to select layers is never worse than to recompute none."""
        for mode in self.space.recompute:
            is_pointless = mode == "never" and "selected" in self.space.recompute
            if not is_pointless and not self.least(setting, mode).cannot_fit(memory_bytes or 0):
                yield mode

    def _freely(self, setting: Setting, base: Problem, time_limit_s: float) -> Solution | None:
        """The best partition without a memory limit."""
        if setting not in self._free:
            self._free[setting] = self._timed(without_memory(base), setting, time_limit_s)
        return self._free[setting]

    def _solved(self, setting: Setting, mode: RecomputeMode, memory_bytes: int | None, time_limit_s: float) -> _Known:
        """The best plan within the memory, by what is known of others where that settles it."""
        known = self._known.setdefault((setting, mode), [])
        for other in known:
            assert other.memory_bytes is not None and memory_bytes is not None, (
                "without a limit nothing is left to settle"
            )
            if other.memory_bytes >= memory_bytes and (other.plan is None or other.plan.peak_bytes <= memory_bytes):
                return other
        problem = self.problem(setting, mode, memory_bytes)
        solution = self._timed(problem, setting, time_limit_s)
        found = _Known(memory_bytes=memory_bytes, plan=None, bound=INFINITY)
        if solution is not None:
            found = self._kept(problem, solution)
        known.append(found)
        return found

    def _timed(self, problem: Problem, setting: Setting, time_limit_s: float) -> Solution | None:
        started_s = time.perf_counter()
        solution = solve(problem, time_limit_s=min(time_limit_s, _ONE_SOLVE_S))
        num_actions = setting.num_stages * setting.num_microbatches
        if num_actions >= _MANY_ACTIONS:
            self._action_s = 0.5 * (self._action_s + (time.perf_counter() - started_s) / num_actions)
        self.num_solved += 1
        return solution

    def _kept(self, problem: Problem, solution: Solution) -> _Known:
        plan = price(problem, solution, solve_s=0.0)
        self.plans.append(plan)
        bound = plan.proof.lower_bound_s * self.weight(plan.num_stages * plan.num_replicas)
        return _Known(memory_bytes=problem.memory_bytes, plan=plan, bound=bound)


_NOTHING = _Known(memory_bytes=None, plan=None, bound=INFINITY)


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
            one = min(self.left, key=lambda x: (x.bound, x.guess) if by_bound else (x.guess, x.bound))
            num_looks += 1
            self._report(one, started_s)
            self._look(one)

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
            f"{best}; {setting.num_stages} stages, {setting.num_microbatches} micro-batches, {setting.schedule}",
            min(high, low + (high - low) * done),
        )
