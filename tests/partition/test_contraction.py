"""dnn-partitioning's rule for layers that take no time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import Profile, Value, ValueCost
from gplan.core.errors import NoPlanError
from gplan.partition.balance import balance
from gplan.partition.device_load import contracted
from gplan.partition.problem import Problem
from gplan.partition.solve import solve
from tests.partition.problems import make_problem


def problem(edges: list[tuple[int, int]], seconds: list[float], **options: object) -> Problem:
    """`max-device-load` over layers that are joined by these edges."""
    made = make_problem(seconds, [0] * len(seconds), minimize="max-device-load", **options)
    cost = ValueCost(microbatch_size=1, num_bytes=1)
    values = tuple(Value(producer=a, consumers=(b,), costs=(cost,)) for a, b in edges)
    return replace(made, costs=replace(made.costs, profile=replace(made.costs.profile, values=values)))


def test_a_layer_without_time_goes_with_its_only_neighbour_and_takes_its_bytes_there() -> None:
    fewer, groups = contracted(problem([(0, 1), (1, 2)], [0, 3, 4], num_stages=2, weight_bytes=[5, 6, 7]))
    assert groups == ((0, 1), (2,))
    assert [layer.weight_bytes for layer in fewer.costs.profile.layers] == [11, 7]
    assert [(x.producer, x.consumers) for x in fewer.costs.profile.values] == [(0, (1,))]


def test_a_layer_without_time_between_two_others_stays() -> None:
    _, groups = contracted(problem([(0, 1), (1, 2)], [3, 0, 4], num_stages=2))
    assert groups == ((0,), (1,), (2,))


def test_a_tail_of_layers_without_time_goes_one_by_one() -> None:
    _, groups = contracted(problem([(0, 1), (1, 2), (2, 3)], [3, 4, 0, 0], num_stages=2))
    assert groups == ((0,), (1, 2, 3))


def test_what_stays_together_by_the_rule_stays_together_whatever_the_memory() -> None:
    asked = problem([(0, 1), (1, 2)], [3, 4, 0], num_stages=3, weight_bytes=[5, 6, 7])
    assert solve(replace(asked, memory_bytes=12)) is None  # 6 and 7 bytes would fit on two devices
    solution = solve(replace(asked, memory_bytes=13))
    assert solution is not None
    assert solution.stages == ((0,), (1, 2))


def test_a_plan_names_every_layer_and_counts_only_the_devices_that_are_used() -> None:
    profile: Profile = problem([(0, 1), (1, 2)], [3, 4, 0], num_stages=3).costs.profile
    plan = balance(profile, num_devices=3, num_microbatches=1, minimize="max-device-load")
    assert [stage.layer_names for stage in plan.stages] == [("a",), ("b", "c")]
    with pytest.raises(NoPlanError, match="fits 1 B"):
        balance(
            replace(profile, layers=tuple(replace(x, weight_bytes=2) for x in profile.layers)),
            num_devices=3, num_microbatches=1, minimize="max-device-load", memory_bytes=1,
        )  # fmt: skip
