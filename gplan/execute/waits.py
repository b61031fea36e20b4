"""For whom a rank waits between its actions, said beforehand from the schedule."""

from __future__ import annotations

from dataclasses import dataclass

from gplan.execute.whereabouts import Awaited
from gplan.nouns import Action, ActionKind, Schedule
from gplan.schedules import needs_of

_ANY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A stage of this rank waits for something to come from, or to be taken by, a neighbour on another one."""

    awaited: Awaited
    stage: int
    neighbour: int
    microbatch: int  # -1: of any


def waits_of(schedule: Schedule, device: int) -> dict[Action | None, Wait | None]:
    """For whom a device waits after each of its actions, by what comes next; under None before the first."""
    order = schedule.orders[device]
    needs = needs_of([x for own in schedule.orders for x in own], schedule.num_stages)
    found: dict[Action | None, Wait | None] = {}
    for action, following in zip((None, *order), order, strict=False):
        need = needs.get(following)
        found[action] = None
        if need is not None and schedule.devices[need.stage] != device:
            awaited: Awaited = "activations" if following.kind is ActionKind.FORWARD else "gradients"
            found[action] = Wait(
                awaited=awaited, stage=following.stage, neighbour=need.stage, microbatch=following.microbatch
            )
    found[order[-1]] = _last_wait(schedule, device)
    return found


def _last_wait(schedule: Schedule, device: int) -> Wait | None:
    """At the end a device waits for its last output to be taken."""
    for action in reversed(schedule.orders[device]):
        if action.kind is ActionKind.WEIGHT_GRADIENT:
            continue
        target = action.stage + (1 if action.kind is ActionKind.FORWARD else -1)
        if 0 <= target < schedule.num_stages and schedule.devices[target] != device:
            return Wait(awaited="receiver", stage=action.stage, neighbour=target, microbatch=_ANY)
    return None
