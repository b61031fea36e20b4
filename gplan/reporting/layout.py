"""Which stages lie on which devices, in words: charts and tables name a stage's device only where it says something."""

from __future__ import annotations

from collections.abc import Sequence

from gplan.nouns import Plan
from gplan.schedules import named
from gplan.units import counted

_MOST_LISTED = 4


def layout_text(plan: Plan) -> str:
    """How many stages there are, and on how many devices where some hold several; the step's micro-batches."""
    stages = counted(plan.num_stages, "stage")
    if plan.num_stages > plan.num_devices:
        stages += f" on {counted(plan.num_devices, 'device')}"
    return f"{named(plan.schedule).title}, {stages}, {counted(plan.num_microbatches, 'micro-batch')}"


def stages_text(stages: Sequence[int]) -> str:
    """The stages of a device; of many the first ones and the last.

    >>> stages_text([3]), stages_text([0, 4]), stages_text(range(0, 64, 8))
    ('stage 3', 'stages 0, 4', 'stages 0, 8 … 56')
    """
    if len(stages) == 1:
        return f"stage {stages[0]}"
    if len(stages) <= _MOST_LISTED:
        return f"stages {', '.join(map(str, stages))}"
    return f"stages {', '.join(map(str, stages[:2]))} … {stages[-1]}"


def stage_text(plan: Plan, stage: int) -> str:
    """A stage, with its device where devices hold several."""
    return f"stage {stage}" if plan.num_stages == plan.num_devices else f"stage {stage}, device {plan.devices[stage]}"
