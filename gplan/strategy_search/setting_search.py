"""The loop over the settings of a space: balance one after the other, and drop those whose bound is above the best step.

Every setting begins with a lower bound in closed form (`bounds.py`), which is raised for the memory when its turn comes.
The settings are looked at in turns: the one of the smallest estimate, then the one of the smallest bound, so that the proof
grows with the plan; before there is a plan one of the simplest schedules, of which it is found soonest. Each gets a share of the time left and raises its bound; those that are not proven when all have had
their turn get more time. Where a model is equal blocks but for its ends, settings with many stages are first settled to
within a few per mille of the best plan, by programs over the blocks (`block_program`). The lower bound over all is the
smallest bound of any setting. On a machine, balancing places the stages too. Bounds hold for less memory as well, so a run
with less memory begins with what is known.

A plan is kept only where its devices have what their allocators reserve, too. Where one does not, its setting is balanced
again with less memory for tensors (`TensorLimit`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from gplan.core import Plan, Profile, RecomputeMode
from gplan.core.errors import NoPlanError
from gplan.core.machine import FREE_LINK
from gplan.core.progress import Progress
from gplan.core.units import counted, seconds_text
from gplan.corrections import planned
from gplan.cost.stage_table import StageTable
from gplan.graph.down_sets import DownSets
from gplan.partition.block_program import BlockProgram, Counted, equal_blocks
from gplan.partition.branch_and_bound import Search
from gplan.partition.candidates import INFINITY
from gplan.partition.goals import StepGoal
from gplan.partition.placement import Placed, best_placement
from gplan.partition.plan_evaluation import fits_memory, price
from gplan.partition.problem import ROUNDING, Problem, Solution, nothing_recomputed, without_memory
from gplan.partition.solve import solve
from gplan.partition.validation import why_not_selected
from gplan.schedules.registry import schedule_info
from gplan.schedules.request import PlanRequest
from gplan.strategy_search.bounds import SettingBounds
from gplan.strategy_search.space import AUTO_RECOMPUTE, AUTO_SCHEDULES, SIMPLEST, Setting, Space

NUM_RIVALS = 5
"""The settings beside the best one that are kept on a machine."""

_LEAST_SOLVE_S = 1.0  # time limit of a solve, at least; doubles with every turn
_SHORTEST_S = 1e-3  # time limit of a solve after the deadline
_SHARE_OF_SOLVE = 0.1  # of a run's time for one solve, at least, where that is less than `_LEAST_SOLVE_S`
_SHARE = 0.5  # of the time left, for the problems to come
_GAPS = (0.02, 0.005, 0.001)  # to within which of the best cost settings are settled by programs over blocks, in turn
_TURN = 1.1  # times the next smallest bound: so far a program raises its own before another setting has its turn
_STUCK, _MOST_STUCK = (
    0.05,
    6,
)  # share of its bound by which a setting comes later for each turn in vain, and those turns
_FEW_STAGES = 8  # settings with more have such programs
_NEAR = 0.002  # share of the memory of tensors within which no further limit is tried
_NEARLY = 0.9  # of its time limit: a solver that takes less has finished by itself

_Way: TypeAlias = tuple[Setting, RecomputeMode]


@dataclass(slots=True)
class TensorLimit:
    """A limit on the bytes of tensors, found by bisection, within which a plan fits with what its allocators reserve.

    A plan that lacks memory lowers it by what it lacks; where no plan is found within it, it goes halfway back, as other plans
    may lack less.
    """

    num_bytes: int
    least: int = 0  # no plan fits this, or one that is known
    most: int = 0  # what the tensors of the last plan take that lacks memory; 0: there was none

    def lower(self, peak_bytes: int, lacking: int) -> None:
        """After a plan that takes so much for tensors and lacks memory."""
        self.most = min(peak_bytes, self.num_bytes)
        self.num_bytes = max(self.most - max(lacking, int(_NEAR * self.most), 1), (self.least + self.most) // 2)

    def rise(self) -> None:
        """After no plan was found to fit, or one that fits with what its allocators reserve."""
        self.least = self.num_bytes
        self.num_bytes = (self.least + self.most) // 2

    @property
    def is_worth_trying(self) -> bool:
        """Whether the limits between `least` and `most` differ by more than 0.2 %."""
        return self.most - self.least > max(1, int(_NEAR * self.most))


@dataclass
class SettingSearch:
    """What is known of the settings of a space: the best plans, and a lower bound of each setting.

    The minimised cost is the step, or device seconds where samples per second and device are maximised.
    """

    profile: Profile
    space: Space
    request: PlanRequest
    downsets: DownSets | None
    progress: Progress
    over: Callable[[Plan], int] = lambda _: 0  # bytes that the devices of a plan lack for what their allocators reserve
    best: Plan | None = None  # within the memory of the last run
    bounds: dict[Setting, float] = field(default_factory=dict)  # of the cost of every plan within that memory
    num_left: int = 0  # settings that the last run neither proved nor ruled out
    undecided: set[_Way] = field(default_factory=set)  # in the last run: whether any plan fits
    plans: dict[tuple[_Way, int | None], Plan] = field(default_factory=dict)  # of all runs, by memory limit
    num_solved: int = 0
    is_interrupted: bool = False
    # the plan without a memory limit, and whether more time is of no use
    _free: dict[Setting, tuple[Placed | None, bool]] = field(default_factory=dict)
    _limited: dict[_Way, float] = field(default_factory=dict)  # bounds that were raised by solving
    _last: dict[Setting, Solution] = field(default_factory=dict)  # where the next search of a setting begins
    _deadline_s: float = 0.0  # of the last run
    _tables: dict[tuple[object, ...], StageTable] = field(default_factory=dict)
    _closed: dict[_Way, SettingBounds] = field(default_factory=dict)
    _closed_within: dict[tuple[_Way, int], float] = field(default_factory=dict)  # bounds of the step, by memory limit
    _tensor_limits: dict[_Way, TensorLimit] = field(default_factory=dict)  # where allocators reserved too much
    _with_all_memory: float = INFINITY  # the smallest bound of these before they got less memory
    _blocks: dict[int, range | None] = field(default_factory=dict)  # by table
    _programs: dict[tuple[_Way, int | None], BlockProgram] = field(default_factory=dict)

    def run(self, memory_bytes: int | None, *, deadline_s: float, share: tuple[float, float]) -> None:
        """Find the best plan within the memory, which is at most that of the run before.

        Progress goes from `share[0]` to `share[1]`. An interrupt before the first plan is raised, a later one noted.
        """
        self.best, self.undecided, started_s = self.best_fitting(memory_bytes), set(), time.perf_counter()
        first, self._deadline_s = self.space.recompute[0], deadline_s

        def told(what: str) -> None:
            best = "no plan yet" if self.best is None else f"best {seconds_text(self.best.prediction.step_s)}"
            left = (deadline_s - time.perf_counter()) / (deadline_s - started_s)
            self.progress(f"{best}; {what}", share[1] - (share[1] - share[0]) * left)

        told(f"bounding {counted(len(self.space.settings), 'setting')}")
        for x in self.space.settings if not self.bounds else ():
            bounds = [self._weighted(self._fastest_s(x, mode), x) for mode in self._modes(x, memory_bytes)]
            self.bounds[x] = min(bounds, default=INFINITY)
        still_open = list(self.space.settings[::-1])  # of equal estimates 1F1B before GPipe, which keeps more
        still_open.sort(key=lambda x: self._weighted(self.closed_bounds(x, first).estimate_s, x))

        least_s = min(_LEAST_SOLVE_S, _SHARE_OF_SOLVE * (deadline_s - started_s))
        try:
            for gap in (*_GAPS, 0.0) if any(map(self._counts_blocks, still_open)) else (0.0,):
                self._settle(still_open, memory_bytes, gap=gap, least_s=least_s, told=told)
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.is_interrupted = True
        worth = self.cost(self.best) * (1 - ROUNDING)
        self.num_left = sum(self.bounds[x] < worth for x in still_open)

    def _settle(
        self,
        still_open: list[Setting],
        memory_bytes: int | None,
        *,
        gap: float,
        least_s: float,
        told: Callable[[str], None],
    ) -> None:
        """Balance settings, the most promising first, until none may cost less than the best plan by more than the gap.

        Those of which nothing more can be known are taken out of the open ones; with a gap only settings that programs
        over blocks settle are looked at.
        """
        turn, unproven = list(still_open), list[Setting]()
        num_ways = 1 if memory_bytes is None else 1 + len(self.space.recompute)  # that a setting may be balanced in
        is_promising, num_stuck = True, Counter[Setting]()
        while (left_s := self._deadline_s - time.perf_counter()) > 0:
            turn = [x for x in turn if self.bounds[x] <= self._cutoff * (1 - gap) and self.bounds[x] < INFINITY]
            if not turn:
                turn, unproven, least_s = unproven, [], 2 * least_s
                if not turn:
                    return
                continue
            setting, until = turn[0], INFINITY
            if self.best is not None and (gap or not is_promising):
                setting = min(turn, key=lambda x: self.bounds[x] * (1 + _STUCK * num_stuck[x]))
                until = _TURN * min((self.bounds[x] for x in turn if x is not setting), default=INFINITY)
            elif not is_promising:
                setting = next((x for x in turn if x.schedule in SIMPLEST), setting)
            if self._has_risen(setting, memory_bytes):
                continue
            is_promising = not is_promising
            devices, title = counted(setting.num_devices, "device"), schedule_info(setting.schedule).title
            told(f"{devices}, {setting.num_microbatches} micro-batches, {title}")
            limit_s = max(least_s, _SHARE * left_s / (len(turn) * num_ways))
            is_finished = self._balance(setting, memory_bytes, gap=gap, until=until, time_limit_s=limit_s)
            if not is_finished and until <= self.bounds[setting]:
                continue  # another one has the smallest bound now
            num_stuck[setting] += 1
            if gap and self.best is not None and not is_finished and num_stuck[setting] < _MOST_STUCK:
                continue
            turn.remove(setting)
            if not is_finished:
                unproven.append(setting)
            elif not gap or not self._counts_blocks(setting):
                still_open.remove(setting)

    @property
    def lower_bound(self) -> float:
        """Of the cost of every plan within the memory of the last run, with what allocators reserve or without."""
        return min(self.cost(self.best), self._with_all_memory, *self.bounds.values())

    @property
    def num_settings_text(self) -> str:
        """How many settings there are."""
        num_settings = len(self.space.settings)
        return "one setting" if num_settings == 1 else f"{num_settings} settings"

    @property
    def open_text(self) -> str:
        """How many settings the last run neither proved nor ruled out."""
        if len(self.space.settings) == 1:
            return "the one setting is still open"
        return f"{self.num_left} of {self.num_settings_text} {'is' if self.num_left == 1 else 'are'} still open"

    def cost(self, plan: Plan | None) -> float:
        """The minimised cost; infinite without a plan."""
        return INFINITY if plan is None else plan.prediction.step_s * self.weight(plan.num_ranks)

    def weight(self, num_devices: int) -> int:
        """The cost of one second on these devices."""
        return num_devices if self.space.per_device else 1

    def best_fitting(self, memory_bytes: int | None) -> Plan | None:
        """The best plan so far that fits the memory."""
        best: Plan | None = None
        for plan in self.plans.values():
            if memory_bytes is None or plan.peak_bytes <= memory_bytes:
                best = self._better(best, plan)
        return best

    def least_within(self, memory_bytes: int | None) -> int | None:
        """The least memory that the tensors of any setting are limited to now."""
        return memory_bytes and min([memory_bytes, *(x.num_bytes for x in self._tensor_limits.values())])

    def closed_bounds(self, setting: Setting, recompute: RecomputeMode) -> SettingBounds:
        """The closed-form bounds of a setting; on a machine without transfers."""
        way = (setting, recompute)
        if way not in self._closed:
            problem = self.problem(setting, recompute, None)
            if self.request.machine is not None:
                problem = replace(problem, links=(FREE_LINK,) * (problem.num_stages - 1))
            self._closed[way] = SettingBounds(problem)
        return self._closed[way]

    def problem(self, setting: Setting, recompute: RecomputeMode, memory_bytes: int | None) -> Problem:
        """The partition problem of a setting, with less memory where allocators reserve too much."""
        limit = self._tensor_limits.get((setting, recompute))
        if memory_bytes is not None and limit is not None:
            memory_bytes = min(memory_bytes, limit.num_bytes)
        return Problem(
            costs=self._table(setting),
            num_stages=setting.num_stages,
            schedule=setting.schedule,
            recompute=recompute,
            minimize="step-time",
            memory_bytes=memory_bytes,
            constraints=self.request.constraints,
        )

    def _table(self, setting: Setting) -> StageTable:
        """The costs of a setting, shared by all with equal ones; of one batch, their micro-batches are as many."""
        num_beside = setting.num_devices if self.profile.num_neighbours else 1  # that costs depend on
        key = (setting.microbatch_size, num_beside, setting.num_replicas, setting.sharding)
        if key not in self._tables:
            plain = planned(
                self.profile,
                microbatch_size=setting.microbatch_size,
                num_devices=num_beside,
                num_replicas=setting.num_replicas,
                sharding=setting.sharding,
            )
            self._tables[key] = StageTable(
                plain, setting.num_microbatches, self.downsets, setting.num_replicas, setting.sharding
            )
        return self._tables[key]

    def _fastest_s(self, setting: Setting, recompute: RecomputeMode) -> float:
        """The closed-form bound of the step without a memory; a machine's fastest device computes that much faster."""
        machine = self.request.machine
        fastest = max([1.0, *(x.speed for x in machine.devices)]) if machine else 1.0
        return self.closed_bounds(setting, recompute).step_s / fastest

    def _bound(self, setting: Setting, recompute: RecomputeMode, memory_bytes: int | None) -> float:
        """The closed-form bound of the cost."""
        if self.request.machine is not None or memory_bytes is None:
            return self._weighted(self._fastest_s(setting, recompute), setting)
        key = (setting, recompute), memory_bytes
        if key not in self._closed_within:
            self._closed_within[key] = self.closed_bounds(setting, recompute).within_s(memory_bytes)
        return self._weighted(self._closed_within[key], setting)

    def _has_risen(self, setting: Setting, memory_bytes: int | None) -> bool:
        """Whether what is known of the ways to recompute raises the bound of a setting."""
        known = (self._known(setting, x, memory_bytes) for x in self._modes(setting, memory_bytes))
        before, self.bounds[setting] = self.bounds[setting], max(self.bounds[setting], min(known, default=INFINITY))
        return self.bounds[setting] > before

    def _counts_blocks(self, setting: Setting) -> bool:
        """Whether programs over blocks settle a setting."""
        if self.request.machine is not None or setting.num_stages <= _FEW_STAGES:
            return False
        problem = self.problem(setting, "never", None)
        if id(problem.costs) not in self._blocks:
            self._blocks[id(problem.costs)] = equal_blocks(problem)
        return self._blocks[id(problem.costs)] is not None

    def _weighted(self, step_s: float, setting: Setting) -> float:
        return step_s * self.weight(setting.total_devices)

    @property
    def _cutoff(self) -> float:
        """The cost above which a plan is of no use."""
        if self.request.machine is None:
            return self.cost(self.best) * (1 + ROUNDING)
        costs = sorted(map(self.cost, self.plans.values()))
        return costs[NUM_RIVALS] * (1 + ROUNDING) if len(costs) > NUM_RIVALS else INFINITY

    def _better(self, one: Plan | None, other: Plan) -> Plan:
        """The plan of less cost; of equal ones that with fewer devices, then with less memory, then the simpler one."""
        if one is None or self.cost(other) < self.cost(one) * (1 - ROUNDING):
            return other
        return min(one, other, key=_plainness) if self.cost(other) <= self.cost(one) * (1 + ROUNDING) else one

    def _balance(
        self, setting: Setting, memory_bytes: int | None, *, gap: float, until: float, time_limit_s: float
    ) -> bool:
        """Balance a setting for every way to recompute, and raise its bound; returns whether more time is of no use.

        With a gap it ends where no plan may cost less than the best one by more than that, or the bound is `until`.

        Without a gap it is first balanced without a memory limit: a plan that fits anyway is the best for every way.
        """
        is_counted = gap > 0 and self._counts_blocks(setting)
        gap = gap if is_counted else 0.0
        modes = [x for x in self._modes(setting, memory_bytes) if self._could_be_best(setting, x, memory_bytes, gap)]
        least, is_finished = self.bounds[setting], True
        if not modes:
            self.bounds[setting] = max(least, self._beyond * (1 - gap))
            return True
        if (
            not is_counted
            and self.request.machine is None
            and (memory_bytes is None or {"never", "selected"} & {*modes})
        ):
            problem = self.problem(setting, self._allowed(setting)[0], memory_bytes)
            kept = nothing_recomputed(problem)
            free, is_finished = self._free.get(setting, (None, False))
            if not is_finished and (free is None or fits_memory(kept, free.solution.stages)):
                free, is_finished = self._free[setting] = self._solved(without_memory(problem), setting, time_limit_s)
            least = INFINITY if free is None else max(least, self._weighted(free.solution.lower_bound_s, setting))
            fits = free is not None and fits_memory(kept, free.solution.stages)
            if free is None or (fits and self._record(setting, memory_bytes, replace(free, problem=problem))):
                self.bounds[setting] = least
                return is_finished
            is_finished = True
        bounds = [self._beyond * (1 - gap)]
        for mode in modes[::-1] if is_counted else modes:
            way, is_settled, by_program = (setting, mode), True, is_counted and mode != "selected"
            bound = max(least, self._known(setting, mode, memory_bytes))
            is_kept, before, most = False, self._last.get(setting), self._cutoff * (1 - gap)
            while bound <= most and bound < INFINITY and not is_kept:
                problem = self.problem(setting, mode, memory_bytes)
                try:
                    if by_program:
                        found, is_settled = self._counted(
                            problem, way, bound, until=until, gap=gap, time_limit_s=time_limit_s
                        )
                    else:
                        cutoff_s = self._beyond / self.weight(setting.total_devices)
                        found, is_settled = self._solved(problem, setting, time_limit_s, cutoff_s)
                except NoPlanError:
                    self.undecided.add(way)
                    is_settled = False
                    break
                self.undecided.discard(way)
                if found is not None:
                    bound = max(least, self._weighted(found.solution.lower_bound_s, setting))
                    is_kept = not found.solution.stages or self._record(setting, memory_bytes, found)
                limit = self._tensor_limits.get(way)
                if found is None and (limit is None or problem.memory_bytes != limit.num_bytes):
                    bound = INFINITY
                elif limit is not None and not is_kept:
                    most = self._cutoff
                    if before is not None:
                        self._last[setting] = before
                    if found is None:
                        limit.rise()
                    if not limit.is_worth_trying and by_program:
                        limit.num_bytes, by_program = limit.most, False  # another plan with as many bytes of tensors
                    elif not limit.is_worth_trying:
                        bound = INFINITY
                self._limited[way] = max(bound, self._known(setting, mode, memory_bytes))
            bounds.append(bound)
            is_finished = is_finished and is_settled
        self.bounds[setting] = max(self.bounds[setting], min(bounds))
        return is_finished

    def _counted(
        self, problem: Problem, way: _Way, bound: float, *, gap: float, until: float, time_limit_s: float
    ) -> tuple[Placed | None, bool]:
        """As `_solved`, by the program over blocks of that way, which goes on where it was.

        The solution has no stages where no plan better than the best one was found.
        """
        key = way, problem.memory_bytes
        if key not in self._programs:
            blocks = self._blocks[id(problem.costs)]
            assert blocks is not None, "only settings with equal blocks are counted"
            self._programs[key] = BlockProgram(problem, blocks)
        self.num_solved += 1
        weight, deadline_s = self.weight(way[0].total_devices), time.perf_counter() + time_limit_s
        known = Counted(cut=None, step_s=self.cost(self.best) / weight, lower_bound_s=bound / weight)
        found = self._programs[key].solve(
            known, enough=gap, deadline_s=min(deadline_s, self._deadline_s), until_s=until / weight
        )
        if found.lower_bound_s == INFINITY:
            return None, True
        stages = () if found.cut is None else found.cut.stages()
        solution = Solution(stages=stages, lower_bound_s=found.lower_bound_s, solver="block-program/HiGHS")
        if stages:
            self._last[way[0]] = solution
        is_settled = found.is_final or found.lower_bound_s >= found.step_s * (1 - gap)
        return Placed(problem=problem, solution=solution), is_settled

    @property
    def _beyond(self) -> float:
        """A cost that is just above the cutoff."""
        return self._cutoff * (1 + ROUNDING)

    def _known(self, setting: Setting, mode: RecomputeMode, memory_bytes: int | None) -> float:
        """The bound of a setting in one way to recompute."""
        return max(self._limited.get((setting, mode), 0.0), self._bound(setting, mode, memory_bytes))

    def _could_be_best(self, setting: Setting, mode: RecomputeMode, memory_bytes: int | None, gap: float) -> bool:
        """Whether bounds leave room for a plan that costs no more than the best one less the gap; raises the way's bound."""
        known = self._known(setting, mode, memory_bytes)
        is_open, by_program = known <= self._cutoff * (1 - gap), gap and mode != "selected"
        if is_open and not by_program and self._cutoff < INFINITY and self.request.machine is None:
            search = Search(problem=self.problem(setting, mode, memory_bytes), goal=StepGoal)
            bound_s = search.bound_up_to(self._beyond / self.weight(setting.total_devices))
            known = self._limited[setting, mode] = max(known, self._weighted(bound_s, setting))
        return known <= self._cutoff * (1 - gap)

    def _allowed(self, setting: Setting) -> list[RecomputeMode]:
        """The ways to recompute that the request allows."""
        return [x for x in self.space.recompute if self.request.allows(replace(setting, recompute=x))]

    def _modes(self, setting: Setting, memory_bytes: int | None) -> list[RecomputeMode]:
        """The allowed ways to recompute that may fit; "selected" is never worse than "never"."""
        modes, cannot_select = self._allowed(setting), bool(why_not_selected(setting.schedule))
        if cannot_select or "selected" in modes:
            modes = [x for x in modes if x != ("selected" if cannot_select else "never")]
        if self.request.machine is not None or memory_bytes is None:
            return modes
        return [x for x in modes if not self.closed_bounds(setting, x).exceeds_memory(memory_bytes)]

    def _solved(
        self, problem: Problem, setting: Setting, time_limit_s: float, cutoff_s: float = INFINITY
    ) -> tuple[Placed | None, bool]:
        """The best partition, searched from the last one of the setting, and whether more time is of no use."""
        started_s, machine = time.perf_counter(), self.request.machine
        time_limit_s = min(time_limit_s, max(_SHORTEST_S, self._deadline_s - started_s))
        self.num_solved += 1
        if machine is not None:
            solve_here = partial(solve, time_limit_s=time_limit_s)
            found = best_placement(problem, machine, solve_here, time_limit_s=time_limit_s)
        else:
            solution = solve(problem, start=self._last.get(setting), time_limit_s=time_limit_s, cutoff_s=cutoff_s)
            found = None if solution is None else Placed(problem=problem, solution=solution)
        if found is not None:
            self._last[setting] = found.solution
        return found, time.perf_counter() - started_s < _NEARLY * time_limit_s

    def _record(self, setting: Setting, memory_bytes: int | None, found: Placed) -> bool:
        """Keep the plan; one whose layers are selected, and none is, recomputes never.

        Returns False where it would be the best, but for devices that reserve too much: then it is not kept.
        """
        plan, way = price(found.problem, found.solution, solve_s=0.0), (setting, found.problem.recompute)
        is_empty = plan.recompute == "selected" and not any(x.recompute_layers for x in plan.stages)
        if is_empty and "never" in self.space.recompute:
            plan = price(nothing_recomputed(found.problem), found.solution, solve_s=0.0)
        if self._better(self.best, plan) is plan and memory_bytes is not None and (over := self.over(plan)) > 0:
            if way not in self._tensor_limits:
                bound = self._weighted(found.solution.lower_bound_s, setting)
                self._with_all_memory = min(self._with_all_memory, bound)
            self._tensor_limits.setdefault(way, TensorLimit(memory_bytes)).lower(plan.peak_bytes, over)
            return False
        key = ((setting, plan.recompute), memory_bytes)
        self.plans[key] = self._better(self.plans.get(key), plan)
        self.best = self._better(self.best, plan)
        return True


def _plainness(plan: Plan) -> tuple[object, ...]:
    is_auto = plan.schedule in AUTO_SCHEDULES
    place = AUTO_SCHEDULES.index(plan.schedule) if is_auto else len(AUTO_SCHEDULES)
    counts = (plan.num_devices, plan.num_replicas, plan.num_microbatches, plan.sharding)
    return (*counts, plan.peak_bytes, place, AUTO_RECOMPUTE.index(plan.recompute))
