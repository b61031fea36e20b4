"""A plan is held against its schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.schedules.validate import schedule_mismatch
from tests.scheduled import EVERY_SCHEDULE, scheduled_plan


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_a_plan_of_every_schedule_fits_it(schedule: str) -> None:
    assert schedule_mismatch(scheduled_plan(schedule)) is None


def test_what_does_not_fit_is_named_with_its_place() -> None:
    plan = scheduled_plan("zb-v")
    found = schedule_mismatch(replace(plan, schedule="looped-bfs:2"))
    assert found is not None
    assert found.reason == "stage 2 is on device 1; expected device 0 for looped-bfs:2"
    assert found.path == ".stages[2].device"
