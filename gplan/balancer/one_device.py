"""Whether one device alone would do a plan's work in less time: then the pipeline costs more than it saves.

So it is where layers are short and what goes between devices takes long, or where processes that share a host slow each
other down. One device has the whole batch, a backward after each forward, and the plan's memory limit and recompute.
"""

from __future__ import annotations

from gplan.balancer.price import stages_of
from gplan.balancer.problem import Problem
from gplan.costs import Costs
from gplan.nouns import Plan, Profile
from gplan.simulator import step_and_bubble
from gplan.units import counted, seconds_text

_LEANEST = "1f1b"  # of the schedules, which all take as long on one device, the one that holds least


def one_device_notes(plan: Plan, profile: Profile) -> tuple[str, ...]:
    """A note that one device would be faster; none where it is not, cannot hold the model, or devices differ; O(M)."""
    num_devices = plan.num_devices * plan.num_replicas
    if num_devices == 1 or any(stage.place for stage in plan.stages):
        return ()
    alone = Problem(
        costs=Costs(profile, plan.microbatch_size, plan.num_microbatches * plan.num_replicas),
        num_stages=1,
        schedule=_LEANEST,
        recompute=plan.recompute,
        minimize="step-time",
        memory_bytes=plan.memory_limit_bytes,
    )
    (stage,) = stages_of(alone, ())
    if plan.memory_limit_bytes is not None and stage.memory.peak_bytes > plan.memory_limit_bytes:
        return ()
    step_s, _ = step_and_bubble(alone.made_schedule, [stage.cost], recompute=plan.recompute)
    if step_s >= plan.prediction.step_s:
        return ()
    return (
        f"one device alone (--k 1 --schedule {_LEANEST}) would be faster: {seconds_text(step_s)} for the same batch, where "
        f"these {counted(num_devices, 'device')} take {seconds_text(plan.prediction.step_s)}",
    )
