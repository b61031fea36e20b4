"""The published rules, on cases small enough to follow by hand and by laws that hold for all."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.partition_rules import RULES, block_partition, cumulative_share, least_spread
from gplan.core.errors import NoPlanError
from gplan.evaluate.rivals import equal_counts

CHAINS = st.lists(st.integers(min_value=0, max_value=50), min_size=1, max_size=12)


def loads(weights: list[int], cuts: tuple[int, ...]) -> list[int]:
    return [sum(weights[i:j]) for i, j in pairwise((0, *cuts, len(weights)))]


def smallest_largest(weights: list[int], num_stages: int) -> int:
    return min(max(loads(weights, cuts)) for cuts in combinations(range(1, len(weights)), num_stages - 1))


def test_torchgpipe_leaves_23_where_13_is_possible() -> None:
    weights = [13, 8, 5, 7, 5, 11]
    assert loads(weights, block_partition(weights, num_stages=4)) == [13, 8, 5, 23]
    assert smallest_largest(weights, 4) == 13


def test_torchgpipe_stops_where_blocks_differ_by_at_most_the_largest_layer() -> None:
    assert block_partition([0, 0, 0, 0, 4, 4, 4, 4], num_stages=2) == (6,)
    assert block_partition([4, 4, 4, 4, 0, 0, 0, 0], num_stages=2) == (2,)
    assert block_partition([0, 0, 4, 4], num_stages=2) == (3,)


def test_torchgpipe_takes_the_smallest_layer_off_all_of_them() -> None:
    weights = [1, 1, 1, 1, 1, 1, 2, 2]  # which it sees as 0 0 0 0 0 0 1 1
    assert loads(weights, block_partition(weights, num_stages=2)) == [8, 2]
    assert block_partition([7, 7, 7, 7], num_stages=2) == (2,)


def test_torchgpipe_that_comes_to_no_end_is_an_error() -> None:
    with pytest.raises(NoPlanError, match="into 6 stages does not terminate on these costs"):
        block_partition([0, 0, 0, 0, 2, 5, 0, 0, 0, 1, 0], num_stages=6)


def test_deepspeed_keeps_one_partition_and_so_misses_the_least_spread() -> None:
    weights = [3, 2, 5, 1, 7]
    assert loads(weights, least_spread(weights, num_stages=4)) == [5, 5, 1, 7]
    assert loads(weights, (1, 2, 4)) == [3, 2, 6, 7]


def test_deepspeed_has_the_shorter_last_stage_of_two_with_one_spread() -> None:
    assert least_spread([1, 1, 1], num_stages=2) == (2,)
    assert least_spread([5, 5, 5, 5, 5], num_stages=2) == (3,)


def test_deepspeed_cannot_balance_layers_without_parameters() -> None:
    with pytest.raises(NoPlanError, match="all weights are 0"):
        least_spread([0, 0, 0], num_stages=2)


def test_gpipe_can_leave_a_stage_empty_and_says_so() -> None:
    with pytest.raises(NoPlanError, match="GPipe's cumulative share leaves one of 2 stages of 2 layers empty"):
        cumulative_share([9.0, 1.0], num_stages=2)


def test_gpipe_is_a_third_off_on_equal_layers() -> None:
    found = loads([1] * 8, cumulative_share([1] * 8, num_stages=3))
    assert found == [2, 3, 3]
    assert loads([1] * 9, cumulative_share([1] * 9, num_stages=3)) == [2, 3, 4]  # 3 is possible


def test_equal_counts_give_the_first_stages_one_more() -> None:
    assert equal_counts(11, num_stages=4) == (3, 6, 9)


@pytest.mark.parametrize("rule", RULES)
@given(weights=CHAINS, num_stages=st.integers(min_value=1, max_value=6))
def test_a_rule_cuts_into_stages_with_a_layer_each_or_says_why_not(
    rule: str, weights: list[int], num_stages: int
) -> None:
    try:
        cuts = RULES[rule](weights, num_parameters=weights, num_stages=num_stages)
    except NoPlanError as error:
        assert any(text in str(error) for text in ("empty", "no end"))
        return
    assert len(cuts) == num_stages - 1
    assert all(i < j for i, j in pairwise((0, *cuts, len(weights))))
    assert max(loads(weights, cuts)) >= smallest_largest(weights, num_stages)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_has_no_plan_for_more_stages_than_layers(rule: str) -> None:
    with pytest.raises(NoPlanError, match="leaves one of 3 stages of 2 layers empty"):
        RULES[rule]([1.0, 2.0], num_parameters=[1, 2], num_stages=3)


def test_only_deepspeed_looks_at_parameters() -> None:
    costs, num_parameters = [1.0, 1.0, 5.0, 9.0], [9, 1, 1, 1]
    found = {name: rule(costs, num_parameters=num_parameters, num_stages=2) for name, rule in RULES.items()}
    assert found == {
        "equal layer counts": (2,),
        "DeepSpeed, by parameters": (1,),
        "torchgpipe, by time": (3,),
        "GPipe (lingvo), by time": (3,),
    }
