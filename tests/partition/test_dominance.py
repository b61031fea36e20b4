"""Which labels are pointless beside others."""

from __future__ import annotations

import numpy as np

from gplan.partition.bounds import StepBounds
from gplan.partition.dominance import GPipeLabels
from gplan.partition.partial_plans import PartialPlans
from tests.partition.problems import every_candidate, make_problem


def kept(labels: list[list[float]], last_ends: list[int]) -> set[tuple[float, ...]]:
    problem = make_problem([1] * 9, num_stages=3, minimize="step-time")
    nodes = PartialPlans(
        paths=np.zeros((len(labels), 1), dtype=np.int64),
        last_end=np.array(last_ends),
        labels=np.array(labels),
        bounds_s=np.array([sum(x) for x in labels]),
    )
    found = GPipeLabels(StepBounds(problem, every_candidate(problem))).undominated(nodes)
    return {tuple(x) for x in found.labels.tolist()}


def test_a_label_that_is_nowhere_better_is_dropped() -> None:
    assert kept([[1, 1, 1, 1, 1], [1, 2, 1, 1, 1], [2, 2, 2, 2, 2]], [3, 3, 3]) == {(1, 1, 1, 1, 1)}


def test_a_label_that_is_better_in_one_number_stays() -> None:
    labels = [[1.0, 9, 1, 1, 1], [9.0, 1, 1, 1, 1], [5.0, 5, 1, 1, 0]]
    assert kept(labels, [3, 3, 3]) == {tuple(x) for x in labels}


def test_labels_that_end_at_different_layers_do_not_compete() -> None:
    assert len(kept([[1.0] * 5, [2.0] * 5], [3, 4])) == 2


def test_one_of_many_equal_labels_stays() -> None:
    nodes = 2000
    assert kept([[1.0] * 5] * nodes, [3] * nodes) == {(1.0,) * 5}


def test_more_labels_than_are_compared_at_once_leave_the_same_ones() -> None:
    labels = [[float(i), float(1500 - i), 0, 0, 0] for i in range(1500)]
    worse = [[x + 1, y + 1, 0.0, 0.0, 0.0] for x, y, *_ in labels]
    assert kept(worse + labels, [3] * 3000) == {tuple(x) for x in labels}
