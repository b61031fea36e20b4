from __future__ import annotations

from itertools import accumulate

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.graph.down_sets import GraphDownSets, Prefixes, down_sets
from gplan.graph.layer_graph import LayerGraph
from tests.graphs import Graph, graphs, sets_of, towers


def stages_of(positions: GraphDownSets) -> tuple[np.ndarray, np.ndarray]:
    first, end = (x.ravel() for x in np.indices((positions.size, positions.size)))
    inside = positions.are_stages(first, end)
    return first[inside], end[inside]


@given(graphs())
@settings(deadline=None)
def test_down_sets_are_those_that_brute_force_finds_each_once(graph: Graph) -> None:
    found = sets_of(graph.positions)
    assert len(found) == len(set(found))
    assert set(found) == set(graph.brute())


@given(graphs())
@settings(deadline=None)
def test_positions_rise_from_nothing_to_everything(graph: Graph) -> None:
    num_before = graph.positions.num_before.tolist()
    assert num_before == sorted(num_before) == [len(x) for x in sets_of(graph.positions)]
    assert (num_before[0], num_before[-1]) == (0, graph.num_layers)


def pairs_within(sets: list[frozenset[int]]) -> list[tuple[int, int]]:
    return [(i, j) for i in range(len(sets)) for j in range(len(sets)) if sets[i] < sets[j]]


@given(graphs(), st.data())
@settings(deadline=None)
def test_sums_and_stages_follow_the_members(graph: Graph, data: st.DataObject) -> None:
    positions, sets = graph.positions, sets_of(graph.positions)
    values = np.array(data.draw(st.lists(st.integers(-5, 9), min_size=graph.num_layers, max_size=graph.num_layers)))
    assert positions.sums(values).tolist() == [sum(int(values[i]) for i in x) for x in sets]
    assert positions.sums(values / 2).tolist() == [sum(float(values[i]) for i in x) / 2 for x in sets]
    assert [positions.is_before(0)[i] for i in range(len(sets))] == [0 in x for x in sets]
    first, end = stages_of(positions)
    assert list(zip(first.tolist(), end.tolist(), strict=True)) == pairs_within(sets)
    assert all(set(positions.layers(i, j)) == sets[j] - sets[i] for i, j in zip(first, end, strict=True))


@given(graphs(max_layers=4), st.data())
@settings(deadline=None)
def test_peaks_are_those_of_running_the_stage_layer_by_layer(graph: Graph, data: st.DataObject) -> None:
    numbers = st.lists(st.integers(0, 9), min_size=graph.num_layers, max_size=graph.num_layers)
    kept, own = data.draw(numbers), data.draw(numbers)
    first, end = stages_of(graph.positions)

    def peak(layers: tuple[int, ...]) -> int:
        left = list(accumulate(kept[x] for x in layers))
        return max(total + own[x] for total, x in zip(left, layers, strict=True)) - left[-1]

    expected = [peak(graph.positions.layers(i, j)) for i, j in zip(first, end, strict=True)]
    peaks = graph.positions.running_peaks(first, end, kept=np.array(kept), own=np.array(own))
    assert peaks.tolist() == expected


@given(st.integers(1, 70))
@settings(deadline=None)
def test_a_chain_gives_what_prefixes_give(num_layers: int) -> None:
    chain, prefixes = Graph(num_layers, [(i, i + 1) for i in range(num_layers - 1)]).positions, Prefixes(num_layers)
    generator = np.random.default_rng(num_layers)
    values, kept, own = generator.random(num_layers), *generator.integers(0, 99, (2, num_layers))
    first, end = np.triu_indices(num_layers + 1, 1)
    assert (chain.size, chain.num_before.tolist()) == (prefixes.size, prefixes.num_before.tolist())
    assert chain.sums(values).tolist() == prefixes.sums(values).tolist()
    assert chain.sums(kept).tolist() == prefixes.sums(kept).tolist()
    assert chain.is_before(num_layers // 2).tolist() == prefixes.is_before(num_layers // 2).tolist()
    assert chain.layers(0, num_layers) == prefixes.layers(0, num_layers)
    assert chain.are_stages(end, first).tolist() == prefixes.are_stages(end, first).tolist()
    peaks = chain.running_peaks(first, end, kept=kept, own=own)
    assert peaks.tolist() == prefixes.running_peaks(first, end, kept=kept, own=own).tolist()


def test_a_stage_of_a_large_graph_is_found_across_words_of_bits() -> None:
    positions = towers(70, 3).positions
    first, end = stages_of(positions)
    sets = sets_of(positions)
    assert list(zip(first.tolist(), end.tolist(), strict=True)) == pairs_within(sets)


def test_counts_of_known_families() -> None:
    assert Graph(10, []).positions.size == 2**10
    assert towers(30, 20).positions.size == 31 * 21


def test_two_towers_of_200_layers_have_their_40401_down_sets() -> None:
    graph = towers(200, 200)
    found = down_sets(LayerGraph(graph.num_layers, tuple(graph.pairs)), most=40_401)
    assert found is not None
    assert found.size == 201**2
    assert down_sets(LayerGraph(graph.num_layers, tuple(graph.pairs)), most=40_400) is None


def test_more_than_can_ever_be_built_are_noticed_before() -> None:
    assert down_sets(LayerGraph(300, ()), most=50_000) is None
