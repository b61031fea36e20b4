"""Parts of stages from a table are those that are computed stage by stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gplan.cost.part_table import PartTable, rows_of
from gplan.cost.stage_table import ALL_BOUNDARIES, DeviceBoundaries, StageTable
from gplan.graph.down_sets import Ints, Prefixes
from tests.made import make_profile

NUM_LAYERS = 40


def costs() -> StageTable:
    """Of layers that all differ."""
    rising = list(range(1, NUM_LAYERS + 1))
    profile = make_profile(
        rising, weight_bytes=rising, stash_bytes=[3 * x for x in rising], output_bytes=[x % 7 for x in rising],
        workspace_bytes=[x**2 % 11 for x in rising],
    )  # fmt: skip
    return StageTable(profile, 4)


@pytest.mark.parametrize(
    "boundaries", [ALL_BOUNDARIES, DeviceBoundaries(before=False), DeviceBoundaries(in_halves=True)]
)
def test_every_stage_is_as_computed_however_many_are_asked_for(boundaries: DeviceBoundaries) -> None:
    found = costs()
    every = np.array([(i, j) for i in range(NUM_LAYERS) for j in range(i + 1, NUM_LAYERS + 1)])
    computed = replace(found, given_downsets=Prefixes(NUM_LAYERS))  # whose stages are not looked up
    expected = rows_of(computed.parts(*every.T, boundaries), (len(every),))
    for num_layers in (1, 3, 8, NUM_LAYERS):  # ever larger tables
        there = np.flatnonzero(every[:, 1] - every[:, 0] <= num_layers)
        assert (rows_of(found.parts(*every[there].T, boundaries), there.shape) == expected[:, there]).all()
        for some in (there[-1:], there[: len(there) // 2 * 2].reshape(2, -1)):
            first, end = every[some, 0], every[some, 1]
            assert (rows_of(found.parts(first, end, boundaries), some.shape) == expected[:, some]).all()


def test_one_long_stage_needs_no_table_and_short_ones_are_computed_once() -> None:
    numbers = list[int]()

    def compute(first: Ints, end: Ints) -> Ints:
        numbers.append(len(first))
        return (end - first)[None]

    table = PartTable(201, compute)
    assert table.rows(np.array([0]), np.array([200]))[0].tolist() == [200]
    for first in range(20):
        assert table.rows(np.array([first]), np.array([first + 2]))[0].tolist() == [2]
    assert numbers == [1, 200 + 199]


@pytest.mark.parametrize(("first", "end"), [(3, 3), (-1, 2)])
def test_what_is_no_stage_has_no_parts(first: int, end: int) -> None:
    with pytest.raises(AssertionError, match="every stage has a layer"):
        costs().parts(np.array([first]), np.array([end]))
