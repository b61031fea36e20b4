"""Which stages lie where, in words."""

from __future__ import annotations

from gplan.reporting.charts.canvas import stage_text, stages_text
from tests.reporting.subjects import make_plan, make_scheduled_plan


def test_a_stage_names_its_device_only_where_that_is_another_number() -> None:
    assert stage_text(make_plan(), 3) == "stage 3"
    assert stage_text(make_scheduled_plan("zb-v"), 3) == "stage 3, device 0"


def test_many_stages_of_a_device_are_shortened_to_the_first_and_the_last() -> None:
    assert stages_text([2]) == "stage 2"
    assert stages_text([0, 2, 4, 6]) == "stages 0, 2, 4, 6"
    assert stages_text([0, 2, 4, 6, 8]) == "stages 0, 2 … 8"
