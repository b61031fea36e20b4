"""The best numbers of blocks on stages where most blocks repeat, by cutting planes: a program in integers.

Seconds and bytes of a stage are then linear in its numbers n_ks of blocks of each kind k. The few layers before and after
these lie on the first and the last stages in a few ways c, of which one is taken: y_c = 1. So every path through the step is
    T >= sum over s of (sum over k of a_ks n_ks + sum over c of b_sc y_c)      Paths of critical_path
and every moment of a device at which its memory may peak is a row too. Kinds take turns, as attention to all tokens and to
near ones do: up to any stage, each kind has its share of the blocks, or differs from it by what one turn allows.

The program has the rows found so far; its solution is simulated, and the longest path of that step is the next row
(cutting planes; Kelley 1960). First the relaxation to real numbers is solved until no row is violated, then the program in
integers. The bound of each of them holds for every partition; every solution in integers is a partition, priced by
simulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from gplan.core import StageSeconds
from gplan.graph.down_sets import Floats, Ints
from gplan.partition.candidates import INFINITY, stage_seconds
from gplan.partition.critical_path import TIMES, Paths, paths_of
from gplan.partition.even_cuts import EvenCut, priced_cut, with_few_microbatches
from gplan.partition.problem import Problem, device_peaks, moments_of

_SLACK = 1e-9
_ENOUGH = 1e-4  # share of the bound by which a path may be longer in the relaxation
_PATIENCE, _WORTH = 0.25, 5e-4  # so many rows a stage raise the relaxation's bound by less: integers may raise it more
_NUMS_OF_DEVICES = (3, 12)  # whose memory is in the program, first and then
_MORE_DEVICES = 4  # that are added at a time for a solution that they do not fit
_TOLD_APART_S = 1e-4  # steps that differ by less may be the same to the solver, whose tolerance is 1e-6
_SHORTEST_S = 0.2  # of one solution
_MANY_BLOCKS = 12  # of a stage beside other layers: more change its workspaces no further
_MOST_ENDS = 128  # ways in which the other layers lie on stages
_MOST_KINDS = 4  # of blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What a program found: the best partition, if it is new; the best step; and a bound of all steps."""

    cut: EvenCut | None
    step_s: float
    lower_bound_s: float
    is_final: bool = False  # whether more time raises the bound no further


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """One way in which the layers before and after the equal blocks lie on the first and the last stages.

    A stage with layers before or after them may have blocks too; beside `is_closed`, where it has none.
    """

    before: tuple[int, ...]  # where the stages with the layers before the blocks end among them
    after: tuple[int, ...]  # where the stages with those after begin among them
    is_closed: tuple[bool, bool]  # whether the innermost of these stages have no blocks


def equal_blocks(problem: Problem) -> range | None:
    """The longest run of layers that a program counts: equal ones, or few kinds in turns.

    None where too many others are beside it, or what stages take and hold is not linear in its layers: on two clocks, over
    links measured at several sizes, with weights shared inside.
    """
    kinds = _kinds_of(problem)
    for most_kinds in range(1, _MOST_KINDS + 1):
        ends = [_end_of_run(kinds, start, most_kinds) for start in range(len(kinds))]
        start = max(range(len(kinds)), key=lambda x: ends[x] - x)
        blocks = range(start, ends[start])
        is_open = blocks.start > 0 and blocks.stop < len(kinds) and not problem.constraints and len(blocks) > 1
        period, has_few_others = _period(kinds[start : blocks.stop]), 2 ** (len(kinds) - len(blocks)) <= _MOST_ENDS
        if is_open and has_few_others and 2 * period <= len(blocks) and _are_linear(problem, blocks, period):
            return blocks
    return None


def _are_linear(problem: Problem, blocks: range, period: int) -> bool:
    """Whether the seconds of stages are linear in their blocks, and their bytes at least what the program takes them for.

    By stages with few and with most of the blocks, from the first and, where all are equal, up to the last.
    """
    costs, num_turns = problem.costs, len(blocks) // period
    if costs.given_downsets is not None or costs.profile.has_host:
        return False
    few = _first_counted(blocks, period) // period
    turns = [x for x in (1, few, few + 1, 2, num_turns - 1) if x < num_turns or x <= few + 1]
    counts = period * np.array(turns * (2 if period == 1 else 1))
    at_start = np.arange(len(counts)) < len(turns)
    first = np.where(at_start, blocks.start, blocks.stop - 1 - counts)
    seconds = np.array(list(costs.seconds(first, first + counts).present.values()))
    num_bytes = costs.part_rows(first, first + counts).astype(float)
    for rows, slack in ((seconds, 0.0), (num_bytes, float(len(blocks)))):
        fewer, more = rows[:, 1], rows[:, 2]
        expected = rows[:, :1] + np.outer((more - fewer) / period, counts - period)
        off = expected - rows if slack else np.abs(expected - rows)
        if (off > _SLACK * np.abs(rows) + slack).any():
            return False
    return True


def _first_counted(blocks: range, period: int) -> int:
    """So many blocks of a stage: what it takes and holds more with one more is what a block of that kind adds.

    With fewer the workspaces, the largest of some layers, still grow.
    """
    return 3 * period if len(blocks) > 5 * period else period


def _kinds_of(problem: Problem) -> list[int]:
    """[L]: numbers, the same for layers with the same costs."""
    found, kinds = list[tuple[Any, ...]](), list[int]()
    for x in problem.costs.profile.layers:
        costs = (x.weight_bytes, x.gradient_bytes, x.num_parameters, x.costs)
        if costs not in found:
            found.append(costs)
        kinds.append(found.index(costs))
    return kinds


def _end_of_run(kinds: Sequence[int], start: int, most_kinds: int) -> int:
    """Where a run of so many kinds ends that begins there."""
    found = set[int]()
    for x in range(start, len(kinds)):
        found.add(kinds[x])
        if len(found) > most_kinds:
            return x
    return len(kinds)


def _period(kinds: Sequence[int]) -> int:
    """After how many blocks their kinds repeat."""
    return next(x for x in range(1, len(kinds) + 1) if kinds[x:] == kinds[: len(kinds) - x])


@dataclass(frozen=True)
class BlockProgram:
    """A problem whose blocks are equal but for a few at its ends, on equal devices."""

    problem: Problem
    blocks: range

    def solve(self, known: Counted, *, enough: float, deadline_s: float, until_s: float = INFINITY) -> Counted:
        """What is known after a search from that on.

        It ends where the bound is within this share of the step, or is `until_s`; another call goes on from there. Steps
        that are no shorter than that are not looked for, so that most programs end without a solution.
        """
        self.begin(deadline_s)
        rows = self._rows
        if not rows.has_solutions():
            return replace(known, lower_bound_s=INFINITY)
        bounds_s, patience = list[float](), 1 + int(_PATIENCE * self.problem.num_stages)
        middle = None
        while time.perf_counter() < deadline_s and known.lower_bound_s < min(until_s, known.step_s * (1 - enough)):
            most_s = known.step_s * (1 - enough) if known.step_s * enough > _TOLD_APART_S else INFINITY
            rows.limit_step(most_s)
            found, is_interrupted = rows.solved(deadline_s)
            if not rows.has_solutions():  # of so short a step
                rows.limit_step(INFINITY)
                return replace(known, lower_bound_s=most_s)
            bound_s = min(rows.bound_s * (1 - _SLACK), known.step_s)
            known = replace(known, lower_bound_s=max(known.lower_bound_s, bound_s))
            if found is None:
                return replace(known, is_final=not is_interrupted)
            is_over = False  # the memory of devices that are not in the program so far
            if rows.in_integers:
                found = np.round(found)
                known, is_over = self._tried(rows, known, found.astype(np.int64))
            if is_interrupted:
                return known
            bounds_s.append(rows.bound_s)
            middle = found if middle is None else 0.5 * (middle + found)
            worth_s = rows.bound_s * (1 + (_SLACK if rows.in_integers else _ENOUGH))
            is_cut = self._cut_off(rows, middle, found) > worth_s or self._cut_off(rows, found, found) > worth_s
            is_slow = len(bounds_s) > patience and bounds_s[-1] < bounds_s[-patience] * (1 + _WORTH)
            if rows.in_integers and not is_cut and not is_over:
                return replace(known, is_final=True)
            if not rows.in_integers and (is_slow or not is_cut):
                rows.count_in_integers(True)
        return known

    def begin(self, deadline_s: float) -> None:
        """Make the first rows: of the memory, and, if partitions may fit that, of a path for each device."""
        rows = self._rows
        if rows.num_solved:
            return
        rows.count_in_integers(True)
        last = self.problem.num_devices - 1
        for most in _NUMS_OF_DEVICES:  # the first few tell of most programs that they have no solution
            for device in sorted({round(x) for x in np.linspace(0, last, min(last + 1, most))} - rows.devices):
                self._add_memory(rows, device)
            if rows.has_solutions():
                rows.solved(deadline_s)
        rows.count_in_integers(False)
        for counts in self._paths.by_device_and_back() if rows.has_solutions() else []:
            self._add(rows, counts)

    def _cut_off(self, rows: _Rows, values: Floats, found: Floats) -> float:
        """Add the longest path of a step with these values; returns what it takes with those found."""
        path = self._paths.longest(np.tensordot(values, self._times, 1))
        return float(self._add(rows, path) @ found)

    def _add(self, rows: _Rows, path: Floats) -> Floats:
        seconds: Floats = (self._times * path).sum(axis=(1, 2))
        rows.add([*-seconds, 1.0], 0.0, INFINITY)
        return seconds

    def _tried(self, rows: _Rows, known: Counted, values: Ints) -> tuple[Counted, bool]:
        """What is known with one more partition, if it fits; else whether devices that it does not fit are in the rows now."""
        num_stages = self.problem.num_stages
        way = self._ways[int(np.argmax(values[-len(self._ways) :]))]
        counts = values[: -len(self._ways)].reshape(-1, num_stages).sum(axis=0)
        ranges = np.array([self._layers_of(s, int(counts[s]), way) for s in range(num_stages)])
        ends = np.cumsum(ranges[:, 1] - ranges[:, 0])
        cut, limit = priced_cut(self.problem, ends), self.problem.memory_of(0)
        if limit is None or cut.peak_bytes <= limit:
            return replace(known, cut=cut, step_s=cut.step_s) if cut.step_s < known.step_s else known, False
        first = np.concatenate([[0], ends[:-1]])
        peaks = device_peaks(self._few, first[:, None], ends[:, None])[:, 0]
        over = [x for x in np.argsort(-peaks).tolist() if peaks[x] > limit and x not in rows.devices]
        for device in over[:_MORE_DEVICES]:
            self._add_memory(rows, device)
        return known, bool(over)

    @cached_property
    def _rows(self) -> _Rows:
        """The program so far: a variable for the blocks of each kind and stage, one for each way, and the step."""
        num_stages, num_blocks, num_ways = self.problem.num_stages, len(self.blocks), len(self._ways)
        shares, none = np.bincount(self._kinds) / num_blocks, [0.0] * num_ways
        rows = _Rows.of([num_blocks] * num_stages * len(shares) + [1] * num_ways)
        rows.add([0.0] * num_stages * len(shares) + [1.0] * num_ways + [0.0], 1.0, 1.0)
        for kind, share in enumerate(shares):
            ahead = np.cumsum(self._kinds == kind) - share * np.arange(1, num_blocks + 1)  # of its share
            for stage in range(num_stages - 1 if kind else 0):
                before = np.arange(num_stages) <= stage
                slopes = np.concatenate([((x == kind) - share) * before for x in range(len(shares))])
                rows.add([*slopes, *none, 0.0], min(0.0, ahead.min()), max(0.0, ahead.max()))
            own = np.repeat(np.arange(len(shares)) == kind, num_stages).astype(float)
            rows.add([*own, *none, 0.0], share * num_blocks, share * num_blocks)
        for stages in self.problem.stages_by_device:
            rows.add_sum([kind * num_stages + x for kind in range(len(shares)) for x in stages], num_blocks)
        for stage, (least, most) in enumerate(zip(*self._least_and_most, strict=True)):
            own = -np.tile(np.eye(num_stages)[stage], len(shares))
            rows.add([*own, *least, 0.0], -INFINITY, 0.0)
            rows.add([*-own, *-most, 0.0], -INFINITY, 0.0)
        return rows

    @cached_property
    def _kinds(self) -> Ints:
        """[blocks]: the kind of each."""
        return np.unique(_kinds_of(self.problem)[self.blocks.start : self.blocks.stop], return_inverse=True)[1]

    def _counts(self, first: int, end: int) -> Ints:
        """[kinds]: the blocks among layers first to end - 1."""
        own = self._kinds[max(first - self.blocks.start, 0) : max(end - self.blocks.start, 0)]
        return np.bincount(own, minlength=int(self._kinds.max()) + 1)

    @cached_property
    def _paths(self) -> Paths:
        return paths_of(self.problem)

    @cached_property
    def _few(self) -> Problem:
        return with_few_microbatches(self.problem)

    @cached_property
    def _ways(self) -> list[Ends]:
        """Those for which there are stages enough; the first has all other layers on the first and the last stage."""
        num_before, num_after = self.blocks.start, self.problem.num_layers - self.blocks.stop
        sides = [
            [x for size in range(count) for x in combinations(range(1, count), size)]
            for count in (num_before, num_after)
        ]
        return [
            Ends(before=(*before, num_before), after=(0, *after), is_closed=(closed_before, closed_after))
            for before in sides[0]
            for after in sides[1]
            for closed_before in (False, True)
            for closed_after in (False, True)
            if len(before) + closed_before + len(after) + closed_after < self.problem.num_stages  # left for the blocks
        ]

    def _layers_of(self, stage: int, count: int, way: Ends) -> tuple[int, int]:
        """The layers, first and end, of a stage with so many blocks, wherever these are among the equal ones."""
        blocks, behind = self.blocks, self.problem.num_stages - 1 - stage
        before, after = (0, *way.before), (*way.after, self.problem.num_layers - blocks.stop)
        own = [
            before[stage + 1] - before[stage] if stage < len(way.before) else 0,
            after[len(way.after) - behind] - after[len(way.after) - 1 - behind] if behind < len(way.after) else 0,
        ]
        if own[0]:
            first = before[stage]
            return first, first + own[0] + count + own[1]
        end = blocks.stop + after[len(way.after) - behind] if own[1] else blocks.start + count
        return end - count - own[1], end

    @cached_property
    def _least_and_most(self) -> tuple[Floats, Floats]:
        """[S, ways] each: the fewest and the most blocks of each stage."""
        num_stages, num_blocks = self.problem.num_stages, len(self.blocks)
        least = np.ones((num_stages, len(self._ways)))
        most = np.full_like(least, num_blocks)
        for i, x in enumerate(self._ways):
            first = len(x.before) - 1 + x.is_closed[0]
            last = num_stages - len(x.after) - x.is_closed[1]
            least[:first, i] = least[last + 1 :, i] = most[:first, i] = most[last + 1 :, i] = 0
            if first == last:
                least[first, i] = num_blocks
            most[first : last + 1, i] -= last - first
        return least, most

    def _linear(self, stage: int, costs_of: Callable[[Ints, Ints], Floats]) -> Floats:
        """[kinds + ways, costs]: the costs of a stage for each block of a kind, and for each way beside its blocks, at least.

        `costs_of` has those of stages, [N, costs], by where they begin and end. Workspaces are the largest of some layers:
        kinds differ in them, and above the stash that of a layer before the blocks gets smaller with more of them behind it.
        """
        period, start = _period(self._kinds.tolist()), _first_counted(self.blocks, _period(self._kinds.tolist()))
        least, most = (x[stage].astype(int) for x in self._least_and_most)
        more = np.maximum(least, np.minimum(most, least + _MANY_BLOCKS))  # there may be fewer blocks than stages
        numbers = range(start, start + period) if self.problem.num_stages > 1 else ()
        grown = [tuple(self._layers_of(stage, x + y, self._ways[0]) for y in (0, 1)) for x in numbers]
        beside = [
            [self._layers_of(stage, x, way) for x in counts]
            for way, *counts in zip(self._ways, least.tolist(), more.tolist(), strict=True)
        ]
        places = {  # blocks alone before a stage's end may begin anywhere in a turn
            (a, b): [
                (a + x, b + x)
                for x in range(period if self.blocks.start <= a else 1)
                if not x or b + x <= self.blocks.stop
            ]
            for ranges in beside
            for a, b in ranges
        }
        every = list(dict.fromkeys((*(y for x in grown for y in x), *(y for x in places.values() for y in x))))
        costs = dict(zip(every, costs_of(*np.array(every).T), strict=True))
        slopes = dict[int, Floats]()
        for without, with_one in grown:
            kind = int(np.argmax(self._counts(*with_one) - self._counts(*without)))
            slopes.setdefault(kind, costs[with_one] - costs[without])
        slope = np.array([slopes[x] for x in sorted(slopes)] or [0 * costs[every[0]]] * len(self._counts(0, 0)))
        rest = {x: np.minimum.reduce([costs[y] - self._counts(*y) @ slope for y in at]) for x, at in places.items()}
        return np.array([*slope, *(np.minimum.reduce([rest[x] for x in ranges]) for ranges in beside)])

    @cached_property
    def _times(self) -> Floats:
        """[variables, S, times]: what stages take for each block of theirs, and for each way beside that."""
        num_stages, num_ways = self.problem.num_stages, len(self._ways)
        num_kinds = len(self._counts(0, 0))
        found = np.zeros((num_kinds * num_stages + num_ways, num_stages, len(TIMES)))
        for stage in range(num_stages):

            def times_of(first: Ints, end: Ints, stage: int = stage) -> Floats:
                times: StageSeconds[Floats] = stage_seconds(self.problem, stage, first, end)
                values = {name: getattr(times, name) for name in TIMES}
                if self.problem.recompute == "never":
                    values["recompute_s"] = None
                if stage == num_stages - 1:
                    values |= {"activation_s": None, "gradient_s": None}
                every = [np.broadcast_to(0.0 if x is None else x, first.shape) for x in values.values()]
                return np.stack(every, axis=1)

            linear = self._linear(stage, times_of)
            found[stage:-num_ways:num_stages, stage], found[-num_ways:, stage] = linear[:num_kinds], linear[num_kinds:]
        return found

    def _add_memory(self, rows: _Rows, device: int) -> None:
        """Add what a device holds at each moment for each variable, and the most, in GiB."""
        limit, num_stages = self.problem.memory_of(device), self.problem.num_stages
        if limit is None:
            return
        rows.devices.add(device)
        num_kinds, num_ways = len(self._counts(0, 0)), len(self._ways)
        stages, linear = self.problem.stages_by_device[device], list[Floats]()
        for s in stages:

            def bytes_of(first: Ints, end: Ints, s: int = s) -> Floats:
                parts: Floats = self._few.costs.part_rows(first, end, self._few.boundaries(s)).T.astype(float)
                return parts

            linear.append(self._linear(s, bytes_of))
        for counts in moments_of(self._few, *stages).counts:
            slopes = np.zeros(num_kinds * num_stages + num_ways)
            for stage, own, parts in zip(stages, counts, linear, strict=True):
                held = parts @ own
                slopes[stage:-num_ways:num_stages] = held[:num_kinds]
                slopes[-num_ways:] += held[num_kinds:]
            rows.add([*(slopes / 2**30), 0.0], -INFINITY, limit / 2**30 + _SLACK)


@dataclass
class _Rows:
    """The program: variables that are integers in the end, the step behind them, and sums on which the solver branches."""

    solver: Any
    num_variables: int
    in_integers: bool = False
    devices: set[int] = field(default_factory=set)  # whose memory is in the rows
    is_infeasible: bool = False
    num_solved: int = 0
    bound_s: float = 0.0  # of the last solution

    @classmethod
    def of(cls, most: Sequence[int]) -> _Rows:
        """The program without rows, by the most of each variable; the least is 0."""
        import highspy  # takes longer to import than most plans to make

        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 1)):
            solver.setOptionValue(option, value)
        for x in (*most, INFINITY):
            solver.addVar(0.0, float(x))
        solver.changeColCost(len(most), 1.0)
        return cls(solver, len(most))

    def has_solutions(self) -> bool:
        """Whether none of the programs so far was found to have no solution."""
        return not self.is_infeasible

    def count_in_integers(self, whole: bool) -> None:
        """Whether the variables but the step are integers from now on."""
        import highspy

        kind = highspy.HighsVarType.kInteger if whole else highspy.HighsVarType.kContinuous
        for variable in range(self.solver.getNumCol()):
            if variable != self.num_variables:
                self.solver.changeColIntegrality(variable, kind)
        self.in_integers = whole

    def limit_step(self, most_s: float) -> None:
        """Look for solutions of at most this step; what had none before may have some."""
        self.solver.changeColBounds(self.num_variables, 0.0, most_s)
        self.is_infeasible = False

    def add(self, factors: Sequence[float], least: float, most: float) -> None:
        """A row: the sum of all variables, the step among them, times these factors is between least and most."""
        every = np.asarray(factors, dtype=float)
        places = np.flatnonzero(every).astype(np.int32)
        self.solver.addRow(least, most, len(places), places, every[places])

    def add_sum(self, variables: Sequence[int], most: int) -> None:
        """A variable that is the sum of others, on which the solver may branch: steps depend on a device's sum more than on its parts."""
        self.solver.addVar(0.0, float(most))
        places = np.array([*variables, self.solver.getNumCol() - 1], dtype=np.int32)
        self.solver.addRow(0.0, 0.0, len(places), places, np.where(places > self.num_variables, -1.0, 1.0))

    def solved(self, deadline_s: float) -> tuple[Floats | None, bool]:
        """[variables]: the best solution, None where there is none, or none was found in time; whether the time ended it."""
        import highspy

        left_s = max(_SHORTEST_S, deadline_s - time.perf_counter())
        self.solver.setOptionValue("time_limit", self.solver.getRunTime() + left_s)
        self.solver.run()
        self.num_solved += 1
        status, info = self.solver.getModelStatus(), self.solver.getInfo()
        self.is_infeasible = status == highspy.HighsModelStatus.kInfeasible
        if self.in_integers:
            self.bound_s = info.mip_dual_bound
        elif status == highspy.HighsModelStatus.kOptimal:
            self.bound_s = info.objective_function_value
        found = np.array(self.solver.getSolution().col_value)
        has_found = len(found) and np.isfinite(info.objective_function_value) and not self.is_infeasible
        return found[: self.num_variables] if has_found else None, status == highspy.HighsModelStatus.kTimeLimit
