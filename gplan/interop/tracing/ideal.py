"""What a schedule would take with the medians that a trace measured of every stage, transfers and engine free."""

from __future__ import annotations

from gplan.errors import UsageError
from gplan.interop.tracing.traced import Traced
from gplan.nouns import BACKWARD_KINDS, Action, ActionKind, Schedule, StageCost, Timeline
from gplan.schedules import make_schedule, named, num_stages_of
from gplan.simulator import simulate_schedule


def ideal_timeline(traced: Traced, schedule: str | None = None) -> Timeline:
    """The step of that schedule (None: of the order that was traced) on the traced stages; exact for these medians.

    Raises UsageError for a schedule that needs other stages, or the halves of backwards that ran in one piece.
    """
    if schedule is None:
        return simulate_schedule(_as_traced(traced), stage_costs(traced), recompute="never")
    num_devices, num_stages = traced.timeline.num_devices, len(stage_costs(traced))
    if num_stages_of(schedule, num_devices) != num_stages:
        raise UsageError(
            f"{named(schedule).title} cuts the model into {num_stages_of(schedule, num_devices)} stages for "
            f"{num_devices} devices; the traces have {num_stages}; name a schedule with as many"
        )
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=traced.timeline.num_microbatches)
    try:
        return simulate_schedule(made, stage_costs(traced), recompute="never")
    except ValueError as error:
        raise UsageError(
            f"{named(schedule).title} splits the backward, and the traced one ran in one piece ({error}); name a schedule "
            "with whole backwards"
        ) from error


def stage_costs(traced: Traced) -> list[StageCost]:
    """The medians of every stage; what its device's optimizer took is with its first stage."""
    timeline = traced.timeline
    updates = {x.action.stage: x.duration_s for x in timeline.spans if x.action.kind is ActionKind.OPTIMIZER}
    return [
        StageCost(
            forward_s=timeline.median_s(ActionKind.FORWARD, stage=stage) or 0.0,
            backward_s=timeline.median_s(*BACKWARD_KINDS, stage=stage) or 0.0,
            recompute_s=0.0,
            optimizer_s=updates.get(stage, 0.0),
            activation_bytes=0,
            gradient_bytes=0,
            activation_s=0.0,
            gradient_s=0.0,
            input_gradient_s=timeline.median_s(ActionKind.INPUT_GRADIENT, stage=stage),
            weight_gradient_s=timeline.median_s(ActionKind.WEIGHT_GRADIENT, stage=stage),
        )
        for stage in range(1 + max(x.action.stage for x in timeline.spans))
    ]


def _as_traced(traced: Traced) -> Schedule:
    timeline = traced.timeline
    orders: list[list[Action]] = [[] for _ in range(timeline.num_devices)]
    for span in timeline.loop_spans:
        orders[span.device].append(span.action)
    return Schedule(
        name="the traced order",
        num_stages=1 + max(x.action.stage for x in timeline.loop_spans),
        num_microbatches=timeline.num_microbatches,
        orders=tuple(map(tuple, orders)),
    )
