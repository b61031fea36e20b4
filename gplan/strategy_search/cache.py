"""What is known of the settings of a space: their bounds, and the best plans of those that were looked at.

A setting is first solved as if memory had no limit: a plan that fits all the same is its best, whatever may be
recomputed. Otherwise each way to recompute is solved under the limit. What was found serves other limits too, as less
memory makes no plan better, and what was found with one way to recompute is where the search with another begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from gplan.core import Constraints, Plan, Profile, RecomputeMode
from gplan.core.errors import NoPlanError
from gplan.cost.stage_costs import Costs
from gplan.graph.down_sets import DownSets
from gplan.partition.plan_evaluation import fits_memory, goal_s, price
from gplan.partition.problem import Problem, Solution, nothing_recomputed, without_memory
from gplan.partition.solve import solve
from gplan.partition.validation import why_not_selected
from gplan.strategy_search.bounds import Least
from gplan.strategy_search.heuristics import guess_s
from gplan.strategy_search.space import Setting, Space

Progress = Callable[[str, float], None]

ONE_SOLVE_S = 1.0
"""What a look at a problem takes at most, unless there is time for more."""

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
class Known:
    """The best plan of a setting and a way to recompute within some memory, if there is one, and its bound."""

    memory_bytes: int | None
    plan: Plan | None
    bound: float


_Key: TypeAlias = tuple[Setting, RecomputeMode, int | None]


@dataclass
class Engine:
    """Looks at the settings of one space within one memory after the other, and keeps what it learns."""

    profile: Profile
    space: Space
    constraints: Constraints
    downsets: DownSets | None
    progress: Progress
    plans: list[Plan] = field(default_factory=list)  # all that were found to fit a memory
    num_solved: int = 0
    undecided: set[_Key] = field(default_factory=set)  # neither a plan was found in time nor that there is none
    _found: dict[Setting, list[Solution]] = field(default_factory=dict)
    _free: dict[Setting, Solution | None] = field(default_factory=dict)
    _free_plans: dict[Setting, Known] = field(default_factory=dict)
    _known: dict[tuple[Setting, RecomputeMode], list[Known]] = field(default_factory=dict)
    _costs: dict[tuple[int, int, int], Costs] = field(default_factory=dict)
    _least: dict[tuple[Setting, RecomputeMode], Least] = field(default_factory=dict)
    _action_s: float = _FIRST_GUESS_S

    def cost_of(self, plan: Plan) -> float:
        """What is minimised: the step, or the device seconds of one."""
        return plan.prediction.step_s * self.weight(plan.num_devices * plan.num_replicas)

    def weight(self, num_devices: int) -> int:
        """What a second on these devices counts."""
        return num_devices if self.space.per_device else 1

    def opened(self, memory_bytes: int | None) -> list[Open]:
        """Every setting, not looked at yet."""
        self.progress(f"bounding {len(self.space.settings)} settings", 0.0)
        return [self._open(setting, None, memory_bytes) for setting in self.space.settings]

    def looked_at(self, one: Open, memory_bytes: int | None, *, time_limit_s: float) -> tuple[list[Open], Known]:
        """What a look at a setting leads to: ways to recompute that are left to look at, or a plan and its bound."""
        if one.recompute is not None:
            return [], self._solved(one.setting, one.recompute, memory_bytes, time_limit_s)
        base = self.problem(one.setting, self.space.recompute[0], memory_bytes)
        left_s = one.bound
        if memory_bytes is None or not self.least(one.setting, "never").cannot_fit(memory_bytes):
            free = self._freely(one.setting, base, time_limit_s)
            if free is None:
                return [], Known(memory_bytes=memory_bytes, plan=None, bound=INFINITY)
            if memory_bytes is None or fits_memory(nothing_recomputed(base), free.stages):
                if one.setting not in self._free_plans:
                    self._free_plans[one.setting] = self._kept(base, free)
                return [], self._free_plans[one.setting]
            left_s = max(left_s, free.lower_bound_s * self.weight(one.setting.num_used))
        more = [self._open(one.setting, mode, memory_bytes) for mode in self._ways(one.setting, memory_bytes)]
        return [replace(x, bound=max(x.bound, left_s), guess=max(x.guess, left_s)) for x in more], _NOTHING

    def again(self, one: Open, memory_bytes: int | None, *, time_limit_s: float) -> Known:
        """What is known after more time for a setting that was looked at, and led to a plan or to nothing yet."""
        if one.recompute is None:
            return self._freely_again(one.setting, memory_bytes, time_limit_s)
        before = self._settled(one.setting, one.recompute, memory_bytes)
        found = self._solved_anew(one.setting, one.recompute, memory_bytes, time_limit_s)
        if before is None:
            return found
        better = min(found, before, key=lambda x: INFINITY if x.plan is None else self.cost_of(x.plan))
        known = Known(memory_bytes=memory_bytes, plan=better.plan, bound=max(found.bound, before.bound))
        self._known[one.setting, one.recompute].insert(0, known)
        return known

    def bound_of(self, setting: Setting) -> float:
        """Below which no cost of a setting is, so far as is known."""
        weight, free = self.weight(setting.num_used), self._free.get(setting)
        least_s = self.least(setting, self.space.recompute[0]).step_s
        return weight * (least_s if free is None else max(least_s, free.lower_bound_s))

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
        key = setting.microbatch_size, setting.num_microbatches, setting.num_devices
        if key not in self._costs:
            self._costs[key] = Costs(self.profile, *key, self.downsets)
        return Problem(
            costs=self._costs[key],
            num_stages=setting.num_stages,
            schedule=setting.schedule,
            recompute=recompute,
            minimize="step-time",
            memory_bytes=memory_bytes,
            constraints=self.constraints,
            num_replicas=setting.num_replicas,
        )

    def _open(self, setting: Setting, recompute: RecomputeMode | None, memory_bytes: int | None) -> Open:
        least, weight = self.least(setting, recompute or self.space.recompute[0]), self.weight(setting.num_used)
        bound, guess = least.step_s * weight, guess_s(least, memory_bytes=memory_bytes) * weight
        return Open(setting=setting, recompute=recompute, bound=bound, guess=guess)

    def _ways(self, setting: Setting, memory_bytes: int | None) -> Iterator[RecomputeMode]:
        """The ways to recompute that may fit; to select layers is never worse than to recompute none."""
        modes = self.space.recompute
        if why_not_selected(setting.schedule):
            modes = tuple(mode for mode in modes if mode != "selected")
        for mode in modes:
            is_pointless = mode == "never" and "selected" in modes
            if not is_pointless and not self.least(setting, mode).cannot_fit(memory_bytes or 0):
                yield mode

    def _freely(self, setting: Setting, base: Problem, time_limit_s: float) -> Solution | None:
        """The best partition without a memory limit."""
        if setting not in self._free:
            self._free[setting] = self._timed(without_memory(base), setting, time_limit_s)
        return self._free[setting]

    def _freely_again(self, setting: Setting, memory_bytes: int | None, time_limit_s: float) -> Known:
        """The same for a setting whose best partition without a limit fits."""
        base = self.problem(setting, self.space.recompute[0], memory_bytes)
        before, known = self._free[setting], self._free_plans[setting]
        found = self._timed(without_memory(base), setting, time_limit_s)
        assert before is not None and found is not None, "there is a plan"
        lower_bound_s = max(found.lower_bound_s, before.lower_bound_s)
        if fits_memory(nothing_recomputed(base), found.stages):
            self._free[setting] = replace(found, lower_bound_s=lower_bound_s)
            self._free_plans[setting] = self._kept(base, replace(found, lower_bound_s=lower_bound_s))
        else:
            self._free[setting] = replace(before, lower_bound_s=lower_bound_s)
            bound = max(known.bound, lower_bound_s * self.weight(setting.num_used))
            self._free_plans[setting] = replace(known, bound=bound)
        return self._free_plans[setting]

    def _solved(self, setting: Setting, mode: RecomputeMode, memory_bytes: int | None, time_limit_s: float) -> Known:
        """The best plan within the memory, by what is known of others where that settles it."""
        return self._settled(setting, mode, memory_bytes) or self._solved_anew(
            setting, mode, memory_bytes, time_limit_s
        )

    def _settled(self, setting: Setting, mode: RecomputeMode, memory_bytes: int | None) -> Known | None:
        """What was found of a problem, or of the same with more memory, if that is as good an answer."""
        for other in self._known.get((setting, mode), []):
            assert other.memory_bytes is not None and memory_bytes is not None, (
                "without a limit nothing is left to settle"
            )
            if other.memory_bytes >= memory_bytes and (other.plan is None or other.plan.peak_bytes <= memory_bytes):
                return other
        return None

    def _solved_anew(
        self, setting: Setting, mode: RecomputeMode, memory_bytes: int | None, time_limit_s: float
    ) -> Known:
        problem = self.problem(setting, mode, memory_bytes)
        try:
            solution = self._timed(problem, setting, time_limit_s)
        except NoPlanError:
            self.undecided.add((setting, mode, memory_bytes))
            bound = self.least(setting, mode).step_s * self.weight(setting.num_used)
            return Known(memory_bytes=memory_bytes, plan=None, bound=bound)
        self.undecided.discard((setting, mode, memory_bytes))
        found = Known(memory_bytes=memory_bytes, plan=None, bound=INFINITY)
        if solution is not None:
            found = self._kept(problem, solution)
        self._known.setdefault((setting, mode), []).append(found)
        return found

    def _timed(self, problem: Problem, setting: Setting, time_limit_s: float) -> Solution | None:
        started_s = time.perf_counter()
        solution = solve(problem, start=self._start(problem, setting), time_limit_s=time_limit_s)
        num_actions = setting.num_stages * setting.num_microbatches
        if num_actions >= _MANY_ACTIONS:
            seconds = min(time.perf_counter() - started_s, ONE_SOLVE_S)
            self._action_s = 0.5 * (self._action_s + seconds / num_actions)
        self.num_solved += 1
        if solution is not None:
            self._found.setdefault(setting, []).append(solution)
        return solution

    def _start(self, problem: Problem, setting: Setting) -> Solution | None:
        """Of the partitions found of a setting, whatever was recomputed, the best that fits."""
        fitting = [x for x in self._found.get(setting, []) if fits_memory(problem, x.stages)]
        return min(fitting, key=lambda x: goal_s(problem, x.stages), default=None)

    def _kept(self, problem: Problem, solution: Solution) -> Known:
        plan = price(problem, solution, solve_s=0.0)
        self.plans.append(plan)
        bound = plan.proof.lower_bound_s * self.weight(plan.num_devices * plan.num_replicas)
        return Known(memory_bytes=problem.memory_bytes, plan=plan, bound=bound)


_NOTHING = Known(memory_bytes=None, plan=None, bound=INFINITY)
