"""What is said of a run's measured times: from made-up steps of which some were disturbed."""

from __future__ import annotations

import pytest

from gplan.execute.recorder import Noted
from gplan.execute.results import virtual_run
from gplan.execute.train import RunOptions, Step
from gplan.nouns import Plan, Run
from gplan.simulator import dependency_order, schedule_of
from tests.scheduled import scheduled_plan

ACTION_S = 0.1


def run_of(plan: Plan, *, num_steps: int, num_clean: int) -> Run:
    """A run of which the last steps had the processor for themselves, and the others half of it."""
    steps = [step_of(plan, busy=1.0 if num_steps - i <= num_clean else 0.5) for i in range(num_steps)]
    return virtual_run(plan, steps, peak_bytes=[1, 1], check=None, options=RunOptions(num_steps=num_steps))


def step_of(plan: Plan, *, busy: float) -> Step:
    """Every action takes as long, during which the processor was at hand for this share."""
    noted = [Noted(x, 0.0, ACTION_S, busy * ACTION_S) for x in dependency_order(schedule_of(plan))]
    return Step(loss=1.0, noted=tuple(noted), start_s=0.0, end_s=1.0)


@pytest.mark.parametrize(("num_clean", "counted", "is_told"), [(2, 5, True), (3, 3, False), (5, 5, False)])
def test_a_run_whose_disturbed_steps_count_says_what_its_times_are(num_clean: int, counted: int, is_told: bool) -> None:
    warm_up = RunOptions(num_steps=10).num_warmup_steps
    run = run_of(scheduled_plan("gpipe"), num_steps=warm_up + 5, num_clean=num_clean)
    assert (run.num_counted, run.num_disturbed) == (counted, 5 - num_clean)
    told = [x for x in run.notes if "busy host" in x]
    assert len(told) == is_told
    assert all(x.startswith("other work used the processor in 3 of 5 steps, which count all the same") for x in told)


def test_a_run_too_short_for_a_warm_up_says_so() -> None:
    run = run_of(scheduled_plan("gpipe"), num_steps=2, num_clean=2)
    assert any("too few steps for a warm-up" in x for x in run.notes)
