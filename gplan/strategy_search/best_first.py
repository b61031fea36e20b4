"""Best-first search: the best plan of a space within a memory, until bounds rule out all other strategies.

The strategy with the smallest estimate is solved next; once there is a plan, every second time that with the smallest
bound, so that the proof grows with the plan. The first plan is searched among the simplest schedules, which are solved
fastest. Settings that would take longer than the time left are skipped; their bounds count. Each problem gets a share of
the time left; what remains at the end goes to outcomes that may still improve, the best first.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace

from gplan.core import Plan
from gplan.core.units import counted, seconds_text
from gplan.partition.problem import ROUNDING
from gplan.schedules.registry import schedule_info
from gplan.strategy_search.cache import ONE_SOLVE_S, OpenStrategy, SolveCache, StrategyResult
from gplan.strategy_search.space import SIMPLEST, Strategy

_SHARE = 0.5  # of the time left, for the problems to come
_LEAST_TIME_S = 0.5  # below this the rest of the time is not used
_SMALL_GAP = 0.02  # with which the rest of the time is better spent on plans with less memory
_NEARLY = 0.9  # of its time limit: a solver that takes less has finished by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search within a memory."""

    plan: Plan | None
    lower_bound: float  # of the cost of every plan within the memory
    num_left: int = 0  # strategies that were neither fully solved nor ruled out
    is_interrupted: bool = False


def best_plan_within(
    cache: SolveCache,
    memory_bytes: int | None,
    *,
    deadline_s: float,
    share: tuple[float, float],
    latest_s: float = 0.0,
) -> Found:
    """The best plan within the memory that is found in time; progress goes from `share[0]` to `share[1]`.

    Until `latest_s` the search goes on while the gap is large. An interrupt ends the search with the best plan so far;
    without one it is raised.
    """
    search = _BestFirstSearch(
        cache, memory_bytes=memory_bytes, early_s=deadline_s, latest_s=max(latest_s, deadline_s), share=share
    )
    try:
        search.run()
        search.break_ties()
        search.use_time_left()
    except KeyboardInterrupt:
        if search.best is None:
            raise
        return replace(search.found(), is_interrupted=True)
    return search.found()


@dataclass
class _BestFirstSearch:
    cache: SolveCache
    memory_bytes: int | None
    early_s: float
    latest_s: float
    share: tuple[float, float]
    best: Plan | None = None
    open: list[OpenStrategy] = field(default_factory=list)
    skipped: list[OpenStrategy] = field(default_factory=list)
    solved: dict[OpenStrategy, StrategyResult] = field(default_factory=dict)
    finished: set[OpenStrategy] = field(default_factory=set)  # solved ones that more time would not improve
    started_s: float = field(default_factory=time.perf_counter)

    def run(self) -> None:
        """Solve strategies until all are ruled out or the time is up."""
        self.best = self.cache.best_fitting(self.memory_bytes)
        self.open = self.cache.open_strategies(self.memory_bytes)
        num_solved = 0
        while time.perf_counter() < self.deadline_s:
            cutoff = self._cutoff
            self.open = [x for x in self.open if x.bound < cutoff]
            if not self.open:
                return
            by_bound = num_solved % 2 == 1
            simple = [x for x in self.open if x.strategy.schedule in SIMPLEST] if self.best is None else []
            node = min(simple or self.open, key=lambda x: x.bound if by_bound else x.estimate)  # of ties the simplest
            num_solved += self.best is not None
            self._report(node)
            self._expand(node)

    def break_ties(self) -> None:
        """Among schedules with the same counts and step as the best plan, take less memory, then the simpler one."""
        cache = self.cache
        order = [x.schedule for x in cache.space.strategies]
        for strategy in cache.space.strategies:
            best = self.best
            if best is None or time.perf_counter() > self.deadline_s:
                return
            most = cache.cost(best) * (1 + ROUNDING)
            if (
                _counts(strategy) != _counts(best)
                or strategy.schedule == best.schedule
                or cache.bound_of(strategy) > most
            ):
                continue
            plan = self._plan_of(strategy, best)
            if plan is not None and cache.cost(plan) <= most:
                self.best = min(best, plan, key=lambda plan: (plan.peak_bytes, order.index(plan.schedule)))

    def _plan_of(self, strategy: Strategy, best: Plan) -> Plan | None:
        """The best plan of a strategy, with the best plan's recompute mode if it needs one."""
        node: OpenStrategy | None = OpenStrategy(strategy=strategy, recompute=None, bound=0.0, estimate=0.0)
        while node is not None:
            limit_s = min(max(1e-3, self.deadline_s - time.perf_counter()), ONE_SOLVE_S)
            nodes, outcome = self.cache.expand(node, self.memory_bytes, time_limit_s=limit_s)
            if outcome.plan is not None:
                return outcome.plan
            node = next((x for x in nodes if x.recompute == best.recompute), None)
        return None

    def use_time_left(self) -> None:
        """Give outcomes that may still improve half of the time left, one after the other."""
        num_times = Counter[OpenStrategy]()
        while (left_s := self.deadline_s - time.perf_counter()) > _LEAST_TIME_S:
            cutoff = self._cutoff
            unproven = [x for x, y in self.solved.items() if y.bound < cutoff and x not in self.finished]
            if not unproven:
                return
            node = min(unproven, key=lambda x: (num_times[x], self.cache.cost(self.solved[x].plan), x.estimate))
            num_times[node] += 1
            self._report(node)
            limit_s, now_s = min(left_s, max(ONE_SOLVE_S, _SHARE * left_s)), time.perf_counter()
            outcome = self.cache.solve_again(node, self.memory_bytes, time_limit_s=limit_s)
            self._record(node, outcome, is_finished=time.perf_counter() - now_s < _NEARLY * limit_s)

    def found(self) -> Found:
        """The result so far."""
        cutoff = self._cutoff
        left = [x for x in (*self.open, *self.skipped) if x.bound < cutoff]
        undecided = [x for x, y in self.solved.items() if y.plan is None and y.bound < cutoff]
        bounds = [*(x.bound for x in left), *(x.bound for x in self.solved.values())]
        return Found(
            plan=self.best,
            lower_bound=min([self.cache.cost(self.best), *bounds]),
            num_left=len({x.strategy for x in (*left, *undecided)}),
        )

    @property
    def deadline_s(self) -> float:
        """When the search ends: later while the gap is large."""
        cost = self.cache.cost(self.best)
        is_close = self.found().lower_bound >= (1 - _SMALL_GAP) * cost
        return self.early_s if is_close else self.latest_s

    @property
    def _cutoff(self) -> float:
        """The cost below which a plan is better than the best one by more than rounding."""
        return self.cache.cost(self.best) * (1 - ROUNDING)

    def _expand(self, node: OpenStrategy) -> None:
        left_s = self.deadline_s - time.perf_counter()
        if self.best is not None and self.cache.solve_seconds(node) > left_s:
            self.open.remove(node)
            self.skipped.append(node)
            return
        limit_s, now_s = min(left_s, max(ONE_SOLVE_S, _SHARE * left_s / self._num_problems)), time.perf_counter()
        nodes, outcome = self.cache.expand(node, self.memory_bytes, time_limit_s=limit_s)
        self.open.remove(node)
        self.open += nodes
        if not nodes:
            self._record(node, outcome, is_finished=time.perf_counter() - now_s < _NEARLY * limit_s)

    @property
    def _num_problems(self) -> int:
        """Problems to solve if none is ruled out."""
        num_modes = 0 if self.memory_bytes is None else len(self.cache.space.recompute)
        return sum(1 + num_modes if x.recompute is None else 1 for x in self.open)

    def _record(self, node: OpenStrategy, outcome: StrategyResult, *, is_finished: bool) -> None:
        least = min(node.bound, self.cache.cost(outcome.plan))
        self.solved[node] = outcome = replace(outcome, bound=max(outcome.bound, least))
        if is_finished:
            self.finished.add(node)
        if self.cache.cost(outcome.plan) < self._cutoff:
            self.best = outcome.plan

    def _report(self, node: OpenStrategy) -> None:
        low, high = self.share
        done = (time.perf_counter() - self.started_s) / max(self.deadline_s - self.started_s, 1e-9)
        strategy = node.strategy
        best = "no plan yet" if self.best is None else f"best {seconds_text(self.best.prediction.step_s)}"
        self.cache.progress(
            f"{best}; {counted(strategy.num_devices, 'device')}, {strategy.num_microbatches} micro-batches, "
            f"{schedule_info(strategy.schedule).title}",
            min(high, low + (high - low) * done),
        )


def _counts(x: Strategy | Plan) -> tuple[object, ...]:
    """Everything but the schedule and the recompute mode."""
    return x.num_devices, x.num_replicas, x.sharding, x.num_microbatches, x.microbatch_size
