"""The same objectives as a mixed-integer linear program for HiGHS: an independent check, and for graphs with many down-sets.

The binary y[v, k] states that layer v is on a stage up to k, so x[v, k] = y[v, k] - y[v, k-1] that it is on stage k:
    y[v, k+1] >= y[v, k]        what is before a cut stays before the later ones
    y[u, k] >= y[v, k]          where layer u must come before layer v
For "device-load" devices may stay empty, the last ones first; for "compute" no stage is empty. A shared value costs
device k at least x[u, k] - x[v, k] of its time for any two of its layers. HiGHS runs without its presolve, with which
1.14 and 1.15 call plans optimal that are not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import product
from typing import Any, TypeAlias

import highspy
import networkx as nx
import numpy as np

from published.dynamic_program import Plan
from published.graph import Objective, PublishedGraph, Stages

_SCALE = 1000.0  # about the value of the goal in the program, for a solver's absolute tolerances
_SLACK = 1 + 1e-9  # by which a known plan's value may be off in the program
_WHOLE = 1e-4  # distance from a whole number within which a solver's answer counts as one
_ROUNDING = 1e-9  # by which a row of numbers alone may be missed

Expression: TypeAlias = Any  # a number, variable or linear expression of HiGHS


def best_by_milp(
    graph: PublishedGraph,
    *,
    objective: Objective,
    num_devices: int,
    memory_bytes: int | None,
    start: Plan | None,
    time_limit_s: float,
) -> Plan | None:
    """The plan with the smallest largest load; None if there is none.

    The search begins at `start`. After the time limit the best plan so far is returned with its lower bound, or
    TimeoutError raised.
    """
    deadline_s = time.perf_counter() + time_limit_s
    if start is None and objective == "device-load" and num_devices >= 4:
        try:  # with many devices that may stay empty a program is hard to begin with
            start = best_by_milp(
                graph, objective=objective, num_devices=num_devices // 2, memory_bytes=memory_bytes,
                start=None, time_limit_s=time_limit_s / 2,
            )  # fmt: skip
        except TimeoutError:
            start = None
    program = _Program(graph, objective, num_devices, memory_bytes)
    if program.is_contradictory:
        return None
    if start is not None:
        program.begin_at(start)
    while True:
        status = program.solve(deadline_s - time.perf_counter())
        stages = program.stages_found()
        if stages is None or graph.fits(stages, memory_bytes):
            break
        program.forbid(stages)  # it fits the memory within the solver's tolerance only
    if status == highspy.HighsModelStatus.kInfeasible:  # with a start: by rounding, as no plan is better
        return None if start is None else Plan(stages=start.stages, value=start.value, lower_bound=start.value)
    known = [] if start is None else [(start.value, start.stages)]
    if stages is not None:
        known.append((graph.value(stages, objective), stages))
    if not known:
        raise TimeoutError(f"the MILP found no plan in {time_limit_s:g} s, nor that there is none")
    value, stages = min(known)
    bound = value if status == highspy.HighsModelStatus.kOptimal else program.bound
    return Plan(stages=stages, value=value, lower_bound=min(value, bound))


class _Program:
    """The columns and rows of one problem."""

    def __init__(self, graph: PublishedGraph, objective: Objective, num_devices: int, memory_bytes: int | None) -> None:
        self._graph, self._num_devices, self.is_contradictory = graph, num_devices, False
        self._highs = highspy.Highs()
        for name, value in (("output_flag", False), ("presolve", "off"), ("mip_rel_gap", 0.0), ("mip_abs_gap", 0.0)):
            self._highs.setOptionValue(name, value)
        layers, is_load = range(graph.num_layers), objective == "device-load"
        self._least = max(sum(graph.compute) / num_devices, max(graph.compute))
        self._unit = self._least / _SCALE or 1.0
        self._goal = self._highs.addVariable(lb=self._least / self._unit, obj=1.0)
        self._y = {vk: self._highs.addBinary() for vk in product(layers, range(num_devices - 1))}
        self._add_order(may_be_empty=is_load)
        for k in range(num_devices):
            if memory_bytes is not None:
                self._require(1.0 - total(x / memory_bytes * self._is_on(v, k) for v, x in enumerate(graph.num_bytes)))
            load = [x / self._unit * self._is_on(v, k) for v, x in enumerate(graph.compute)]
            shared = graph.shared.items() if is_load else ()
            load += [moved / self._unit * self._is_split(ends, k) for ends, moved in shared if moved]
            self._require(self._goal - total(load))

    def begin_at(self, start: Plan) -> None:
        """Look for nothing worse than a known plan, from there on."""
        self._highs.changeColBounds(self._goal.index, self._least / self._unit, start.value / self._unit * _SLACK)
        values = self._values_for(start.stages)
        columns, found = np.array([x.index for x in self._y.values()], dtype=np.int32), np.array(values, dtype=float)
        self._highs.setSolution(len(values), columns, found)

    def solve(self, time_limit_s: float) -> highspy.HighsModelStatus:
        """Run the solver; how it ended."""
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + max(1e-3, time_limit_s))
        self._highs.run()
        return self._highs.getModelStatus()

    @property
    def bound(self) -> float:
        """No plan has a smaller value."""
        return max(self._least, self._highs.getInfo().mip_dual_bound * self._unit)

    def stages_found(self) -> Stages | None:
        """The stages in the solver's answer, without empty ones; None where it has none or not in whole numbers."""
        if self._highs.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        values = self._highs.getSolution().col_value
        found = {vk: values[column.index] for vk, column in self._y.items()}
        if any(abs(x - round(x)) > _WHOLE for x in found.values()):
            return None
        layers, last = range(self._graph.num_layers), self._num_devices - 1
        first = [next((k for k in range(last) if round(found[v, k])), last) for v in layers]
        stages = (tuple(v for v in layers if first[v] == k) for k in range(self._num_devices))
        return tuple(stage for stage in stages if stage)

    def forbid(self, stages: Stages) -> None:
        """Exclude this partition."""
        pairs = zip(self._y.values(), self._values_for(stages), strict=True)
        self._require(total(1.0 - column if value else column for column, value in pairs) - 1.0)

    def _values_for(self, stages: Stages) -> list[int]:
        stage_of = {v: k for k, layers in enumerate(stages) for v in layers}
        return [int(stage_of[v] <= k) for v, k in self._y]

    def _require(self, expression: Expression) -> None:
        """A row: this is at least 0."""
        if isinstance(expression, float):
            self.is_contradictory |= expression < -_ROUNDING
        else:
            columns, factors = (expression + 0.0).unique_elements()  # addConstr() refuses factors that HiGHS leaves out
            self._highs.addRow(-(expression + 0.0).constant, highspy.kHighsInf, len(columns), columns, factors)

    def _up_to(self, v: int, k: int) -> Expression:
        return self._y.get((v, k), float(k >= 0))

    def _is_on(self, v: int, k: int) -> Expression:
        return self._up_to(v, k) - self._up_to(v, k - 1)

    def _is_split(self, ends: tuple[int, ...], k: int) -> Expression:
        """Whether device k holds some, but not all of these layers."""
        split = self._highs.addVariable(ub=1.0)
        one, *others = (self._is_on(v, k) for v in ends)
        for other in others:
            self._require(split - one + other)
            self._require(split + one - other)
        return split

    def _add_order(self, *, may_be_empty: bool) -> None:
        graph: nx.DiGraph[int] = nx.DiGraph(self._graph.precedence)
        graph.add_nodes_from(range(self._graph.num_layers))
        reduced = nx.transitive_reduction(graph)
        for k in range(self._num_devices):
            for before, after in reduced.edges:
                self._require(self._up_to(before, k) - self._up_to(after, k))
            for v in graph:
                self._require(self._is_on(v, k))
            num_layers = total(self._is_on(v, k) for v in graph)
            for sink in graph:  # a device is only empty once nothing is left
                if not graph.out_degree(sink):
                    self._require(num_layers - 1.0 + (self._up_to(sink, k - 1) if may_be_empty else 0.0))


def total(terms: Iterable[Expression]) -> Expression:
    """The sum of some expressions; a float where no variable is among them."""
    found = [*terms]
    constant = sum(x for x in found if isinstance(x, float))
    others = [x for x in found if not isinstance(x, float)]
    return highspy.Highs.qsum(others) + constant if others else float(constant)
