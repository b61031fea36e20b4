"""What the actions of a step wait for, and whether an order can be carried out at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gplan.nouns import Action, ActionKind, Schedule

FIRST_HALVES = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
"""What makes the gradients that the stage before waits for."""


def needs_of(actions: Collection[Action], num_stages: int) -> dict[Action, Action]:
    """For each of a step's actions the one whose output it cannot start without; those that need none are left out.

    A forward needs the stage before, a backward or its first half the stage after; the last stage's needs its own forward,
    a second half its first. (That a stage's forward comes before its backward is a matter of the device's order.)
    """
    firsts = {(x.stage, x.microbatch): x for x in actions if x.kind in FIRST_HALVES}
    needs = {}
    for action in actions:
        stage, kind, m = action.stage, action.kind, action.microbatch
        if kind is ActionKind.FORWARD and stage > 0:
            needs[action] = Action(stage - 1, kind, m)
        elif kind in FIRST_HALVES:
            needs[action] = firsts[stage + 1, m] if stage < num_stages - 1 else Action(stage, ActionKind.FORWARD, m)
        elif kind is ActionKind.WEIGHT_GRADIENT:
            needs[action] = firsts[stage, m]
    return needs


_NOT_YET, _NONE = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """All actions of a schedule in an order in which each comes after what it needs; entries by place in that order."""

    actions: tuple[Action, ...]
    devices: tuple[int, ...]
    needs: tuple[int, ...]  # the place of the action that is needed; below 0: none


@lru_cache(maxsize=32)
def flow_of(schedule: Schedule) -> Flow:
    """The schedule with what its actions need; raises ValueError where they wait for each other forever."""
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    forwards, firsts = ([-1] * (num_stages * num_microbatches) for _ in range(2))  # places, by stage and micro-batch
    actions, devices, needs, done = list[Action](), list[int](), list[int](), [0] * schedule.num_devices
    progress = True
    while progress:
        progress = False
        for device, order in enumerate(schedule.orders):
            for i in range(done[device], len(order)):
                action = order[i]
                own = action.stage * num_microbatches + action.microbatch
                need, made = 0, firsts
                if action.kind is ActionKind.FORWARD:
                    need, made = forwards[own - num_microbatches] if action.stage else _NONE, forwards
                elif action.kind is ActionKind.WEIGHT_GRADIENT:
                    need, made = firsts[own], []
                else:
                    need = forwards[own] if action.stage == num_stages - 1 else firsts[own + num_microbatches]
                if need == _NOT_YET:
                    break
                if made:
                    made[own] = len(actions)
                actions.append(action)
                devices.append(device)
                needs.append(need)
                done[device], progress = i + 1, True
    stuck = [str(order[i]) for order, i in zip(schedule.orders, done, strict=True) if i < len(order)]
    if stuck:
        raise ValueError(f"schedule {schedule.name} can never finish: devices wait forever at {', '.join(stuck)}")
    return Flow(actions=tuple(actions), devices=tuple(devices), needs=tuple(needs))


def check_orders(orders: Sequence[Sequence[Action]]) -> tuple[int, int]:
    """The numbers of stages and micro-batches of these orders; raises ValueError for orders that are no training step.

    A stage lies on one device and has, for every micro-batch, one forward and after it one backward, or first its input's and
    then its weights' gradient. Whether devices wait for each other forever is the matter of `flow_of`.
    """
    device: dict[int, int] = {}
    for i, order in enumerate(orders):
        if not order:
            raise ValueError(f"device {i} has nothing to do; expected actions such as 0F0")
        for action in order:
            if device.setdefault(action.stage, i) != i:
                raise ValueError(
                    f"stage {action.stage} is on devices {device[action.stage]} and {i}; expected every stage on one device"
                )
    num_stages = 1 + max(device)
    missing = [stage for stage in range(num_stages) if stage not in device]
    if missing:
        raise ValueError(
            f"stage {missing[0]} has no actions, but stage {num_stages - 1} has; expected no stage left out"
        )
    num_microbatches = 1 + max(x.microbatch for order in orders for x in order)
    for order in orders:
        _check_order(order, sorted({x.stage for x in order}), num_microbatches)
    return num_stages, num_microbatches


def _check_order(order: Sequence[Action], stages: Sequence[int], num_microbatches: int) -> None:
    counts, places = Counter(order), {action: i for i, action in enumerate(order)}
    twice = [action for action, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]} is there {counts[twice[0]]} times; expected every action once")
    for stage in stages:
        for m in range(num_microbatches):
            forward, whole, first, second = (Action(stage, kind, m) for kind in ("F", "B", "I", "W"))  # type: ignore[arg-type]
            parts = [x for x in (whole, first, second) if x in places]
            if forward not in places:
                raise ValueError(f"{forward} is missing; expected a forward of every micro-batch on every stage")
            if parts not in ([whole], [first, second]):
                found = " ".join(map(str, parts)) or "nothing"
                raise ValueError(
                    f"stage {stage} has {found} for micro-batch {m}; expected {whole}, or {first} and {second}"
                )
            for before, after in zip((forward, *parts), parts, strict=False):
                if places[before] > places[after]:
                    raise ValueError(f"{after} comes before {before}; expected it after")
