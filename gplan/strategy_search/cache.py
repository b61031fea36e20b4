"""Results of the strategies of a search space: their bounds, and the best plans found so far.

A strategy is first solved without a memory limit: if that plan fits anyway, it is the strategy's best plan for every way
to recompute. Otherwise each recompute mode is solved under the limit. Results are reused for other limits, since less
memory never gives a better plan, and a partition found for one mode is the start of the search for the next.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from gplan.core import Constraints, Plan, Profile, RecomputeMode, Sharding
from gplan.core.errors import NoPlanError
from gplan.core.progress import Progress
from gplan.corrections import planned
from gplan.cost.stage_table import StageTable
from gplan.graph.down_sets import DownSets
from gplan.partition.dp import INFINITY
from gplan.partition.plan_evaluation import fits_memory, goal_s, price
from gplan.partition.problem import Problem, Solution, nothing_recomputed, without_memory
from gplan.partition.solve import solve
from gplan.partition.validation import why_not_selected
from gplan.strategy_search.bounds import StrategyBounds
from gplan.strategy_search.heuristics import estimated_step_s
from gplan.strategy_search.space import Space, Strategy

ONE_SOLVE_S = 1.0
"""The default time limit for one problem, longer where there is time left."""

_MANY_ACTIONS = 512  # stages times micro-batches from which the time to solve grows with them
_FIRST_ACTION_S = 1e-4  # estimated time to solve per action, until some problems were timed


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStrategy:
    """A strategy that may still have the best plan; bound and estimate are of the minimised cost."""

    strategy: Strategy
    recompute: RecomputeMode | None  # None: not solved without a memory limit yet
    bound: float
    estimate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """The best plan found for a strategy within some memory, if there is one, and a lower bound of its cost."""

    memory_bytes: int | None
    plan: Plan | None
    bound: float


_NO_RESULT = StrategyResult(memory_bytes=None, plan=None, bound=INFINITY)
_Replicas: TypeAlias = tuple[int, Sharding]
_Key: TypeAlias = tuple[Strategy, RecomputeMode, int | None]


@dataclass
class SolveCache:
    """Solves strategies of one space, for one memory limit after the other, and keeps all results."""

    profile: Profile
    space: Space
    constraints: Constraints
    downsets: DownSets | None
    progress: Progress
    plans: list[Plan] = field(default_factory=list)  # all that fit the limit they were solved for
    num_solved: int = 0
    undecided: set[_Key] = field(default_factory=set)  # neither solved nor proven infeasible in time
    _solutions: dict[Strategy, list[Solution]] = field(default_factory=dict)
    _unlimited: dict[Strategy, Solution | None] = field(default_factory=dict)
    _unlimited_outcomes: dict[Strategy, StrategyResult] = field(default_factory=dict)
    _limited: dict[tuple[Strategy, RecomputeMode], list[StrategyResult]] = field(default_factory=dict)
    _profiles: dict[tuple[int, int, _Replicas], Profile] = field(default_factory=dict)  # as they are planned
    _costs: dict[tuple[tuple[int, int, int], _Replicas], StageTable] = field(default_factory=dict)
    _bounds: dict[tuple[Strategy, RecomputeMode], StrategyBounds] = field(default_factory=dict)
    _action_s: float = _FIRST_ACTION_S

    def cost(self, plan: Plan | None) -> float:
        """The minimised cost: seconds of the step, or device seconds; infinite without a plan."""
        if plan is None:
            return INFINITY
        return plan.prediction.step_s * self.weight(plan.num_ranks)

    def weight(self, num_devices: int) -> int:
        """The cost of one second on these devices."""
        return num_devices if self.space.per_device else 1

    def best_fitting(self, memory_bytes: int | None) -> Plan | None:
        """The best plan so far that fits the memory."""
        fitting = [x for x in self.plans if memory_bytes is None or x.peak_bytes <= memory_bytes]
        return min(fitting, key=self.cost, default=None)

    def open_strategies(self, memory_bytes: int | None) -> list[OpenStrategy]:
        """Every strategy, not solved yet."""
        self.progress(f"bounding {len(self.space.strategies)} settings", 0.0)
        return [self._open(strategy, None, memory_bytes) for strategy in self.space.strategies]

    def expand(
        self, node: OpenStrategy, memory_bytes: int | None, *, time_limit_s: float
    ) -> tuple[list[OpenStrategy], StrategyResult]:
        """Solve a strategy: either the recompute modes that remain to be solved, or an outcome."""
        strategy = node.strategy
        if node.recompute is not None:
            reusable = self._reusable(strategy, node.recompute, memory_bytes)
            return [], reusable or self._solve_limited(strategy, node.recompute, memory_bytes, time_limit_s)
        unlimited = self.problem(strategy, self.space.recompute[0], memory_bytes)
        bound = node.bound
        if memory_bytes is None or not self.bounds(strategy, "never").exceeds_memory(memory_bytes):
            if strategy not in self._unlimited:
                self._unlimited[strategy] = self._solve(without_memory(unlimited), strategy, time_limit_s)
            solution = self._unlimited[strategy]
            if solution is None:
                return [], StrategyResult(memory_bytes=memory_bytes, plan=None, bound=INFINITY)
            if memory_bytes is None or fits_memory(nothing_recomputed(unlimited), solution.stages):
                if strategy not in self._unlimited_outcomes:
                    self._unlimited_outcomes[strategy] = self._record(unlimited, solution)
                return [], self._unlimited_outcomes[strategy]
            bound = max(bound, solution.lower_bound_s * self.weight(strategy.total_devices))
        nodes = [self._open(strategy, mode, memory_bytes) for mode in self._recompute_modes(strategy, memory_bytes)]
        return [replace(x, bound=max(x.bound, bound), estimate=max(x.estimate, bound)) for x in nodes], _NO_RESULT

    def solve_again(self, node: OpenStrategy, memory_bytes: int | None, *, time_limit_s: float) -> StrategyResult:
        """The outcome of a solved strategy after more time."""
        if node.recompute is None:
            return self._solve_unlimited_again(node.strategy, memory_bytes, time_limit_s)
        before = self._reusable(node.strategy, node.recompute, memory_bytes)
        after = self._solve_limited(node.strategy, node.recompute, memory_bytes, time_limit_s)
        if before is None:
            return after
        better = min(after, before, key=lambda x: self.cost(x.plan))
        outcome = StrategyResult(memory_bytes=memory_bytes, plan=better.plan, bound=max(after.bound, before.bound))
        self._limited[node.strategy, node.recompute].insert(0, outcome)
        return outcome

    def bound_of(self, strategy: Strategy) -> float:
        """A lower bound of the strategy's cost."""
        weight, solution = self.weight(strategy.total_devices), self._unlimited.get(strategy)
        step_s = self.bounds(strategy, self.space.recompute[0]).step_s
        return weight * (step_s if solution is None else max(step_s, solution.lower_bound_s))

    def solve_seconds(self, node: OpenStrategy) -> float:
        """The estimated time to solve the strategy."""
        return self._action_s * node.strategy.num_stages * node.strategy.num_microbatches

    def bounds(self, strategy: Strategy, recompute: RecomputeMode) -> StrategyBounds:
        """The closed-form bounds of a strategy."""
        key = (strategy, recompute)
        if key not in self._bounds:
            self._bounds[key] = StrategyBounds(self.problem(strategy, recompute, None))
        return self._bounds[key]

    def problem(self, strategy: Strategy, recompute: RecomputeMode, memory_bytes: int | None) -> Problem:
        """The partition problem of a strategy."""
        return Problem(
            costs=self._costs_of(strategy),
            num_stages=strategy.num_stages,
            schedule=strategy.schedule,
            recompute=recompute,
            minimize="step-time",
            memory_bytes=memory_bytes,
            constraints=self.constraints,
        )

    def _costs_of(self, strategy: Strategy) -> StageTable:
        """The costs of a strategy, which others share."""
        num_beside = strategy.num_devices if self.profile.num_neighbours else 1  # that costs depend on
        key = strategy.microbatch_size, strategy.num_microbatches, num_beside
        replicas = strategy.num_replicas, strategy.sharding
        if (key, replicas) not in self._costs:
            where = strategy.microbatch_size, num_beside, replicas
            if where not in self._profiles:
                self._profiles[where] = planned(
                    self.profile,
                    microbatch_size=strategy.microbatch_size,
                    num_devices=num_beside,
                    num_replicas=strategy.num_replicas,
                    sharding=strategy.sharding,
                )
            self._costs[key, replicas] = StageTable(
                self._profiles[where], strategy.num_microbatches, self.downsets, *replicas
            )
        return self._costs[key, replicas]

    def _open(self, strategy: Strategy, recompute: RecomputeMode | None, memory_bytes: int | None) -> OpenStrategy:
        bounds, weight = (
            self.bounds(strategy, recompute or self.space.recompute[0]),
            self.weight(strategy.total_devices),
        )
        estimate = estimated_step_s(bounds, memory_bytes=memory_bytes) * weight
        return OpenStrategy(strategy=strategy, recompute=recompute, bound=bounds.step_s * weight, estimate=estimate)

    def _recompute_modes(self, strategy: Strategy, memory_bytes: int | None) -> Iterator[RecomputeMode]:
        """The modes that may fit; "selected" is never worse than "never"."""
        modes = tuple(mode for mode in self.space.recompute if self.space.allows(strategy, mode))
        if why_not_selected(strategy.schedule):
            modes = tuple(mode for mode in modes if mode != "selected")
        for mode in modes:
            is_dominated = mode == "never" and "selected" in modes
            if not is_dominated and not self.bounds(strategy, mode).exceeds_memory(memory_bytes or 0):
                yield mode

    def _solve_unlimited_again(
        self, strategy: Strategy, memory_bytes: int | None, time_limit_s: float
    ) -> StrategyResult:
        """For a strategy whose best partition without a memory limit fits."""
        problem = self.problem(strategy, self.space.recompute[0], memory_bytes)
        before, outcome = self._unlimited[strategy], self._unlimited_outcomes[strategy]
        after = self._solve(without_memory(problem), strategy, time_limit_s)
        assert before is not None and after is not None, "there is a plan"
        lower_bound_s = max(after.lower_bound_s, before.lower_bound_s)
        fits = fits_memory(nothing_recomputed(problem), after.stages)
        self._unlimited[strategy] = solution = replace(after if fits else before, lower_bound_s=lower_bound_s)
        if fits:
            self._unlimited_outcomes[strategy] = self._record(problem, solution)
        else:
            bound = max(outcome.bound, lower_bound_s * self.weight(strategy.total_devices))
            self._unlimited_outcomes[strategy] = replace(outcome, bound=bound)
        return self._unlimited_outcomes[strategy]

    def _reusable(self, strategy: Strategy, mode: RecomputeMode, memory_bytes: int | None) -> StrategyResult | None:
        """An outcome for this or more memory that is also the best one for this memory."""
        for outcome in self._limited.get((strategy, mode), []):
            assert outcome.memory_bytes is not None and memory_bytes is not None, "recompute modes need a memory limit"
            fits = outcome.plan is None or outcome.plan.peak_bytes <= memory_bytes
            if outcome.memory_bytes >= memory_bytes and fits:
                return outcome
        return None

    def _solve_limited(
        self, strategy: Strategy, mode: RecomputeMode, memory_bytes: int | None, time_limit_s: float
    ) -> StrategyResult:
        problem = self.problem(strategy, mode, memory_bytes)
        try:
            solution = self._solve(problem, strategy, time_limit_s)
        except NoPlanError:
            self.undecided.add((strategy, mode, memory_bytes))
            bound = self.bounds(strategy, mode).step_s * self.weight(strategy.total_devices)
            return StrategyResult(memory_bytes=memory_bytes, plan=None, bound=bound)
        self.undecided.discard((strategy, mode, memory_bytes))
        outcome = StrategyResult(memory_bytes=memory_bytes, plan=None, bound=INFINITY)
        if solution is not None:
            outcome = self._record(problem, solution)
        self._limited.setdefault((strategy, mode), []).append(outcome)
        return outcome

    def _solve(self, problem: Problem, strategy: Strategy, time_limit_s: float) -> Solution | None:
        """Solve from the best partition known for the strategy that fits, whatever it recomputes."""
        started_s = time.perf_counter()
        fitting = [x for x in self._solutions.get(strategy, []) if fits_memory(problem, x.stages)]
        start = min(fitting, key=lambda x: goal_s(problem, x.stages), default=None)
        solution = solve(problem, start=start, time_limit_s=time_limit_s)
        num_actions = strategy.num_stages * strategy.num_microbatches
        if num_actions >= _MANY_ACTIONS:
            seconds = min(time.perf_counter() - started_s, ONE_SOLVE_S)
            self._action_s = 0.5 * (self._action_s + seconds / num_actions)
        self.num_solved += 1
        if solution is not None:
            self._solutions.setdefault(strategy, []).append(solution)
        return solution

    def _record(self, problem: Problem, solution: Solution) -> StrategyResult:
        plan = price(problem, solution, solve_s=0.0)
        self.plans.append(plan)
        bound = plan.proof.lower_bound_s * self.weight(plan.num_ranks)
        return StrategyResult(memory_bytes=problem.memory_bytes, plan=plan, bound=bound)
