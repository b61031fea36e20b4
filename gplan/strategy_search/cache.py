"""Results of the settings of a search space: their bounds, and the best plans found so far.

A setting is first solved without a memory limit: if that plan fits anyway, it is the setting's best plan for every way
to recompute. Otherwise each recompute mode is solved under the limit. Results are reused for other limits, since less
memory never gives a better plan, and a partition found for one mode is the start of the search for the next.
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
from gplan.strategy_search.bounds import StrategyBounds
from gplan.strategy_search.heuristics import estimated_step_s
from gplan.strategy_search.space import Setting, Space

Progress = Callable[[str, float], None]

ONE_SOLVE_S = 1.0
"""The default time limit for one problem, longer where there is time left."""

INFINITY = float("inf")
_MANY_ACTIONS = 512  # stages times micro-batches from which the time to solve grows with them
_FIRST_ACTION_S = 1e-4  # estimated time to solve per action, until some problems were timed


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSetting:
    """A setting that may still have the best plan; bound and estimate are of the minimised cost."""

    setting: Setting
    recompute: RecomputeMode | None  # None: not solved without a memory limit yet
    bound: float
    estimate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The best plan found for a setting within some memory, if there is one, and a lower bound of its cost."""

    memory_bytes: int | None
    plan: Plan | None
    bound: float


_NO_OUTCOME = Outcome(memory_bytes=None, plan=None, bound=INFINITY)
_Key: TypeAlias = tuple[Setting, RecomputeMode, int | None]


@dataclass
class SolveCache:
    """Solves settings of one space, for one memory limit after the other, and keeps all results."""

    profile: Profile
    space: Space
    constraints: Constraints
    downsets: DownSets | None
    progress: Progress
    plans: list[Plan] = field(default_factory=list)  # all that fit the limit they were solved for
    num_solved: int = 0
    undecided: set[_Key] = field(default_factory=set)  # neither solved nor proven infeasible in time
    _solutions: dict[Setting, list[Solution]] = field(default_factory=dict)
    _unlimited: dict[Setting, Solution | None] = field(default_factory=dict)
    _unlimited_outcomes: dict[Setting, Outcome] = field(default_factory=dict)
    _limited: dict[tuple[Setting, RecomputeMode], list[Outcome]] = field(default_factory=dict)
    _costs: dict[tuple[int, int, int], Costs] = field(default_factory=dict)
    _bounds: dict[tuple[Setting, RecomputeMode], StrategyBounds] = field(default_factory=dict)
    _action_s: float = _FIRST_ACTION_S

    def cost(self, plan: Plan | None) -> float:
        """The minimised cost: seconds of the step, or device seconds; infinite without a plan."""
        if plan is None:
            return INFINITY
        return plan.prediction.step_s * self.weight(plan.num_devices * plan.num_replicas)

    def weight(self, num_devices: int) -> int:
        """The cost of one second on these devices."""
        return num_devices if self.space.per_device else 1

    def best_fitting(self, memory_bytes: int | None) -> Plan | None:
        """The best plan so far that fits the memory."""
        fitting = [x for x in self.plans if memory_bytes is None or x.peak_bytes <= memory_bytes]
        return min(fitting, key=self.cost, default=None)

    def open_settings(self, memory_bytes: int | None) -> list[OpenSetting]:
        """Every setting, not solved yet."""
        self.progress(f"bounding {len(self.space.settings)} settings", 0.0)
        return [self._open(setting, None, memory_bytes) for setting in self.space.settings]

    def expand(
        self, node: OpenSetting, memory_bytes: int | None, *, time_limit_s: float
    ) -> tuple[list[OpenSetting], Outcome]:
        """Solve a setting: either the recompute modes that remain to be solved, or an outcome."""
        setting = node.setting
        if node.recompute is not None:
            reusable = self._reusable(setting, node.recompute, memory_bytes)
            return [], reusable or self._solve_limited(setting, node.recompute, memory_bytes, time_limit_s)
        unlimited = self.problem(setting, self.space.recompute[0], memory_bytes)
        bound = node.bound
        if memory_bytes is None or not self.bounds(setting, "never").exceeds_memory(memory_bytes):
            if setting not in self._unlimited:
                self._unlimited[setting] = self._solve(without_memory(unlimited), setting, time_limit_s)
            solution = self._unlimited[setting]
            if solution is None:
                return [], Outcome(memory_bytes=memory_bytes, plan=None, bound=INFINITY)
            if memory_bytes is None or fits_memory(nothing_recomputed(unlimited), solution.stages):
                if setting not in self._unlimited_outcomes:
                    self._unlimited_outcomes[setting] = self._record(unlimited, solution)
                return [], self._unlimited_outcomes[setting]
            bound = max(bound, solution.lower_bound_s * self.weight(setting.total_devices))
        nodes = [self._open(setting, mode, memory_bytes) for mode in self._recompute_modes(setting, memory_bytes)]
        return [replace(x, bound=max(x.bound, bound), estimate=max(x.estimate, bound)) for x in nodes], _NO_OUTCOME

    def solve_again(self, node: OpenSetting, memory_bytes: int | None, *, time_limit_s: float) -> Outcome:
        """The outcome of a solved setting after more time."""
        if node.recompute is None:
            return self._solve_unlimited_again(node.setting, memory_bytes, time_limit_s)
        before = self._reusable(node.setting, node.recompute, memory_bytes)
        after = self._solve_limited(node.setting, node.recompute, memory_bytes, time_limit_s)
        if before is None:
            return after
        better = min(after, before, key=lambda x: self.cost(x.plan))
        outcome = Outcome(memory_bytes=memory_bytes, plan=better.plan, bound=max(after.bound, before.bound))
        self._limited[node.setting, node.recompute].insert(0, outcome)
        return outcome

    def bound_of(self, setting: Setting) -> float:
        """A lower bound of the setting's cost."""
        weight, solution = self.weight(setting.total_devices), self._unlimited.get(setting)
        step_s = self.bounds(setting, self.space.recompute[0]).step_s
        return weight * (step_s if solution is None else max(step_s, solution.lower_bound_s))

    def solve_seconds(self, node: OpenSetting) -> float:
        """The estimated time to solve the setting."""
        return self._action_s * node.setting.num_stages * node.setting.num_microbatches

    def bounds(self, setting: Setting, recompute: RecomputeMode) -> StrategyBounds:
        """The closed-form bounds of a setting."""
        key = (setting, recompute)
        if key not in self._bounds:
            self._bounds[key] = StrategyBounds(self.problem(setting, recompute, None))
        return self._bounds[key]

    def problem(self, setting: Setting, recompute: RecomputeMode, memory_bytes: int | None) -> Problem:
        """The partition problem of a setting."""
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

    def _open(self, setting: Setting, recompute: RecomputeMode | None, memory_bytes: int | None) -> OpenSetting:
        bounds, weight = self.bounds(setting, recompute or self.space.recompute[0]), self.weight(setting.total_devices)
        estimate = estimated_step_s(bounds, memory_bytes=memory_bytes) * weight
        return OpenSetting(setting=setting, recompute=recompute, bound=bounds.step_s * weight, estimate=estimate)

    def _recompute_modes(self, setting: Setting, memory_bytes: int | None) -> Iterator[RecomputeMode]:
        """The modes that may fit; "selected" is never worse than "never"."""
        modes = self.space.recompute
        if why_not_selected(setting.schedule):
            modes = tuple(mode for mode in modes if mode != "selected")
        for mode in modes:
            is_dominated = mode == "never" and "selected" in modes
            if not is_dominated and not self.bounds(setting, mode).exceeds_memory(memory_bytes or 0):
                yield mode

    def _solve_unlimited_again(self, setting: Setting, memory_bytes: int | None, time_limit_s: float) -> Outcome:
        """For a setting whose best partition without a memory limit fits."""
        problem = self.problem(setting, self.space.recompute[0], memory_bytes)
        before, outcome = self._unlimited[setting], self._unlimited_outcomes[setting]
        after = self._solve(without_memory(problem), setting, time_limit_s)
        assert before is not None and after is not None, "there is a plan"
        lower_bound_s = max(after.lower_bound_s, before.lower_bound_s)
        fits = fits_memory(nothing_recomputed(problem), after.stages)
        self._unlimited[setting] = solution = replace(after if fits else before, lower_bound_s=lower_bound_s)
        if fits:
            self._unlimited_outcomes[setting] = self._record(problem, solution)
        else:
            bound = max(outcome.bound, lower_bound_s * self.weight(setting.total_devices))
            self._unlimited_outcomes[setting] = replace(outcome, bound=bound)
        return self._unlimited_outcomes[setting]

    def _reusable(self, setting: Setting, mode: RecomputeMode, memory_bytes: int | None) -> Outcome | None:
        """An outcome for this or more memory that is also the best one for this memory."""
        for outcome in self._limited.get((setting, mode), []):
            assert outcome.memory_bytes is not None and memory_bytes is not None, "recompute modes need a memory limit"
            fits = outcome.plan is None or outcome.plan.peak_bytes <= memory_bytes
            if outcome.memory_bytes >= memory_bytes and fits:
                return outcome
        return None

    def _solve_limited(
        self, setting: Setting, mode: RecomputeMode, memory_bytes: int | None, time_limit_s: float
    ) -> Outcome:
        problem = self.problem(setting, mode, memory_bytes)
        try:
            solution = self._solve(problem, setting, time_limit_s)
        except NoPlanError:
            self.undecided.add((setting, mode, memory_bytes))
            bound = self.bounds(setting, mode).step_s * self.weight(setting.total_devices)
            return Outcome(memory_bytes=memory_bytes, plan=None, bound=bound)
        self.undecided.discard((setting, mode, memory_bytes))
        outcome = Outcome(memory_bytes=memory_bytes, plan=None, bound=INFINITY)
        if solution is not None:
            outcome = self._record(problem, solution)
        self._limited.setdefault((setting, mode), []).append(outcome)
        return outcome

    def _solve(self, problem: Problem, setting: Setting, time_limit_s: float) -> Solution | None:
        """Solve from the best partition known for the setting that fits, whatever it recomputes."""
        started_s = time.perf_counter()
        fitting = [x for x in self._solutions.get(setting, []) if fits_memory(problem, x.stages)]
        start = min(fitting, key=lambda x: goal_s(problem, x.stages), default=None)
        solution = solve(problem, start=start, time_limit_s=time_limit_s)
        num_actions = setting.num_stages * setting.num_microbatches
        if num_actions >= _MANY_ACTIONS:
            seconds = min(time.perf_counter() - started_s, ONE_SOLVE_S)
            self._action_s = 0.5 * (self._action_s + seconds / num_actions)
        self.num_solved += 1
        if solution is not None:
            self._solutions.setdefault(setting, []).append(solution)
        return solution

    def _record(self, problem: Problem, solution: Solution) -> Outcome:
        plan = price(problem, solution, solve_s=0.0)
        self.plans.append(plan)
        bound = plan.proof.lower_bound_s * self.weight(plan.num_devices * plan.num_replicas)
        return Outcome(memory_bytes=problem.memory_bytes, plan=plan, bound=bound)
