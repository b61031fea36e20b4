"""The best assignment of a published graph's nodes to devices, by the dynamic program or the MILP."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gplan.core.errors import UsageError
from gplan.graph.down_sets import down_sets
from gplan.graph.layer_graph import LayerGraph
from published.dynamic_program import Plan, best_by_dp
from published.graph import Objective, PublishedGraph, contracted
from published.mixed_integer import best_by_milp

Solver: TypeAlias = Literal["auto", "dp", "milp"]

MOST_DOWN_SETS = 200_000
"""The dynamic program is not used with more than these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best plan: its value in the graph's unit and the device of each node; None where no plan fits."""

    value: float | None
    is_proven: bool
    seconds: float
    assignment: dict[str, int]


def solve(
    graph: PublishedGraph,
    *,
    num_devices: int,
    objective: Objective | None = None,
    memory_bytes: int | None = None,
    solver: Solver = "auto",
    time_limit_s: float = 60.0,
) -> Answer:
    """The best assignment for K devices; objective and memory are those of the file where they are not given.

    "auto" takes the dynamic program and, for graphs with too many down-sets, the MILP. The MILP starts from the plan of
    the dynamic program where there is one. Raises UsageError for numbers that cannot be used or a graph that is too
    large for "dp"; TimeoutError where no plan was found in time.
    """
    if num_devices < 1:
        raise UsageError(f"asked for {num_devices} devices; expected at least 1")
    if time_limit_s <= 0 or (memory_bytes is not None and memory_bytes <= 0):
        raise UsageError(f"asked for {memory_bytes} bytes and {time_limit_s:g} s; expected more than 0 of both")
    started_s = time.perf_counter()
    objective = objective or graph.objective
    memory_bytes = graph.memory_bytes if memory_bytes is None else memory_bytes
    graph = contracted(graph) if objective == "device-load" else graph
    asked = {"objective": objective, "num_devices": num_devices, "memory_bytes": memory_bytes}
    plan = _plan(graph, solver, time_limit_s, **asked)
    seconds = time.perf_counter() - started_s
    if plan is None:
        return Answer(value=None, is_proven=True, seconds=seconds, assignment={})
    device_of = {node: k for k, layers in enumerate(plan.stages) for v in layers for node in graph.nodes[v]}
    return Answer(value=plan.value, is_proven=plan.is_proven, seconds=seconds, assignment=device_of)


def _plan(graph: PublishedGraph, solver: Solver, time_limit_s: float, **asked: Any) -> Plan | None:
    downsets = down_sets(LayerGraph(graph.num_layers, graph.precedence), most=MOST_DOWN_SETS)
    if downsets is None and solver == "dp":
        raise UsageError(
            f"the graph has more than {MOST_DOWN_SETS} down-sets, too many for the dynamic program; take --solver milp"
        )
    start: Plan | None = None
    if downsets is not None:
        try:
            start = best_by_dp(graph, downsets, deadline_s=time.perf_counter() + time_limit_s, **asked)
            if solver != "milp":
                return start
        except TimeoutError:
            if solver == "dp":
                raise
    return best_by_milp(graph, start=start, time_limit_s=time_limit_s, **asked)
