"""Plans under a schedule that a test names."""

from __future__ import annotations

from dataclasses import replace

from gplan.core import Plan
from gplan.schedules.registry import make_schedule, num_stages_of, schedule_info


def scheduled(plan: Plan, schedule: str) -> Plan:
    """The same stages in the order of another schedule, on as many devices as it has them;
    costs stay what they were."""
    said = schedule_info(schedule)
    num_devices = said.num_devices or plan.num_stages // said.num_chunks
    assert num_stages_of(schedule, num_devices) == plan.num_stages
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=plan.num_microbatches)
    stages = tuple(replace(x, device=device) for x, device in zip(plan.stages, made.devices, strict=True))
    return replace(plan, schedule=schedule, stages=stages)
