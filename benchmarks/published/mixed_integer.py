"""The same objectives as a mixed-integer linear program: an independent check, and for graphs with many down-sets.

The binary y[v, k] states that layer v is on a stage up to k, so x[v, k] = y[v, k] - y[v, k-1] that it is on stage k:
    y[v, k+1] >= y[v, k]        what is before a cut stays before the later ones
    y[u, k] >= y[v, k]          where layer u must come before layer v
For "device-load" devices may stay empty, the last ones first; for "compute" no stage is empty. A shared value costs
device k at least x[u, k] - x[v, k] of its time for any two of its layers.
"""

from __future__ import annotations

import time

from gplan.graph.layer_graph import LayerGraph
from gplan.partition.milp.program import Expression, LinearProgram, available_solver, solve, total, weighted
from published.dynamic_program import Plan
from published.graph import Objective, PublishedGraph, Stages

_SCALE = 1000.0  # about the value of the goal in the program, for a solver's absolute tolerances
_SLACK = 1 + 1e-9  # by which a known plan's value may be off in the program
_WHOLE = 1e-4  # distance from a whole number within which a solver's answer counts as one


def best_by_milp(
    graph: PublishedGraph,
    *,
    objective: Objective,
    num_devices: int,
    memory_bytes: int | None,
    start: Plan | None,
    time_limit_s: float,
) -> Plan | None:
    """The plan with the smallest largest load, by HiGHS, or CBC where HiGHS cannot be imported; None if there is none.

    The search begins at `start`. After the time limit the best plan so far is returned with its lower bound, or
    TimeoutError raised.
    """
    deadline_s = time.perf_counter() + time_limit_s
    if start is None and objective == "device-load" and num_devices >= 4:
        start = _on_half(graph, num_devices, memory_bytes, time_limit_s / 2)
    formulation = _Formulation(graph, objective, num_devices, memory_bytes)
    if start is not None:
        formulation.program.limit_goal(start.value / formulation.unit * _SLACK)
    hint = formulation.values_for(start.stages) if start is not None else {}
    name = available_solver(None)
    while True:
        left_s = max(1e-3, deadline_s - time.perf_counter())
        outcome = solve(formulation.program, name, start=hint, time_limit_s=left_s)
        stages = formulation.stages_found() if outcome.has_values else None
        if stages is None or graph.fits(stages, memory_bytes):
            break
        formulation.forbid(stages)  # it fits the memory within the solver's tolerance only
    if outcome.is_infeasible:  # with a start: by rounding, as no plan is better
        return None if start is None else Plan(stages=start.stages, value=start.value, lower_bound=start.value)
    known = [] if start is None else [(start.value, start.stages)]
    if stages is not None:
        known.append((graph.value(stages, objective), stages))
    if not known:
        raise TimeoutError(f"the MILP found no plan in {time_limit_s:g} s, nor that there is none")
    value, stages = min(known)
    bound = value if outcome.is_proven else max(formulation.least, outcome.bound * formulation.unit)
    return Plan(stages=stages, value=value, lower_bound=min(value, bound))


def _on_half(graph: PublishedGraph, num_devices: int, memory_bytes: int | None, time_limit_s: float) -> Plan | None:
    """A plan to start from, on half of the devices: with many that may stay empty a program is hard to begin with."""
    try:
        return best_by_milp(
            graph, objective="device-load", num_devices=num_devices // 2, memory_bytes=memory_bytes,
            start=None, time_limit_s=time_limit_s,
        )  # fmt: skip
    except TimeoutError:
        return None


class _Formulation:
    """The program of one problem."""

    def __init__(self, graph: PublishedGraph, objective: Objective, num_devices: int, memory_bytes: int | None) -> None:
        self._graph, self._num_devices = graph, num_devices
        self.least = max(sum(graph.compute) / num_devices, max(graph.compute))
        self.unit = self.least / _SCALE or 1.0
        self.program = LinearProgram()
        self._y = {
            (v, k): self.program.variable(f"y_{v}_{k}", is_binary=True)
            for k in range(num_devices - 1)
            for v in range(graph.num_layers)
        }
        self._add_order(LayerGraph(graph.num_layers, graph.precedence), may_be_empty=objective == "device-load")
        self.program.require(self.program.goal, at_least=self.least / self.unit)
        for k in range(num_devices):
            if memory_bytes is not None:
                held = weighted(
                    (num_bytes / memory_bytes, self._is_on(v, k)) for v, num_bytes in enumerate(graph.num_bytes)
                )
                self.program.require(1.0, at_least=held)
            load = [(time / self.unit, self._is_on(v, k)) for v, time in enumerate(graph.compute)]
            if objective == "device-load":
                load += [(t / self.unit, self._is_split(ends, k)) for ends, t in graph.shared.items() if t]
            self.program.require(self.program.goal, at_least=weighted(load))

    def values_for(self, stages: Stages) -> dict[Expression, int]:
        """The values of the binaries for these stages."""
        stage_of = {v: k for k, layers in enumerate(stages) for v in layers}
        return {variable: int(stage_of[v] <= k) for (v, k), variable in self._y.items()}

    def stages_found(self) -> Stages | None:
        """The stages in the solver's answer, without empty ones; None where its values are not whole numbers."""
        found = {key: variable.value() for key, variable in self._y.items()}
        if any(x is None or abs(x - round(x)) > _WHOLE for x in found.values()):
            return None
        layers, last = range(self._graph.num_layers), self._num_devices - 1
        first = [next((k for k in range(last) if round(found[v, k])), last) for v in layers]
        stages = (tuple(v for v in layers if first[v] == k) for k in range(self._num_devices))
        return tuple(stage for stage in stages if stage)

    def forbid(self, stages: Stages) -> None:
        """Exclude this partition."""
        values = self.values_for(stages)
        differs = total(weighted([(1.0, 1), (-1.0, x)]) if value else x for x, value in values.items())
        self.program.require(differs, at_least=1)

    def _up_to(self, v: int, k: int) -> Expression:
        return self._y.get((v, k), int(k >= 0))

    def _is_on(self, v: int, k: int) -> Expression:
        return weighted([(1.0, self._up_to(v, k)), (-1.0, self._up_to(v, k - 1))])

    def _is_split(self, ends: tuple[int, ...], k: int) -> Expression:
        """Whether device k holds some, but not all of these layers."""
        one, *others = (self._is_on(v, k) for v in ends)
        differences = [weighted([(sign, one), (-sign, other)]) for other in others for sign in (1.0, -1.0)]
        return self.program.at_least(f"split_{'_'.join(map(str, ends))}_{k}", differences, high=1)

    def _add_order(self, order: LayerGraph, *, may_be_empty: bool) -> None:
        require, layers, up_to = self.program.require, range(self._graph.num_layers), self._up_to
        for k in range(self._num_devices):
            for before, after in order.reduced_edges:
                require(up_to(before, k), at_least=up_to(after, k))
            for v in layers:
                require(up_to(v, k), at_least=up_to(v, k - 1))
            for u, v in () if may_be_empty else order.fixed_steps:
                require(up_to(v, k), at_least=up_to(u, k - 1))
            num_layers = total(self._is_on(v, k) for v in layers)
            for sink in order.sinks:  # a device is only empty once nothing is left
                left = weighted([(1.0, 1), (-1.0, up_to(sink, k - 1))]) if may_be_empty else 1
                require(num_layers, at_least=left)
