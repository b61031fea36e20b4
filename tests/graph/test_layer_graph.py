"""The order that a layer graph demands, checked against all permutations of small graphs."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given

from gplan.graph.layer_graph import LayerGraph
from tests.graphs import Graph, graphs

# 0, then 1 and 2 side by side, then 3, then 4
DIAMOND = LayerGraph(5, ((0, 1), (0, 2), (1, 3), (2, 3), (0, 3), (3, 4)))


@given(graphs(max_layers=5))
def test_order_is_what_all_permutations_agree_on(drawn: Graph) -> None:
    graph = LayerGraph(drawn.num_layers, tuple(drawn.pairs))
    layers = range(graph.num_layers)
    orders = [x for x in permutations(layers) if all(x.index(a) < x.index(b) for a, b in drawn.pairs)]
    assert graph.order in orders
    assert graph.is_chain == (orders == [tuple(layers)])
    always = {(u, v) for u, v in permutations(layers, 2) if all(x.index(u) < x.index(v) for x in orders)}
    assert {(u, v) for u, v in permutations(layers, 2) if graph.comes_before(u, v)} == always
    assert graph.num_before == tuple(sum((u, v) in always for u in layers) for v in layers)
    between = {(u, v) for u, v in always if any((u, x) in always and (x, v) in always for x in layers)}
    assert set(graph.reduced_edges) == always - between


def test_a_diamond() -> None:
    assert DIAMOND.generations == ((0,), (1, 2), (3,), (4,))
    assert DIAMOND.reduced_edges == ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4))
    assert DIAMOND.last_of((0, 1, 2)) == (1, 2)


@pytest.mark.parametrize("num_layers", [1, 2, 40])
def test_a_chain(num_layers: int) -> None:
    chain = LayerGraph(num_layers, tuple((i, i + 1) for i in range(num_layers - 1)))
    assert chain.is_chain
    assert chain.reduced_edges == chain.edges
    assert chain.num_before == tuple(range(num_layers))


def test_a_cycle_is_named() -> None:
    with pytest.raises(ValueError, match=r"layers (1 -> 2 -> 1|2 -> 1 -> 2) wait for each other"):
        print(LayerGraph(3, ((0, 1), (1, 2), (2, 1))).order)


def test_a_layer_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="layer 1 before layer 3: expected layers from 0 to 2"):
        LayerGraph(3, ((1, 3),))
