"""What the actions of a step wait for, and whether an order can be carried out at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gplan.core import Action, ActionKind, Schedule

FIRST_HALVES = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
"""What makes the gradients that the stage before waits for."""


class OrderError(ValueError):
    """Orders that are no training step; `device` is the one whose order is wrong, None where it takes several."""

    def __init__(self, message: str, *, device: int | None = None) -> None:
        super().__init__(message)
        self.device = device


def needs_of(actions: Collection[Action], num_stages: int) -> dict[Action, Action]:
    """For each of a step's actions the one whose output it cannot start without; those that need none are left out.

    A forward needs the stage before, a backward or its first half the stage after; the last stage's needs its own
    forward, a second half its first. (That a stage's forward comes before its backward is a matter of the device's
    order.)
    """
    firsts = {(x.stage, x.microbatch): x for x in actions if x.kind in FIRST_HALVES}
    found = {action: _need_of(action, firsts, num_stages) for action in actions}
    return {action: need for action, need in found.items() if need is not None}


def _need_of(action: Action, firsts: Mapping[tuple[int, int], Action], num_stages: int) -> Action | None:
    stage, kind, m = action.stage, action.kind, action.microbatch
    if kind is ActionKind.FORWARD:
        return Action(stage - 1, kind, m) if stage > 0 else None
    if kind is ActionKind.WEIGHT_GRADIENT:
        return firsts[stage, m]
    if kind in FIRST_HALVES:
        return firsts[stage + 1, m] if stage < num_stages - 1 else Action(stage, ActionKind.FORWARD, m)
    return None


_NOT_YET, _NONE = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """All actions of a schedule in an order in which each comes after what it needs; entries by place in that order."""

    actions: tuple[Action, ...]
    devices: tuple[int, ...]
    needs: tuple[int, ...]  # the place of the action that is needed; below 0: none


@lru_cache(maxsize=32)
def flow_of(schedule: Schedule) -> Flow:
    """The schedule with what its actions need; raises OrderError, a ValueError,
    where they wait for each other forever."""
    flowing = _Flowing(schedule)
    while sum(flowing.advance(device) for device in range(schedule.num_devices)):
        pass
    _check_finished(schedule, flowing.num_done)
    return Flow(actions=tuple(flowing.actions), devices=tuple(flowing.devices), needs=tuple(flowing.needs))


class _Flowing:
    """A flow that grows: the devices take turns, each going on until it has to wait."""

    def __init__(self, schedule: Schedule) -> None:
        self.actions, self.devices, self.needs = list[Action](), list[int](), list[int]()
        self.num_done = [0] * schedule.num_devices
        self._orders, self._num_microbatches = schedule.orders, schedule.num_microbatches
        num_outputs = schedule.num_stages * schedule.num_microbatches
        self._last = num_outputs - schedule.num_microbatches
        self._forwards, self._firsts = [_NOT_YET] * num_outputs, [_NOT_YET] * num_outputs  # their places in the flow

    def advance(self, device: int) -> int:
        """Let the device do what it can now; how many actions that are."""
        order, begin = self._orders[device], self.num_done[device]
        for i in range(begin, len(order)):
            action = order[i]
            output = action.stage * self._num_microbatches + action.microbatch
            need = self._need(action.kind, output)
            if need == _NOT_YET:
                break
            if action.kind is ActionKind.FORWARD:
                self._forwards[output] = len(self.actions)
            elif action.kind in FIRST_HALVES:
                self._firsts[output] = len(self.actions)
            self.actions.append(action)
            self.devices.append(device)
            self.needs.append(need)
            self.num_done[device] = i + 1
        return self.num_done[device] - begin

    def _need(self, kind: ActionKind, output: int) -> int:
        """The place of what an action needs; outputs are numbered by stage, then by micro-batch."""
        if kind is ActionKind.FORWARD:
            return self._forwards[output - self._num_microbatches] if output >= self._num_microbatches else _NONE
        if kind is ActionKind.WEIGHT_GRADIENT:
            return self._firsts[output]
        return self._forwards[output] if output >= self._last else self._firsts[output + self._num_microbatches]


def _check_finished(schedule: Schedule, num_done: Sequence[int]) -> None:
    """Raise OrderError, with what each device waits for, where devices have not done all."""
    stuck = [
        (device, order[i]) for device, (order, i) in enumerate(zip(schedule.orders, num_done, strict=True)) if order[i:]
    ]
    if not stuck:
        return
    needs = needs_of([action for order in schedule.orders for action in order], schedule.num_stages)
    waits = [f"device {device} waits at {action} for {needs[action]}" for device, action in stuck]
    raise OrderError(
        f"{schedule.name} can never finish: {', '.join(waits)}; expected what is waited for to come earlier"
    )


def check_orders(orders: Sequence[Sequence[Action]]) -> tuple[int, int]:
    """The numbers of stages and micro-batches of these orders; raises OrderError for orders that are no training step.

    A stage lies on one device and has, for every micro-batch, one forward and after it one backward, or first its
    input's and then its weights' gradient; no device waits forever.
    """
    device_of = _devices_of(orders)
    num_stages = 1 + max(device_of)
    num_microbatches = 1 + max(x.microbatch for order in orders for x in order)
    missing = next((stage for stage in range(num_stages) if stage not in device_of), None)
    if missing is not None:
        raise OrderError(f"stage {missing} has no actions, but stage {num_stages - 1} has; expected no stage left out")
    for device, order in enumerate(orders):
        _check_order(order, device, num_microbatches)
    flow_of(
        Schedule(
            name="the order",
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            orders=tuple(tuple(order) for order in orders),
        )
    )
    return num_stages, num_microbatches


def _devices_of(orders: Sequence[Sequence[Action]]) -> dict[int, int]:
    """The device of each stage."""
    device_of: dict[int, int] = {}
    for device, order in enumerate(orders):
        if not order:
            raise OrderError(f"device {device} has nothing to do; expected actions such as 0F0", device=device)
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
    """Every stage of one device has each micro-batch's actions once, in an order that makes sense."""
    counts, places = Counter(order), {action: i for i, action in enumerate(order)}
    twice = next((action for action, count in counts.items() if count > 1), None)
    if twice is not None:
        raise OrderError(f"{twice} is there {counts[twice]} times; expected every action once", device=device)
    for stage in sorted({x.stage for x in order}):
        for m in range(num_microbatches):
            wrong = _wrong_with(stage, m, places)
            if wrong:
                raise OrderError(wrong, device=device)


def _wrong_with(stage: int, microbatch: int, places: Mapping[Action, int]) -> str:
    """What is wrong with the actions of one stage for one micro-batch; "" for nothing."""
    forward, whole, first, second = (Action(stage, ActionKind(letter), microbatch) for letter in "FBIW")
    if forward not in places:
        return f"{forward} is missing; expected a forward of every micro-batch on every stage"
    parts = [x for x in (whole, first, second) if x in places]
    if parts not in ([whole], [first, second]):
        found = " and ".join(map(str, parts)) or "no backward"
        return (
            f"stage {stage} has {found} for micro-batch {microbatch}; expected {whole} alone, or {first} and {second}"
        )
    late = next((x for x in zip((forward, *parts), parts, strict=False) if places[x[0]] > places[x[1]]), None)
    return f"{late[1]} comes before {late[0]}; expected it after" if late else ""
