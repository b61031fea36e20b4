"""Repeated runs are shortened, and the measured layers form a chain."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan_profiler.capture.equal_layers import ChainPositions, sources


def test_layers_that_differ_are_all_measured() -> None:
    assert sources("abcdef") == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("length", [2, 3, 4])
def test_a_short_run_is_measured_whole(length: int) -> None:
    assert sources("e" + "b" * length + "h") == tuple(range(length + 2))


def test_long_run_is_measured_at_its_ends() -> None:
    found = sources("e" + "b" * 96 + "nh")
    assert sorted(set(found)) == [0, 1, 2, 3, 96, 97, 98]
    assert set(found[4:96]) == {2}


def test_patterns_of_several_layers_repeat_too() -> None:
    found = sources("lllg" * 10)
    assert [x for i, x in enumerate(found) if x == i] == [*range(12), *range(36, 40)]
    assert found[12:16] == (4, 5, 6, 7)


@given(st.text("abc", max_size=40))
def test_a_layer_has_the_costs_of_one_with_its_own_structure(structures: str) -> None:
    found = sources(structures)
    assert len(found) == len(structures)
    assert all(structures[source] == own for source, own in zip(found, structures, strict=True))
    assert all(found[source] == source for source in found)


@given(st.text("ab", min_size=1, max_size=60))
def test_measured_layers_form_a_chain(structures: str) -> None:
    """What leaves a kept layer is shaped like what enters the next kept one:
    layers take and give by their structure."""
    kept = sorted(set(sources(structures)))
    for before, layer in pairwise(kept):
        assert structures[before] == structures[layer - 1]


@given(st.text("ab", min_size=1, max_size=40), st.text("ch", max_size=3), st.data())
def test_chain_positions_keep_structure(repeated: str, end: str, data: st.DataObject) -> None:
    structures = repeated * 6 + end
    found = sources(structures)
    kept, places = sorted(set(found)), ChainPositions(found)
    layer = data.draw(st.integers(0, len(found) - 1))
    place = kept.index(found[layer])
    num_later = data.draw(st.integers(1, len(kept) - place))
    after = places.after(layer, num_later)
    assert layer < after <= len(found)
    is_loss = place + num_later == len(kept)
    assert structures[after : after + 1] == ("" if is_loss else structures[kept[place + num_later]])
