"""Rounds: drift cancels, an interrupt keeps complete rounds."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from gplan.core import Contender, LeftOut, Plan, Run
from gplan.core.errors import RunError
from gplan.core.progress import no_progress
from gplan.evaluate.rivals import rivals_of
from gplan.evaluate.verify import run_rounds
from tests.evaluate.hosts import MadeHost, run_of, usual_plan, usual_profile


def three() -> dict[str, Plan]:
    return dict(rivals_of(usual_plan(), usual_profile(), num_rivals=2).plans)


class Rounds(NamedTuple):
    contenders: tuple[Contender, ...]
    left_out: list[LeftOut]
    notes: list[str]


def measured_on(host: MadeHost, *, num_rounds: int = 3) -> Rounds:
    return Rounds(*run_rounds(three(), host, num_rounds=num_rounds, progress=no_progress))


def letters(plans: list[Plan]) -> str:
    """Which plan each call ran."""
    names: dict[tuple[int, ...], str] = {
        plan.cuts: letter for plan, letter in zip(three().values(), "abc", strict=True)
    }
    return "".join(names[plan.cuts] for plan in plans)


def test_rounds_alternate_their_order() -> None:
    host = MadeHost()
    found = measured_on(host)
    assert letters(host.calls) == "abccbaabc"
    assert [len(x.steps_s) for x in found.contenders] == [3, 3, 3]


def test_drift_cancels() -> None:
    calm, drifting = measured_on(MadeHost()), measured_on(MadeHost(drift=0.02))
    order = [sorted(range(3), key=lambda i: x.contenders[i].measured_s) for x in (calm, drifting)]
    assert order[0] == order[1]
    assert drifting.contenders[0].steps_s[0] < drifting.contenders[0].steps_s[1] < drifting.contenders[0].steps_s[2]


def test_a_steady_drift_cancels_over_two_rounds() -> None:
    first, second, third = measured_on(MadeHost(drift=0.02), num_rounds=2).contenders
    factors = [x.measured_s / x.predicted_s for x in (first, second, third)]
    assert factors == pytest.approx([factors[0]] * 3)


def test_kept_run_is_nearest_to_the_mean() -> None:
    found = measured_on(MadeHost(drift=0.1)).contenders[1]
    assert found.run.timeline.step_s == sorted(found.steps_s)[1]


@pytest.mark.parametrize(("num_disturbed", "count"), [(0, 0), (2, 0), (3, 9), (5, 9)])
def test_runs_disturbed_in_more_than_half_of_their_steps(num_disturbed: int, count: int) -> None:
    def runner(plan: Plan) -> Run:
        return run_of(plan, num_disturbed=num_disturbed)

    _, _, notes = run_rounds(three(), runner, num_rounds=3, progress=no_progress)
    assert [x.split(" although")[0] for x in notes] == [f"{count} runs counted"] * (count > 0)


def test_only_complete_rounds_count_as_disturbed() -> None:
    assert measured_on(MadeHost(disturbed=range(3, 100), interrupted_at=7)).notes[1].startswith("3 runs counted")


def test_interrupt_keeps_complete_rounds() -> None:
    found = measured_on(MadeHost(interrupted_at=7))
    assert found.notes == ["interrupted: the results are of the whole rounds so far"]
    assert [len(x.steps_s) for x in found.contenders] == [2, 2, 2]


def test_interrupt_in_the_first_round() -> None:
    found = measured_on(MadeHost(interrupted_at=2))
    assert [len(x.steps_s) for x in found.contenders] == [1, 1]
    assert [x.reason for x in found.left_out] == ["interrupted before its first run"]


def test_interrupt_before_the_first_run_is_raised() -> None:
    with pytest.raises(KeyboardInterrupt, match="no plan had been run to its end, so there is no verification"):
        measured_on(MadeHost(interrupted_at=0))


def test_failed_rival_is_left_out() -> None:
    failing = list(three().values())[1].cuts
    host = MadeHost(fails=lambda plan: plan.cuts == failing)
    found = measured_on(host)
    assert letters(host.calls) == "abccaac"
    assert [x.reason for x in found.left_out] == ["a process was stopped"]


def test_rival_failing_later_keeps_its_rounds() -> None:
    host = MadeHost()
    host.fails = lambda plan: letters([plan]) == "b" and len(host.calls) == 8  # its run in the third round
    found = measured_on(host, num_rounds=4)
    assert letters(host.calls) == "abccbaabcca"
    assert [(x.label, len(x.steps_s)) for x in found.contenders] == [
        (label, n) for label, n in zip(three(), (4, 2, 4), strict=True)
    ]
    assert [x.reason for x in found.left_out] == ["failed in round 3, what came before counts: a process was stopped"]


def test_a_plan_may_fail_after_a_rival_did() -> None:
    host = MadeHost()
    host.fails = lambda plan: letters([plan]) == "b" or len(host.calls) == 6
    found = measured_on(host)
    assert letters(host.calls) == "abccaa"
    assert [len(x.steps_s) for x in found.contenders] == [1 + 1, 1 + 1]
    assert found.notes[0].endswith("are of the whole rounds so far: a process was stopped")


def test_a_plan_that_fails_itself_ends_it() -> None:
    with pytest.raises(RunError, match="a process was stopped"):
        measured_on(MadeHost(fails=lambda _plan: True))


def test_plan_failing_later_keeps_complete_rounds() -> None:
    host = MadeHost()
    host.fails = lambda plan: letters([plan]) == "a" and len(host.calls) == 7  # the first of the third round
    found = measured_on(host, num_rounds=4)
    assert letters(host.calls) == "abccbaa"
    assert [len(x.steps_s) for x in found.contenders] == [2, 2, 2]
    text = "the plan failed in a later round, so the results are of the whole rounds so far: a process was stopped"
    assert (found.notes, found.left_out) == ([text], [])


def test_progress_of_rounds() -> None:
    said: list[tuple[str, float]] = []
    run_rounds(three(), MadeHost(), num_rounds=2, progress=lambda text, share: said.append((text, share)))
    assert said[0] == ("round 1 of 2: this plan", 0.0)
    assert said[-1][0] == "round 2 of 2: this plan"
    shares = [share for _, share in said]
    assert shares == sorted(shares) and 0.8 < shares[-1] < 1.0
