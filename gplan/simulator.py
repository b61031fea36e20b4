"""Schedule and stage costs to a Timeline: an action starts when its device is free and its input has arrived.

Transfers overlap with computing and do not queue, as receives are posted before they are needed
(`gplan/execute/engine.py`); neighbours on one device pass their tensors on at once. A backward that recomputes takes the
extra forward; of a split backward that is in its first half, and on the first stage, whose inputs want no gradient, all
of it is in the second. The step ends with each device's optimizers. For GPipe this gives, exactly,
    T = sum f + (M-1) max f + sum b + (M-1) max b + sum c
over the stages, with c the transfers of a micro-batch in both directions (before the optimizer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from gplan.nouns import Action, ActionKind, Origin, Plan, RecomputeMode, Schedule, Span, StageCost, Timeline, Transfer
from gplan.schedules import FIRST_HALVES, flow_of, make_schedule


def schedule_of(plan: Plan) -> Schedule:
    """The order in which the plan's devices perform their actions."""
    return make_schedule(plan.schedule, num_devices=plan.num_devices, num_microbatches=plan.num_microbatches)


def simulate(plan: Plan) -> Timeline:
    """The step that the plan's costs and schedule predict."""
    return simulate_schedule(schedule_of(plan), [stage.cost for stage in plan.stages], recompute=plan.recompute)


def simulate_schedule(schedule: Schedule, costs: Sequence[StageCost], *, recompute: RecomputeMode) -> Timeline:
    """One step of `schedule` with `costs[s]` for stage s; O(K M).

    Raises ValueError where the order can never finish, naming the action that each stuck device waits at.
    """
    return timeline_of(schedule, costs, duration_s=planned_s(schedule, costs, recompute), origin="computed")


def timeline_of(
    schedule: Schedule, costs: Sequence[StageCost], *, duration_s: Callable[[Action], float], origin: Origin
) -> Timeline:
    """The schedule laid out with these durations, the transfers of `costs`, and the optimizers of `duration_s`."""
    flow = flow_of(schedule)
    starts, ends = _laid_out(schedule, costs, duration_s)
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    for action, device, start_s, end_s in zip(flow.actions, flow.devices, starts, ends, strict=True):
        spans[device].append(Span(device=device, action=action, start_s=start_s, end_s=end_s))
    updates = _updates(schedule, [own[-1].end_s for own in spans], duration_s)
    return Timeline(
        num_devices=schedule.num_devices,
        num_microbatches=schedule.num_microbatches,
        spans=(*(span for own in spans for span in own), *updates),
        transfers=tuple(_transfers(schedule, costs, ends)),
        origin=origin,
    )


def step_and_bubble(schedule: Schedule, costs: Sequence[StageCost], *, recompute: RecomputeMode) -> tuple[float, float]:
    """What `simulate_schedule` gives as `step_s` and `bubble`, without the timeline; O(K M)."""
    duration_s = planned_s(schedule, costs, recompute)
    starts, ends = _laid_out(schedule, costs, duration_s)
    free = [0.0] * schedule.num_devices
    for device, end_s in zip(flow_of(schedule).devices, ends, strict=True):
        free[device] = max(free[device], end_s)
    step_s = max(span.end_s for span in _updates(schedule, free, duration_s))
    available_s = schedule.num_devices * (max(free) - min(starts))
    return step_s, 1.0 - (sum(ends) - sum(starts)) / available_s if available_s else 0.0


def equal_bubble(schedule: Schedule, costs: Sequence[StageCost], *, recompute: RecomputeMode) -> float:
    """The bubble that the schedule would have with equal stages, of the mean cost, and free transfers.

    (K-1)/(M+K-1) for GPipe and 1F1B, whatever the costs.
    """
    mean = _mean_cost(costs)
    return step_and_bubble(schedule, [mean] * len(costs), recompute=recompute)[1]


def planned_s(schedule: Schedule, costs: Sequence[StageCost], recompute: RecomputeMode) -> Callable[[Action], float]:
    """How long each action of a step takes with these costs."""
    num_microbatches = schedule.num_microbatches
    table: dict[tuple[int, ActionKind, bool], float] = {}

    def duration_s(action: Action) -> float:
        again = is_recomputed(action.microbatch, num_microbatches=num_microbatches, recompute=recompute)
        key = action.stage, action.kind, again
        if key not in table:
            table[key] = action_s(action, costs[action.stage], is_again=again)
        return table[key]

    return duration_s


def dependency_order(schedule: Schedule) -> tuple[Action, ...]:
    """All forwards and backwards in an order in which one device could run them: by time, were all as long."""
    flow, place = flow_of(schedule), list[int]()
    free = [0] * schedule.num_devices
    for device, need in zip(flow.devices, flow.needs, strict=True):
        place.append(max(free[device], 0 if need < 0 else place[need] + 1))
        free[device] = place[-1] + 1
    return tuple(flow.actions[i] for i in sorted(range(len(place)), key=place.__getitem__))


def is_recomputed(microbatch: int, *, num_microbatches: int, recompute: RecomputeMode) -> bool:
    """Whether the backward of this micro-batch runs its forward again."""
    return recompute in ("always", "selected") or (recompute == "except-last" and microbatch < num_microbatches - 1)


def action_s(action: Action, cost: StageCost, *, is_again: bool) -> float:
    """Seconds that one action takes on its stage; `is_again` where the micro-batch is recomputed.

    Raises ValueError for half a backward where the halves are not known.
    """
    again_s = cost.recompute_s if is_again else 0.0
    match action.kind:
        case ActionKind.FORWARD:
            return cost.forward_s
        case ActionKind.OPTIMIZER:
            return cost.all_reduce_s + cost.optimizer_s
        case ActionKind.BACKWARD:
            return cost.backward_s + again_s
        case ActionKind.INPUT_GRADIENT if action.stage == 0:
            return 0.0
        case ActionKind.WEIGHT_GRADIENT if action.stage == 0:
            return cost.backward_s + again_s
    if cost.input_gradient_s is None or cost.weight_gradient_s is None:
        raise ValueError(f"{action} is half a backward, and how long the halves take is not known")
    return cost.input_gradient_s + again_s if action.kind is ActionKind.INPUT_GRADIENT else cost.weight_gradient_s


def _mean_cost(costs: Sequence[StageCost]) -> StageCost:
    """The mean of the seconds of some stages, without transfers."""

    def mean(field: str) -> float:
        return float(sum(getattr(cost, field) for cost in costs) / len(costs))

    halves = {x: mean(x) for x in ("input_gradient_s", "weight_gradient_s") if getattr(costs[0], x) is not None}
    whole = {x: mean(x) for x in ("forward_s", "backward_s", "recompute_s", "optimizer_s")}
    return replace(costs[0], **whole, **halves, activation_bytes=0, gradient_bytes=0, activation_s=0.0, gradient_s=0.0)


def _laid_out(
    schedule: Schedule, costs: Sequence[StageCost], duration_s: Callable[[Action], float]
) -> tuple[list[float], list[float]]:
    """When each action starts and ends, by its place in the flow: as early as device and input allow."""
    flow = flow_of(schedule)
    activations, gradients = _sent_s(schedule, costs)
    free = [0.0] * schedule.num_devices
    starts, ends, arrivals = list[float](), list[float](), list[float]()
    for action, device, need in zip(flow.actions, flow.devices, flow.needs, strict=True):
        start_s = free[device]
        if need >= 0 and arrivals[need] > start_s:
            start_s = arrivals[need]
        end_s = start_s + duration_s(action)
        free[device] = end_s
        starts.append(start_s)
        ends.append(end_s)
        if action.kind is ActionKind.FORWARD:
            end_s += activations[action.stage]
        elif action.kind in FIRST_HALVES:
            end_s += gradients[action.stage]
        arrivals.append(end_s)
    return starts, ends


def _sent_s(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[list[float], list[float]]:
    """Seconds from the end of each stage's forward and backward to the arrival of its output; 0 on the same device."""
    devices = schedule.devices
    is_sent = [one != other for one, other in pairwise(devices)]
    forth = [cost.activation_s if sent else 0.0 for cost, sent in zip(costs, is_sent, strict=False)]
    back = [cost.gradient_s if sent else 0.0 for cost, sent in zip(costs, is_sent, strict=False)]
    return [*forth, 0.0], [0.0, *back]


def _transfers(schedule: Schedule, costs: Sequence[StageCost], ends: Sequence[float]) -> Iterator[Transfer]:
    flow, devices = flow_of(schedule), schedule.devices
    activations, gradients = _sent_s(schedule, costs)
    for action, device, end_s in zip(flow.actions, flow.devices, ends, strict=True):
        forward = action.kind is ActionKind.FORWARD
        if not forward and action.kind not in FIRST_HALVES:
            continue
        target = action.stage + (1 if forward else -1)
        if 0 <= target < schedule.num_stages and devices[target] != device:
            yield Transfer(
                action=action,
                source=device,
                target=devices[target],
                num_bytes=costs[action.stage].activation_bytes if forward else costs[target].gradient_bytes,
                start_s=end_s,
                end_s=end_s + (activations if forward else gradients)[action.stage],
            )


def _updates(schedule: Schedule, free: Sequence[float], duration_s: Callable[[Action], float]) -> Iterator[Span]:
    """When it is free at last, each device updates the weights of its stages, one stage after the other."""
    for device, free_s in enumerate(free):
        for stage in schedule.stages_of(device):
            update = Action(stage, ActionKind.OPTIMIZER, 0)
            end_s = free_s + duration_s(update)
            yield Span(device=device, action=update, start_s=free_s, end_s=end_s)
            free_s = end_s
