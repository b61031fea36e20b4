"""What a stage of a measured step takes: the median over its micro-batches."""

from __future__ import annotations

from statistics import median

from gplan.nouns import ActionKind, Timeline


def median_s(timeline: Timeline, stage: int, *kinds: ActionKind) -> float | None:
    """The median over the micro-batches of what a stage takes, the kinds of one micro-batch added up; None: none ran."""
    spent: dict[int, float] = {}
    for x in timeline.spans:
        if x.action.stage == stage and x.action.kind in kinds:
            spent[x.action.microbatch] = spent.get(x.action.microbatch, 0.0) + x.duration_s
    return median(spent.values()) if spent else None
