"""Which action of a training step waits for which other one, and whether an order can be executed at all.

The dependencies follow from the pipeline: activations move to the next stage, their gradients to the previous one.
Everything else about the order is the device's own list of actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from gplan.core import Action, ActionKind, Schedule

INPUT_GRADIENT_KINDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
"""The actions that compute the gradient of a stage's input, which the previous stage waits for."""


class OrderError(ValueError):
    """Orders that are not a training step; `device` is the one with the wrong order, None if several are involved."""

    def __init__(self, message: str, *, device: int | None = None) -> None:
        super().__init__(message)
        self.device = device


def _awaited_output(stage: int, kind: ActionKind, last_stage: int) -> tuple[int, ActionKind] | None:
    """The stage and kind of the action whose output an action waits for; BACKWARD stands for either input gradient."""
    if kind is ActionKind.FORWARD:
        return (stage - 1, ActionKind.FORWARD) if stage > 0 else None
    if kind is ActionKind.WEIGHT_GRADIENT:
        return stage, ActionKind.BACKWARD
    if kind in INPUT_GRADIENT_KINDS:
        return (stage + 1, ActionKind.BACKWARD) if stage < last_stage else (stage, ActionKind.FORWARD)
    return None


def dependencies_of(actions: Collection[Action], num_stages: int) -> dict[Action, Action]:
    """For each action of a step, the action whose output it waits for; actions that wait for none are left out.

    A forward waits for the previous stage; a backward, or its first half, for the next stage, and on the last stage for
    its own forward; a second half waits for the first half. A stage's forward precedes its backward by the order of the
    device, so that is not a dependency here.
    """
    gradients = {(x.stage, x.microbatch): x for x in actions if x.kind in INPUT_GRADIENT_KINDS}
    dependencies: dict[Action, Action] = {}
    for action in actions:
        awaited = _awaited_output(action.stage, action.kind, num_stages - 1)
        if awaited is not None:
            stage, kind = awaited
            forward = Action(stage, ActionKind.FORWARD, action.microbatch)
            dependencies[action] = forward if kind is ActionKind.FORWARD else gradients[stage, action.microbatch]
    return dependencies


@lru_cache(maxsize=32)
def execution_order(schedule: Schedule) -> tuple[Action, ...]:
    """All actions of a schedule in an order in which each comes after the one it waits for; O(actions).

    Devices take turns; each one proceeds until it has to wait. Raises OrderError if devices wait for each other forever,
    or for an action of a stage or micro-batch that the schedule does not have.
    """
    actions, num_done, has_progress = list[Action](), [0] * schedule.num_devices, True
    is_done, is_ready = _completion_flags(schedule)
    try:
        while has_progress:
            has_progress = False
            for device, order in enumerate(schedule.orders):
                for i in range(num_done[device], len(order)):
                    action = order[i]
                    key = action.stage, action.kind
                    if not is_ready[key][action.microbatch]:
                        break
                    is_done[key][action.microbatch] = True
                    actions.append(action)
                    num_done[device] = i + 1
                    has_progress = True
        _check_finished(schedule, num_done)
    except (IndexError, KeyError):
        last = schedule.num_stages - 1, schedule.num_microbatches - 1
        known = (x for order in schedule.orders for x in order if x.stage > last[0] or x.microbatch > last[1])
        raise OrderError(
            f"{schedule.name} has action {next(known)}; expected stages 0 to {last[0]} and micro-batches 0 to {last[1]}"
        ) from None
    return tuple(actions)


_Flags = dict[tuple[int, ActionKind], list[bool]]  # by stage and kind: one for each micro-batch


def _completion_flags(schedule: Schedule) -> tuple[_Flags, _Flags]:
    """Whether each action is done, initially none, and whether what it waits for is done: lists of the first."""
    num_microbatches, is_done = schedule.num_microbatches, _Flags()
    for stage in range(schedule.num_stages):
        gradients = [False] * num_microbatches
        is_done |= {(stage, kind): gradients for kind in INPUT_GRADIENT_KINDS}
        is_done |= {(stage, kind): [False] * num_microbatches for kind in _OTHER_KINDS}
    awaited = {key: _awaited_output(*key, schedule.num_stages - 1) for key in is_done}
    is_ready = {key: [True] * num_microbatches if x is None else is_done[x] for key, x in awaited.items()}
    return is_done, is_ready


_OTHER_KINDS = (ActionKind.FORWARD, ActionKind.WEIGHT_GRADIENT)


def _check_finished(schedule: Schedule, num_done: Sequence[int]) -> None:
    """Raise OrderError, naming what each device waits for, if devices have actions left."""
    stuck = [
        (device, order[i]) for device, (order, i) in enumerate(zip(schedule.orders, num_done, strict=True)) if order[i:]
    ]
    if not stuck:
        return
    dependencies = dependencies_of([action for order in schedule.orders for action in order], schedule.num_stages)
    waits = [f"device {device} waits at {action} for {dependencies[action]}" for device, action in stuck]
    raise OrderError(
        f"{schedule.name} can never finish: {', '.join(waits)}; expected the awaited actions earlier in the order"
    )


def check_orders(orders: Sequence[Sequence[Action]]) -> Schedule:
    """The schedule of these orders; raises OrderError if they are not a training step.

    Each stage must be on one device and have, for every micro-batch, a forward and then a backward, or the two halves of
    one; and no device may wait forever.
    """
    device_of = _devices_of(orders)
    num_stages = 1 + max(device_of)
    num_microbatches = 1 + max(x.microbatch for order in orders for x in order)
    missing = next((stage for stage in range(num_stages) if stage not in device_of), None)
    if missing is not None:
        raise OrderError(
            f"stage {missing} has no actions, but stage {num_stages - 1} has; expected actions of every stage"
        )
    for device, order in enumerate(orders):
        _check_order(order, device, num_microbatches)
    schedule = Schedule(
        name="the order",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        orders=tuple(tuple(order) for order in orders),
    )
    execution_order(schedule)
    return schedule


def _devices_of(orders: Sequence[Sequence[Action]]) -> dict[int, int]:
    """The device of each stage."""
    device_of: dict[int, int] = {}
    for device, order in enumerate(orders):
        if not order:
            raise OrderError(f"device {device} has no actions; expected some, such as 0F0", device=device)
        for action in order:
            other = device_of.setdefault(action.stage, device)
            if other != device:
                raise OrderError(
                    f"{action} is on device {device}, other actions of stage {action.stage} are on device {other}; "
                    "expected every stage on one device",
                    device=device,
                )
    return device_of


def _check_order(order: Sequence[Action], device: int, num_microbatches: int) -> None:
    """Raise OrderError unless every stage of the device has each micro-batch's actions once, forward before backward."""
    counts, places = Counter(order), {action: i for i, action in enumerate(order)}
    twice = next((action for action, count in counts.items() if count > 1), None)
    if twice is not None:
        raise OrderError(f"{twice} appears {counts[twice]} times; expected every action once", device=device)
    for stage in sorted({x.stage for x in order}):
        for m in range(num_microbatches):
            wrong = _wrong_with(stage, m, places)
            if wrong:
                raise OrderError(wrong, device=device)


def _wrong_with(stage: int, microbatch: int, places: Mapping[Action, int]) -> str:
    """The error in the actions of one stage for one micro-batch; "" if there is none."""
    forward, whole, first, second = (Action(stage, ActionKind(letter), microbatch) for letter in "FBIW")
    if forward not in places:
        return f"{forward} is missing; expected a forward of every micro-batch on every stage"
    parts = [x for x in (whole, first, second) if x in places]
    if parts not in ([whole], [first, second]):
        found = " and ".join(map(str, parts)) or "no backward"
        return f"stage {stage} has {found} for micro-batch {microbatch}; expected only {whole}, or {first} and {second}"
    late = next((x for x in zip((forward, *parts), parts, strict=False) if places[x[0]] > places[x[1]]), None)
    return f"{late[1]} comes before {late[0]}; expected it after" if late else ""
