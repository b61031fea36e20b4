"""Both solvers of published objectives against brute force, the contraction, and time limits."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published.dynamic_program import Plan, best_by_dp
from published.graph import PublishedGraph, contracted
from published.mixed_integer import best_by_milp
from published.solving import solve

from gplan.core.errors import UsageError
from tests.graphs import Graph, graphs, towers


def published(
    compute: list[float],
    shared: dict[tuple[int, ...], float],
    *,
    pairs: list[tuple[int, int]] | None = None,
    num_bytes: list[int] | None = None,
) -> PublishedGraph:
    """A chain, unless its precedence is given."""
    size = len(compute)
    return PublishedGraph(
        nodes=tuple((str(i),) for i in range(size)),
        compute=tuple(compute),
        num_bytes=tuple(num_bytes or [1] * size),
        shared=shared,
        precedence=tuple([(i, i + 1) for i in range(size - 1)] if pairs is None else pairs),
        unit="s",
        memory_bytes=None,
        objective="device-load",
    )


def load(layers: tuple[int, ...], graph: PublishedGraph, objective: str) -> float:
    """The rule word for word."""
    total = sum(graph.compute[x] for x in layers)
    for ends, moved in graph.shared.items() if objective == "device-load" else ():
        total += moved * (any(x in layers for x in ends) and any(x not in layers for x in ends))
    return total


@st.composite
def cases(draw: st.DrawFn) -> tuple[Graph, PublishedGraph, dict[str, Any]]:
    """A graph and what to solve."""
    graph = draw(graphs(max_layers=5))
    layers = st.integers(0, graph.num_layers - 1)
    ends = st.sets(layers, min_size=2).map(lambda x: tuple(sorted(x)))
    shared = draw(st.dictionaries(ends, st.integers(0, 5).map(float), max_size=4)) if graph.num_layers > 1 else {}

    def numbers(most: int) -> list[int]:
        return draw(st.lists(st.integers(0, most), min_size=graph.num_layers, max_size=graph.num_layers))

    made = published([float(x) for x in numbers(9)], shared, pairs=list(graph.pairs), num_bytes=numbers(5))
    return graph, made, {
        "objective": draw(st.sampled_from(["device-load", "compute"])),
        "num_devices": draw(st.integers(1, 4)),
        "memory_bytes": draw(st.sampled_from([None, None, 5, 8, 12])),
    }  # fmt: skip


def check_best(graph: Graph, made: PublishedGraph, options: dict[str, Any], plan: Plan | None) -> None:
    objective, num_devices, most = options["objective"], options["num_devices"], options["memory_bytes"]
    counts = range(1, num_devices + 1) if objective == "device-load" else [num_devices]
    every = {
        stages: max(load(x, made, objective) for x in stages)
        for k in counts
        for stages in graph.chains(k)
        if most is None or max(sum(made.num_bytes[x] for x in layers) for layers in stages) <= most
    }
    if plan is None:
        assert not every
        return
    assert plan.value == plan.lower_bound == min(every.values()) == every[plan.stages]


@given(cases())
@settings(max_examples=300, deadline=None)
def test_dp_equals_brute_force(case: tuple[Graph, PublishedGraph, dict[str, Any]]) -> None:
    graph, made, options = case
    check_best(graph, made, options, best_by_dp(made, graph.positions, **options))


@given(cases())
@settings(max_examples=60, deadline=None)
def test_milp_equals_brute_force(case: tuple[Graph, PublishedGraph, dict[str, Any]]) -> None:
    graph, made, options = case
    check_best(graph, made, options, best_by_milp(made, start=None, time_limit_s=60.0, **options))


@pytest.mark.parametrize("solver", ["dp", "milp"])
def test_value_is_paid_where_it_is_made_and_read_but_not_between(solver: Any) -> None:
    graph = published([4.0, 9.0, 4.0], {(0, 2): 5.0}, pairs=[(0, 1), (1, 2)])
    answer = solve(graph, num_devices=3, solver=solver)
    assert (answer.value, answer.assignment) == (9.0, {"0": 0, "1": 1, "2": 2})


def test_value_with_many_readers_on_one_device_is_paid_once() -> None:
    graph = replace(published([6.0, 1.0, 1.0], {(0, 1, 2): 3.0}), memory_bytes=2)
    answer = solve(graph, num_devices=2)
    assert (answer.value, answer.assignment) == (9.0, {"0": 0, "1": 1, "2": 1})


@pytest.mark.parametrize("solver", ["dp", "milp"])
def test_devices_that_do_not_help_stay_free(solver: Any) -> None:
    answer = solve(published([1.0, 1.0], {(0, 1): 3.0}), num_devices=16, solver=solver)
    assert (answer.value, set(answer.assignment.values())) == (2.0, {0})


@pytest.mark.parametrize("solver", ["dp", "milp"])
def test_more_stages_than_layers_are_infeasible_for_compute(solver: Any) -> None:
    assert solve(published([1.0, 1.0], {(0, 1): 3.0}), num_devices=3, objective="compute", solver=solver).value is None


def test_more_than_the_listed_down_sets_are_for_the_milp(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = published([1.0] * 8, {(0, 1): 0.5}, pairs=[(0, 1)])
    monkeypatch.setattr("published.solving.MOST_DOWN_SETS", 100)
    assert solve(graph, num_devices=4).value == 2.0
    with pytest.raises(UsageError, match="too many for the dynamic program"):
        solve(graph, num_devices=4, solver="dp")


def test_layer_without_time_joins_its_only_neighbour() -> None:
    graph = contracted(published([0, 3, 4], {(0, 1): 1.0, (0, 2): 2.0, (1, 2): 4.0}, num_bytes=[5, 6, 7]))
    assert (graph.nodes, graph.num_bytes) == ((("0", "1"), ("2",)), (11, 7))
    assert (graph.shared, graph.precedence) == ({(0, 1): 6.0}, ((0, 1),))


def test_layer_without_time_between_two_others_stays() -> None:
    assert contracted(published([3, 0, 4], {})).num_layers == 3


def test_tail_without_time_is_contracted_one_by_one() -> None:
    assert contracted(published([3, 4, 0, 0], {})).nodes == (("0",), ("1", "2", "3"))


def test_contraction_holds_whatever_the_memory() -> None:
    graph = published([3, 4, 0], {(0, 1): 1.0, (1, 2): 1.0}, num_bytes=[5, 6, 7])
    assert solve(graph, num_devices=3, memory_bytes=12).value is None  # 6 and 7 bytes would fit on two devices
    assert solve(graph, num_devices=3, memory_bytes=13).assignment == {"0": 0, "1": 1, "2": 1}


def tower_graph() -> tuple[Graph, PublishedGraph]:
    graph = towers(3, 3)
    shared = {(0, 1): 4.0, (1, 2): 1.0, (3, 4): 2.0, (4, 5): 8.0}
    return graph, published([1.0, 5.0, 2.0, 7.0, 3.0, 1.0], shared, pairs=list(graph.pairs))


def test_passed_deadline_is_reported_with_the_bound() -> None:
    graph, made = tower_graph()
    with pytest.raises(TimeoutError, match=r"no plan was found in time; none has a value below 9.5"):
        best_by_dp(
            made, graph.positions, objective="device-load", num_devices=2, memory_bytes=None,
            deadline_s=time.perf_counter(),
        )  # fmt: skip


def test_bound_holds_whatever_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, made = tower_graph()
    seen = []
    for deadline_s in range(200):
        monkeypatch.setattr("published.dynamic_program.time.perf_counter", count().__next__)
        try:
            plan = best_by_dp(
                made, graph.positions, objective="device-load", num_devices=3, memory_bytes=3, deadline_s=deadline_s
            )
        except TimeoutError:
            continue
        assert plan is not None
        seen.append((plan.lower_bound, plan.value))
    optimum = seen[-1][1]
    assert all(lower <= optimum <= found for lower, found in seen)
    assert len(seen) < 200
    assert seen[0][0] < seen[0][1]
    assert seen[-1] == (optimum, optimum)
