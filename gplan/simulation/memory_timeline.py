"""What each device holds over the simulated step, by category: the moments of its order at the times of its actions.

While an action runs, its device counts with the most that it holds at any point of it; from its end to the start of the
next action, with what is left. Before its first action and after its optimizers it holds what it always holds. So the
most of all is, to the byte, the peak that plans are made with (`gplan/cost/memory_moments.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from gplan.core import ActionKind, Plan, RecomputeMode, Schedule, StageBytes, StageMemory, Timeline
from gplan.cost.memory_moments import OPTIMIZER_MOMENT, device_moments, memory_at, resting
from gplan.cost.part_table import rows_of
from gplan.graph.down_sets import Ints
from gplan.schedules.transfers import RECEIVES_AHEAD
from gplan.simulation.simulator import schedule_of, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a device holds for a while: its stages, each by category."""

    device: int
    action: str  # that runs, or ran last; "" before the first and after the last
    start_s: float
    end_s: float
    stages: tuple[StageMemory, ...]

    @property
    def num_bytes(self) -> int:
        """All stages together."""
        return sum(stage.peak_bytes for stage in self.stages)

    def category_bytes(self, category: str) -> int:
        """One category, such as `activation_bytes`, of all stages together."""
        return sum(getattr(stage, category) for stage in self.stages)


def memory_timeline(plan: Plan) -> tuple[tuple[Holding, ...], ...]:
    """For each device what it holds over the predicted step; none where the plan's file has no parts of its memory."""
    parts = {stage.index: stage.parts for stage in plan.stages if stage.parts is not None}
    if len(parts) < plan.num_stages:
        return ()
    schedule, timeline = schedule_of(plan), simulate(plan)
    return tuple(
        device_holdings(
            schedule,
            timeline,
            device,
            parts,
            recompute=_recompute_of(plan, device),
            receives_ahead=plan.receives_ahead,
        )
        for device in range(plan.num_devices)
    )


def device_holdings(
    schedule: Schedule,
    timeline: Timeline,
    device: int,
    parts: Mapping[int, StageBytes[int]],
    *,
    recompute: RecomputeMode,
    receives_ahead: int = RECEIVES_AHEAD,
) -> tuple[Holding, ...]:
    """What a device holds, with these parts of its stages: without a gap from 0 to the end of the step.

    `timeline` is a step of the schedule with every action and update.
    """
    own = {stage: parts[stage] for stage in schedule.stages_of(device)}
    spans = [x for x in timeline.spans if x.device == device]
    updates = [x for x in spans if x.action.kind is ActionKind.OPTIMIZER]
    times = {str(x.action): (x.start_s, x.end_s) for x in spans}
    times[OPTIMIZER_MOMENT] = (updates[0].start_s, updates[-1].end_s)

    def held(counts: Ints, action: str, start_s: float, end_s: float) -> Holding:
        pairs = zip(counts, own.values(), strict=True)
        stages = tuple(memory_at(one, x, action=action) for one, x in pairs)
        return Holding(device=device, action=action, start_s=start_s, end_s=end_s, stages=stages)

    nothing = resting(len(own))
    moments = device_moments(schedule, device, recompute=recompute, receives_ahead=receives_ahead)
    num_bytes = moments.held([rows_of(x, (1,)) for x in own.values()])[:, 0]
    every = range(len(moments.actions))
    steps = [(action, list(group)) for action, group in groupby(every, key=moments.actions.__getitem__)]
    starts = [*(times[action][0] for action, _ in steps), timeline.step_s]
    found = [held(nothing, "", 0.0, starts[0])]
    for (action, step), next_s in zip(steps, starts[1:], strict=True):  # while it runs, and until the next one starts
        start_s, end_s = times[action]
        after, name = (nothing, "") if action == OPTIMIZER_MOMENT else (moments.counts[step[-1]], action)
        most = max(step, key=num_bytes.__getitem__)
        found += [held(moments.counts[most], action, start_s, end_s), held(after, name, end_s, max(end_s, next_s))]
    return tuple(found)


def fullest(holdings: Sequence[Holding]) -> Holding:
    """The first of those that hold most."""
    return max(holdings, key=lambda x: x.num_bytes)


def _recompute_of(plan: Plan, device: int) -> RecomputeMode:
    """With "selected", a stage that recomputes none of its layers keeps them all."""
    keeps_all = plan.recompute == "selected" and not any(stage.recompute_layers for stage in plan.stages_of(device))
    return "never" if keeps_all else plan.recompute
