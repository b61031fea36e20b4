"""Plans run in turns: drift cancels, disturbed runs are repeated, an interrupt keeps what is whole."""

from __future__ import annotations

import pytest

from gplan.core import Plan
from gplan.core.errors import RunError
from gplan.evaluate.rivals import Rival, rivals_of
from gplan.evaluate.verify import Rounds, is_disturbed, run_rounds
from tests.evaluate.hosts import MadeHost, run_of, usual_plan, usual_profile


def three() -> tuple[Rival, ...]:
    return rivals_of(usual_plan(), usual_profile(), num_rivals=2).rivals


def measured_on(host: MadeHost, *, num_rounds: int = 3, repeats: bool = True) -> Rounds:
    return run_rounds(three(), host, num_rounds=num_rounds, repeats=repeats, progress=lambda _text, _share: None)


def letters(plans: list[Plan]) -> str:
    """Which plan each call ran."""
    names: dict[tuple[int, ...], str] = {rival.plan.cuts: letter for rival, letter in zip(three(), "abc", strict=True)}
    return "".join(names[plan.cuts] for plan in plans)


def test_every_second_round_runs_in_the_opposite_order() -> None:
    host = MadeHost()
    found = measured_on(host)
    assert letters(host.calls) == "abccbaabc"
    assert [len(x.steps_s) for x in found.contenders] == [3, 3, 3]


def test_a_host_that_grows_slower_all_the_time_leaves_the_plans_in_the_order_that_they_have() -> None:
    calm, drifting = measured_on(MadeHost()), measured_on(MadeHost(drift=0.02))
    order = [sorted(range(3), key=lambda i: x.contenders[i].measured_s) for x in (calm, drifting)]
    assert order[0] == order[1]
    assert drifting.contenders[0].steps_s[0] < drifting.contenders[0].steps_s[1] < drifting.contenders[0].steps_s[2]


def test_a_steady_drift_cancels_over_two_rounds() -> None:
    first, second, third = measured_on(MadeHost(drift=0.02), num_rounds=2).contenders
    factors = [x.measured_s / x.predicted_s for x in (first, second, third)]
    assert factors == pytest.approx([factors[0]] * 3)


def test_the_run_kept_is_that_of_the_round_nearest_to_the_mean() -> None:
    found = measured_on(MadeHost(drift=0.1)).contenders[1]
    assert found.run.timeline.step_s == sorted(found.steps_s)[1]


def test_a_disturbed_run_is_thrown_away_and_repeated_at_once() -> None:
    host = MadeHost(disturbed={1}, disturbance=3.0)
    found = measured_on(host, num_rounds=1)
    assert letters(host.calls) == "abbc"
    assert [x.num_refused for x in found.contenders] == [0, 1, 0]
    assert found.contenders[1].measured_s == pytest.approx(found.contenders[1].predicted_s)


def test_repeating_stops_after_as_many_runs_as_there_are_plans_and_what_is_disturbed_then_is_kept_and_counted() -> None:
    host = MadeHost(disturbed=range(100))
    found = measured_on(host)
    assert len(host.calls) == 9 + 3
    assert sum(x.num_refused for x in found.contenders) == 3
    assert [x.num_disturbed for x in found.contenders] == [3, 3, 3]


def test_nothing_is_refused_where_all_runs_must_be_disturbed() -> None:
    host = MadeHost(disturbed=range(100))
    found = measured_on(host, repeats=False)
    assert len(host.calls) == 9
    assert [(x.num_refused, x.num_disturbed) for x in found.contenders] == [(0, 0)] * 3


@pytest.mark.parametrize(("num_disturbed", "expected"), [(0, False), (2, False), (3, True), (5, True)])
def test_a_run_is_disturbed_if_more_than_half_of_its_timed_steps_are(num_disturbed: int, expected: bool) -> None:
    assert is_disturbed(run_of(usual_plan(), num_disturbed=num_disturbed)) is expected


def test_an_interrupt_in_the_third_round_keeps_the_first_two() -> None:
    found = measured_on(MadeHost(interrupted_at=7))
    assert found.is_interrupted
    assert [len(x.steps_s) for x in found.contenders] == [2, 2, 2]


def test_an_interrupt_in_the_first_round_keeps_the_plans_that_were_run() -> None:
    found = measured_on(MadeHost(interrupted_at=2))
    assert [len(x.steps_s) for x in found.contenders] == [1, 1]
    assert [x.reason for x in found.left_out] == ["interrupted before its first run"]


def test_an_interrupt_before_the_first_run_is_passed_on() -> None:
    with pytest.raises(KeyboardInterrupt, match="no plan had been run to its end, so there is no verification"):
        measured_on(MadeHost(interrupted_at=0))


def test_a_rival_that_fails_is_left_out_with_what_it_said_and_not_run_again() -> None:
    failing = three()[1].plan.cuts
    host = MadeHost(fails=lambda plan: plan.cuts == failing)
    found = measured_on(host)
    assert letters(host.calls) == "abccaac"
    assert [x.reason for x in found.left_out] == ["a process was stopped"]


def test_a_rival_that_fails_in_a_later_round_keeps_its_earlier_ones() -> None:
    host = MadeHost()
    host.fails = lambda plan: letters([plan]) == "b" and len(host.calls) == 8  # its run in the third round
    found = measured_on(host, num_rounds=4)
    assert letters(host.calls) == "abccbaabcca"
    assert [(x.label, len(x.steps_s)) for x in found.contenders] == [
        (x.label, n) for x, n in zip(three(), (4, 2, 4), strict=True)
    ]
    assert [x.reason for x in found.left_out] == ["failed in round 3, what came before counts: a process was stopped"]


def test_a_plan_may_fail_after_a_rival_did() -> None:
    host = MadeHost()
    host.fails = lambda plan: letters([plan]) == "b" or len(host.calls) == 6
    found = measured_on(host)
    assert letters(host.calls) == "abccaa"
    assert [len(x.steps_s) for x in found.contenders] == [1 + 1, 1 + 1]
    assert found.failure == "a process was stopped"


def test_a_plan_that_fails_itself_ends_it() -> None:
    with pytest.raises(RunError, match="a process was stopped"):
        measured_on(MadeHost(fails=lambda _plan: True))


def test_a_plan_that_fails_in_a_later_round_ends_it_with_the_whole_rounds() -> None:
    host = MadeHost()
    host.fails = lambda plan: letters([plan]) == "a" and len(host.calls) == 7  # the first of the third round
    found = measured_on(host, num_rounds=4)
    assert letters(host.calls) == "abccbaa"
    assert [len(x.steps_s) for x in found.contenders] == [2, 2, 2]
    assert (found.failure, found.is_interrupted, found.left_out) == ("a process was stopped", False, ())


def test_a_plan_that_fails_when_its_first_run_was_disturbed_ends_it() -> None:
    host = MadeHost(disturbed={0})
    host.fails = lambda _plan: len(host.calls) == 2
    with pytest.raises(RunError, match="a process was stopped"):
        measured_on(host)


def test_progress_names_the_round_and_the_plan_and_rises_to_nearly_one() -> None:
    said: list[tuple[str, float]] = []
    run_rounds(three(), MadeHost(), num_rounds=2, progress=lambda text, share: said.append((text, share)))
    assert said[0] == ("round 1 of 2: this plan", 0.0)
    assert said[-1][0] == "round 2 of 2: this plan"
    shares = [share for _, share in said]
    assert shares == sorted(shares) and 0.8 < shares[-1] < 1.0
