"""A step in the parts of GPipe's own breakdown, as shares of the time of all devices; they add up to 1.

Forward and backward (with its recompute) are what devices compute; idle time is divided by its causes as
gplan/simulation/bubble.py does: the bubble is what equal stages would wait too, imbalance what they would not. An update of
weights that runs while other devices still compute is part of the bubble, the rest of the updates and the waiting for
them are `optimizer`.
"""

from __future__ import annotations

from gplan.core import ActionKind, IdleCause, Timeline
from gplan.simulation.bubble import idle_by_cause

PARTS = ("forward", "backward", "bubble", "imbalance", "passing", "optimizer", "setup")
"""Passing: transfers that were waited for, and the engine's own work around actions.
Set-up: before the first forward."""


def parts_of(timeline: Timeline) -> dict[str, float]:
    """The share of each of `PARTS`; a step of no length is refused by the timeline itself."""
    idle, loop_end_s = idle_by_cause(timeline), timeline.loop_end_s
    computing = dict.fromkeys((ActionKind.FORWARD, ActionKind.BACKWARD), 0.0)
    updating_s = 0.0
    for span in timeline.spans:
        if span.action.kind is ActionKind.OPTIMIZER:
            updating_s += max(0.0, span.end_s - max(span.start_s, loop_end_s))
        else:
            computing[span.action.kind] += span.duration_s
    seconds = (
        computing[ActionKind.FORWARD],
        computing[ActionKind.BACKWARD],
        idle[IdleCause.WARM_UP] + idle[IdleCause.DRAIN],
        idle[IdleCause.IMBALANCE],
        idle[IdleCause.COMMUNICATION] + idle[IdleCause.ENGINE],
        updating_s + idle[IdleCause.OPTIMIZER],
        timeline.num_devices * timeline.loop_start_s,
    )
    available_s = timeline.num_devices * timeline.step_s
    return {name: x / available_s for name, x in zip(PARTS, seconds, strict=True)}
