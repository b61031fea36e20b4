"""The best numbers of blocks on stages where all blocks are equal, by cutting planes: a program in integers.

Seconds and bytes of a stage are then linear in its number of blocks n_s, so that every path through the step is a row
    T >= sum over s of (a_s n_s + b_s)                      Paths of critical_path
and every moment of a device at which its memory may peak is another. The program has the rows found so far; its solution
is simulated, and the longest path of that step is the next row (cutting planes; Kelley 1960). First the relaxation to
real numbers is solved until no row is violated, then the program in integers. The bound of each of them holds for every
partition whose ends are on the first and the last stage; every solution in integers is a partition, priced by simulation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from gplan.core import StageSeconds
from gplan.graph.down_sets import Floats, Ints
from gplan.partition.batch_simulation import Delay, simulate_window
from gplan.partition.candidates import INFINITY, stage_seconds
from gplan.partition.critical_path import TIMES, Paths
from gplan.partition.even_cuts import with_few_microbatches
from gplan.partition.problem import Problem, device_peaks, moments_of

_SLACK = 1e-9
_ENOUGH = 1e-4  # share of the bound by which a path may be longer in the relaxation
_PATIENCE, _WORTH = 10, 5e-4  # so many rows raise the relaxation's bound by less: integers may raise it more
_MOST_DEVICES = 12  # whose memory is in the program; of a solution it is looked at on all
_SHORTEST_S = 0.2  # of one program in integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What a program found: where the stages of the best partition end [S], its step, and a bound of all steps."""

    ends: Ints | None
    step_s: float
    lower_bound_s: float


def are_equal(problem: Problem, blocks: range) -> bool:
    """Whether a program counts these layers: all have the same costs, and one layer is before and one after them."""
    layers = problem.costs.profile.layers
    alike = {(x.weight_bytes, x.gradient_bytes, x.num_parameters, x.costs) for x in layers[blocks.start : blocks.stop]}
    return len(alike) == 1 and blocks.start == 1 and blocks.stop == len(layers) - 1


@dataclass(frozen=True)
class BlockProgram:
    """A problem whose blocks are equal, on equal devices."""

    problem: Problem
    blocks: range

    def solve(self, known: Counted, *, enough: float, deadline_s: float) -> Counted:
        """What is known after a search from that on; it ends where the bound is within this share of the step."""
        rows = self._rows
        if not rows.num_solved:
            rows.count_in_integers(True)
            rows.solved(deadline_s)
            rows.count_in_integers(False)
            for counts in self._paths.by_device() if rows.has_solutions() else []:
                self._add(rows, counts)
        if not rows.has_solutions():
            return replace(known, lower_bound_s=INFINITY)
        bounds_s = list[float]()
        middle = np.full(self.problem.num_stages, len(self.blocks) / self.problem.num_stages)
        while time.perf_counter() < deadline_s and known.lower_bound_s < known.step_s * (1 - enough):
            found = rows.solved(deadline_s)
            if not rows.has_solutions():
                return replace(known, lower_bound_s=INFINITY)
            bound_s = min(rows.bound_s * (1 - _SLACK), known.step_s)
            known = replace(known, lower_bound_s=max(known.lower_bound_s, bound_s))
            if found is None:
                break
            if rows.in_integers:
                found = np.round(found)
                known = self._tried(known, found.astype(np.int64))
            bounds_s.append(rows.bound_s)
            middle = 0.5 * (middle + found)
            worth_s = rows.bound_s * (1 + (_SLACK if rows.in_integers else _ENOUGH))
            is_cut = self._cut_off(rows, middle, found) > worth_s or self._cut_off(rows, found, found) > worth_s
            is_slow = len(bounds_s) > _PATIENCE and bounds_s[-1] < bounds_s[-_PATIENCE] * (1 + _WORTH)
            if rows.in_integers and not is_cut:
                break
            if not rows.in_integers and (is_slow or not is_cut):
                rows.count_in_integers(True)
        return known

    def _cut_off(self, rows: _Rows, counts: Floats, found: Floats) -> float:
        """Add the longest path of a step with these counts; returns what it takes with those found."""
        path = self._paths.longest(self._fixed + self._slopes * counts[:, None])
        self._add(rows, path)
        return float((path * (self._fixed + self._slopes * found[:, None])).sum())

    def _add(self, rows: _Rows, path: Floats) -> None:
        rows.add_path((path * self._slopes).sum(axis=1), float((path * self._fixed).sum()))

    def _tried(self, known: Counted, counts: Ints) -> Counted:
        """What is known with one more partition, if it fits."""
        ends = self.blocks.start + np.cumsum(counts)
        ends[-1] = self.problem.num_layers
        first = np.array([0, *ends[:-1]])
        limit = self.problem.memory_of(0)
        if limit is not None and device_peaks(self._few, first[:, None], ends[:, None]).max() > limit:
            return known
        window = [
            stage_seconds(self.problem, s, first[s : s + 1], ends[s : s + 1]) for s in range(self.problem.num_stages)
        ]
        step_s = float(simulate_window(self.problem, window, first_stage=0, delay=Delay()).optimizer_s[0])
        return replace(known, ends=ends, step_s=step_s) if step_s < known.step_s else known

    @cached_property
    def _rows(self) -> _Rows:
        """The program so far."""
        return _Rows.of(len(self.blocks), self.problem.num_stages, self._memory_rows)

    @cached_property
    def _paths(self) -> Paths:
        return Paths(self.problem)

    @cached_property
    def _few(self) -> Problem:
        return with_few_microbatches(self.problem)

    def _ends_of(self, stage: int, count: int) -> tuple[Ints, Ints]:
        """Where a stage with so many blocks begins and ends; the ends of the model are on the first and last."""
        first = 0 if stage == 0 else self.blocks.start
        end = self.blocks.start + count
        if stage == self.problem.num_stages - 1:
            first, end = (0 if stage == 0 else self.blocks.stop - count), self.problem.num_layers
        return np.array([first]), np.array([end])

    @cached_property
    def _fixed(self) -> Floats:
        """[S, times]: what each stage takes beside its blocks."""
        return self._times(1) - self._slopes

    @cached_property
    def _slopes(self) -> Floats:
        """[S, times]: what each block of a stage takes."""
        return self._times(2) - self._times(1)

    def _times(self, count: int) -> Floats:
        found = np.zeros((self.problem.num_stages, len(TIMES)))
        last = self.problem.num_stages - 1
        for stage in range(self.problem.num_stages):
            times: StageSeconds[Floats] = stage_seconds(self.problem, stage, *self._ends_of(stage, count))
            for i, name in enumerate(TIMES):
                value = getattr(times, name)
                found[stage, i] = 0.0 if value is None else float(value[0])
            if self.problem.recompute == "never":
                found[stage, TIMES.index("recompute_s")] = 0.0
            if stage == last:
                found[stage, TIMES.index("activation_s")] = found[stage, TIMES.index("gradient_s")] = 0.0
        return found

    @cached_property
    def _memory_rows(self) -> list[tuple[Floats, float]]:
        """What a device holds at a moment for each block [S], and the most bytes that are left for all of them."""
        limit, found = self.problem.memory_of(0), list[tuple[Floats, float]]()
        if limit is None:
            return found
        last = self.problem.num_devices - 1
        for device in sorted({round(x) for x in np.linspace(0, last, min(last + 1, _MOST_DEVICES))}):
            stages = self.problem.stages_by_device[device]
            one, two = (
                [
                    self._few.costs.part_rows(*self._ends_of(s, count), self._few.boundaries(s))[:, 0].astype(float)
                    for s in stages
                ]
                for count in (1, 2)
            )
            for counts in moments_of(self._few, *stages).counts:
                slopes, fixed = np.zeros(self.problem.num_stages), 0.0
                for stage, own, a, b in zip(stages, counts, one, two, strict=True):
                    slopes[stage] = own @ (b - a)
                    fixed += float(own @ (2 * a - b))
                found.append((slopes / 2**30, (limit - fixed) / 2**30 + _SLACK))
        return found


@dataclass
class _Rows:
    """The program: a number of blocks for each stage, and the step as the last variable."""

    solver: Any
    num_stages: int
    in_integers: bool = False
    is_infeasible: bool = False
    num_solved: int = 0
    bound_s: float = 0.0  # of the last solution

    @classmethod
    def of(cls, num_blocks: int, num_stages: int, memory_rows: Sequence[tuple[Floats, float]]) -> _Rows:
        """The program without paths; the first and the last stage may be without blocks, as they have an end."""
        import highspy  # takes longer to import than most plans to make

        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 1)):
            solver.setOptionValue(option, value)
        for stage in range(num_stages):
            has_end = num_stages > 1 and stage in (0, num_stages - 1)
            solver.addVar(0.0 if has_end else 1.0, float(num_blocks))
        solver.addVar(0.0, INFINITY)
        solver.changeColCost(num_stages, 1.0)
        every = np.arange(num_stages, dtype=np.int32)
        solver.addRow(num_blocks, num_blocks, num_stages, every, np.ones(num_stages))
        for slopes, most in memory_rows:
            places = np.flatnonzero(slopes).astype(np.int32)
            solver.addRow(-INFINITY, most, len(places), places, slopes[places])
        return cls(solver, num_stages)

    def has_solutions(self) -> bool:
        """Whether none of the programs so far was found to have no solution."""
        return not self.is_infeasible

    def count_in_integers(self, whole: bool) -> None:
        """Whether numbers of blocks are integers from now on."""
        import highspy

        kind = highspy.HighsVarType.kInteger if whole else highspy.HighsVarType.kContinuous
        for stage in range(self.num_stages):
            self.solver.changeColIntegrality(stage, kind)
        self.in_integers = whole

    def add_path(self, slopes_s: Floats, fixed_s: float) -> None:
        """The step is at least what a path takes."""
        every = np.arange(self.num_stages + 1, dtype=np.int32)
        self.solver.addRow(fixed_s, INFINITY, self.num_stages + 1, every, np.append(-slopes_s, 1.0))

    def solved(self, deadline_s: float) -> Floats | None:
        """[S]: the numbers of blocks of the best solution; None where there is none, or none was found in time."""
        import highspy

        if self.in_integers:
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
        return found[: self.num_stages] if has_found else None
