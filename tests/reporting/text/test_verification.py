"""A verification as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import LeftOut, Plan, Run, Verification
from gplan.evaluate.verify import verify
from gplan.reporting.text.verification import verification_view
from gplan.simulation.simulator import simulate
from tests.evaluate.hosts import measured_run, usual_plan, usual_profile
from tests.reporting.text.printed import printed


def verified(ran: str) -> Verification:
    """A plan by 1F1B that does its actions in the order of the schedule `ran`, without rivals."""

    def host(plan: Plan) -> Run:
        return measured_run(plan, simulate(replace(plan, schedule=ran)))

    profile = usual_profile()
    plan = replace(usual_plan(profile), schedule="1f1b")
    return verify(plan, profile, host, engine="torch", num_rounds=1, num_rivals=0)


@pytest.mark.parametrize(("ran", "has_parts"), [("1f1b", True), ("gpipe", False)])
def test_the_error_is_split_only_where_the_devices_kept_to_the_plans_order(ran: str, has_parts: bool) -> None:
    lines = "\n".join(printed(verification_view(verified(ran)), width=120))
    assert ("from the predicted step to the measured one" in lines) is has_parts
    assert ("the error cannot be divided into parts" in lines) is not has_parts


def test_a_rival_that_failed_later_has_its_row_and_a_line_that_says_so() -> None:
    found = verified("1f1b")
    long = replace(found.chosen, steps_s=(1.0, 2.0))
    short = replace(found.chosen, label="short", steps_s=(1.1,))
    failed = tuple(LeftOut(label=label, reason="failed in round 2") for label in ("short", "gone"))
    lines = printed(verification_view(replace(found, contenders=(long, short), left_out=failed)))
    assert "+10.0 %" in next(line for line in lines if line.startswith("short "))
    assert "not run in all rounds: short: failed in round 2" in lines
    assert "left out: gone: failed in round 2" in lines


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_one_round_has_no_mean_and_no_range(num_rounds: int) -> None:
    found = verified("1f1b")
    found = replace(found, contenders=(replace(found.chosen, steps_s=(1.0,) * num_rounds),))
    lines = "\n".join(printed(verification_view(found), width=120))
    assert [x in lines for x in ("the shortest and the longest", "mean of its rounds", " .. ")] == [num_rounds > 1] * 3
