from __future__ import annotations

import time
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.core import Value, ValueCost
from gplan.graph.down_sets import Prefixes
from gplan.partition.device_load import DeviceLoadPlan, smallest_device_load
from tests.graphs import Graph, graphs, towers

SIZE = (ValueCost(microbatch_size=1, num_bytes=1),)


def made(producer: int | None, *consumers: int) -> Value:
    return Value(producer=producer, consumers=consumers, costs=SIZE)


@st.composite
def values_of(draw: st.DrawFn, graph: Graph) -> list[Value]:
    """Forward along the graph or backward against it, with and without what lies outside the model."""
    found = []
    for layer in draw(st.lists(st.integers(0, graph.num_layers - 1), max_size=5)):
        is_gradient = draw(st.booleans())
        others = [a if is_gradient else b for a, b in graph.pairs if layer == (b if is_gradient else a)]
        consumers = draw(st.sets(st.sampled_from([*others, graph.num_layers]), min_size=1))
        producer = draw(st.sampled_from([layer, layer, layer, None]))
        value = Value(producer=producer, consumers=tuple(sorted(consumers)), costs=SIZE, is_gradient=is_gradient)
        found.append(value)
    return found


def load_s(
    layers: tuple[int, ...], num_layers: int, compute_s: list[int], values: list[Value], value_s: list[int]
) -> int:
    """The rule word for word: once for what is made here and read elsewhere,
    once for what is read here and made elsewhere."""
    total = sum(compute_s[x] for x in layers)
    for value, seconds in zip(values, value_s, strict=True):
        readers = [x for x in value.consumers if x < num_layers]
        if value.producer in layers:
            total += seconds * any(x not in layers for x in readers)
        elif value.producer is not None:
            total += seconds * any(x in layers for x in readers)
    return total


@given(graphs(max_layers=5), st.integers(1, 4), st.data())
@settings(max_examples=300, deadline=None)
def test_no_chain_of_down_sets_has_a_smaller_largest_load(graph: Graph, num_devices: int, data: st.DataObject) -> None:
    def numbers(length: int, most: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, most), min_size=length, max_size=length))

    compute_s, weight_bytes = numbers(graph.num_layers, 9), numbers(graph.num_layers, 5)
    values = data.draw(values_of(graph))
    value_s = numbers(len(values), 5)
    memory_bytes = data.draw(st.sampled_from([100, 100, 5, 8, 12]))
    every = [
        max(load_s(x, graph.num_layers, compute_s, values, value_s) for x in stages)
        for k in range(1, num_devices + 1)
        for stages in graph.chains(k)
        if max(sum(weight_bytes[x] for x in layers) for layers in stages) <= memory_bytes
    ]
    plan = smallest_device_load(
        graph.positions,
        compute_s=np.array(compute_s, dtype=float),
        weight_bytes=np.array(weight_bytes),
        values=values,
        value_s=np.array(value_s, dtype=float),
        num_devices=num_devices,
        memory_bytes=memory_bytes,
    )
    if plan is None:
        assert not every
        return
    assert (plan.load_s, plan.lower_bound_s) == (min(every), min(every))
    assert plan.stages in set(graph.chains(len(plan.stages)))
    assert len(plan.stages) <= num_devices
    assert plan.load_s == max(load_s(x, graph.num_layers, compute_s, values, value_s) for x in plan.stages)
    assert max(sum(weight_bytes[x] for x in layers) for layers in plan.stages) <= memory_bytes


def plan_of_chain(
    compute_s: list[float], values: list[Value], value_s: list[float], **limits: int
) -> DeviceLoadPlan | None:
    return smallest_device_load(
        Prefixes(len(compute_s)),
        compute_s=np.array(compute_s),
        weight_bytes=np.ones(len(compute_s), dtype=np.int64),
        values=values,
        value_s=np.array(value_s),
        num_devices=limits.get("num_devices", 2),
        memory_bytes=limits.get("memory_bytes", 10),
    )


def test_a_value_is_paid_where_it_is_made_and_where_it_is_read_but_not_on_the_way() -> None:
    plan = plan_of_chain([4.0, 9.0, 4.0], [made(0, 2)], [5.0], num_devices=3)
    assert plan == DeviceLoadPlan(stages=((0,), (1,), (2,)), load_s=9.0, lower_bound_s=9.0)


def test_a_value_with_many_readers_on_one_device_is_paid_once_there() -> None:
    plan = plan_of_chain([6.0, 1.0, 1.0], [made(0, 1, 2)], [3.0], num_devices=2, memory_bytes=2)
    assert plan is not None
    assert (plan.stages, plan.load_s) == (((0,), (1, 2)), 9.0)


def test_what_enters_or_leaves_the_model_costs_nothing() -> None:
    plan = plan_of_chain([1.0, 1.0], [made(None, 0, 1), made(0, 2), made(1, 2)], [9.0, 9.0, 9.0])
    assert plan is not None
    assert plan.load_s == 1.0


def test_fewer_devices_are_used_where_more_do_not_help() -> None:
    plan = plan_of_chain([1.0, 1.0], [made(0, 1)], [3.0], num_devices=2)
    assert plan is not None
    assert plan.stages == ((0, 1),)


def test_weights_that_no_device_holds_leave_no_plan() -> None:
    assert plan_of_chain([1.0, 1.0], [], [], memory_bytes=0) is None
    assert plan_of_chain([1.0, 1.0, 1.0], [], [], num_devices=2, memory_bytes=1) is None


def test_a_deadline_that_has_passed_is_said_with_the_bound() -> None:
    graph = towers(3, 3)
    with pytest.raises(TimeoutError, match=r"no plan was found in time; none has a load below 3 s"):
        smallest_device_load(
            graph.positions,
            compute_s=np.ones(6),
            weight_bytes=np.zeros(6, dtype=np.int64),
            values=[],
            value_s=np.zeros(0),
            num_devices=2,
            memory_bytes=1,
            deadline_s=time.perf_counter(),
        )


def test_whatever_the_deadline_the_bound_is_below_the_optimum_and_the_plan_not(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = towers(3, 3)
    seen = []
    for deadline_s in range(200):
        monkeypatch.setattr("gplan.partition.device_load.time.perf_counter", count().__next__)
        try:
            plan = smallest_device_load(
                graph.positions,
                compute_s=np.array([1.0, 5.0, 2.0, 7.0, 3.0, 1.0]),
                weight_bytes=np.ones(6, dtype=np.int64),
                values=[made(0, 1), made(1, 2), made(3, 4), made(4, 5)],
                value_s=np.array([4.0, 1.0, 2.0, 8.0]),
                num_devices=3,
                memory_bytes=3,
                deadline_s=deadline_s,
            )
        except TimeoutError:
            continue
        assert plan is not None
        seen.append((plan.lower_bound_s, plan.load_s))
    optimum_s = seen[-1][1]
    assert all(lower_s <= optimum_s <= found_s for lower_s, found_s in seen)
    assert len(seen) < 200
    assert seen[0][0] < seen[0][1]
    assert seen[-1] == (optimum_s, optimum_s)
