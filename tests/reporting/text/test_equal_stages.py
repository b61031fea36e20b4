"""The bubble of equal stages: the same words wherever it is said, and with what it depends on."""

from __future__ import annotations

from gplan.reporting.text.plan import plan_view
from gplan.reporting.text.steps import trial_view
from gplan.simulation.schedule_trial import GivenCosts, given_trial, plan_trial
from gplan.strategy_search.planner import balance
from tests.made import make_profile
from tests.reporting.text.printed import printed

ODD = "interleaved-1f1b:2"


def equal_text(num_microbatches: int, backward_s: float) -> str:
    given = GivenCosts(backward=((backward_s / 2, backward_s / 2),))
    trial = given_trial(ODD, given, num_devices=4, num_microbatches=num_microbatches)
    line = next(x for x in printed(trial_view(trial)) if "equal stages" in x)
    return line.partition("free transfers: ")[2]


def test_where_no_law_holds_the_bubble_depends_on_what_a_backward_takes_and_says_so() -> None:
    assert equal_text(6, 2.0) == "26.5 %, where a backward takes 2 × a forward"
    assert equal_text(6, 1.0) == "25.0 %, where a backward takes 1 × a forward"
    assert equal_text(8, 1.0) == equal_text(8, 2.0) == "(K-1)/(vM+K-1) = 15.8 %"


def test_a_plan_and_its_simulation_say_the_same_of_equal_stages() -> None:
    profile = make_profile([1.0] * 9, [1.5] * 9)
    for m, said in ((6, ", where a backward takes 1.5 × a forward"), (8, "")):
        plan = balance(profile, num_devices=4, num_microbatches=m, schedule=ODD)
        planned = next(x for x in printed(plan_view(plan), width=200) if "equal stages" in x)
        tried = next(x for x in printed(trial_view(plan_trial(plan))) if "equal stages" in x)
        figure = f"{100 * plan.prediction.ideal_bubble:.1f} %{said}"
        assert planned.endswith(f"free transfers: {figure})")
        assert tried.endswith(figure)
