"""The parts of the integer program: transfers by size, sums of numbers and variables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Link
from gplan.partition.milp.boundary_terms import Amount, transfer
from gplan.partition.milp.program import LinearProgram, solve, weighted
from tests.partition.graphs import LINKS


def seconds_by_program(link: Link, num_bytes: int, *, most_bytes: int = 40, unit_s: float = 0.5) -> float:
    program = LinearProgram()
    sent = program.variable("sent", high=num_bytes)
    program.require(sent, at_least=num_bytes)
    amount = Amount(num_bytes=sent, is_any=int(num_bytes > 0), most_bytes=most_bytes)
    program.require(program.goal, at_least=transfer(program, "t", link=link, amount=amount, unit_s=unit_s))
    assert solve(program, "HiGHS", start={}, time_limit_s=60.0).is_proven
    return program.goal_value * unit_s


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("num_bytes", [0, 1, 2, 3, 5, 6, 7, 40])
def test_a_transfer_takes_what_the_link_says(link: Link, num_bytes: int) -> None:
    assert seconds_by_program(link, num_bytes) == pytest.approx(link.transfer_s(num_bytes), rel=1e-5, abs=1e-9)


def test_a_link_that_never_carries_so_much_needs_no_piece_for_it() -> None:
    assert seconds_by_program(LINKS[3], 2, most_bytes=2) == pytest.approx(LINKS[3].transfer_s(2), rel=1e-5)


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5))))
def test_a_sum_of_numbers_is_a_number(terms: list[tuple[int, int]]) -> None:
    assert weighted(terms) == sum(factor * value for factor, value in terms)


def test_variables_that_cancel_leave_a_number() -> None:
    variable = LinearProgram().variable("x")
    assert weighted([(2.0, variable), (-1.0, 2 * variable + 3)]) == -3.0


def test_a_row_of_numbers_that_does_not_hold_makes_the_program_infeasible() -> None:
    program = LinearProgram()
    program.require(1, at_least=2)
    assert solve(program, "HiGHS", start={}, time_limit_s=60.0).is_infeasible
