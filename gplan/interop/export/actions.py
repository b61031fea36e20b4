"""To a CSV of actions: the order of every device, as torch's schedule runtime and gplan read it. Every plan has one.

A row for each device, a column for each action, `3F0` being stage 3, forward, micro-batch 0; B is a backward, I and W
its halves. Relies on pytorch/pytorch: torch/distributed/pipelining/schedules.py (`_PipelineScheduleRuntime._load_csv`
with format "compute_only", `_Action.from_str`): sends and receives are added there.
"""

from __future__ import annotations

from gplan.interop.export.exported import Export
from gplan.nouns import Plan, Profile
from gplan.simulator import schedule_of


def to_csv(plan: Plan, profile: Profile | None) -> Export:
    """The actions of every device, without the optimizer's."""
    rows = (",".join(map(str, order)) for order in schedule_of(plan).orders)
    return Export(format="csv", text="".join(f"{row}\n" for row in rows))
