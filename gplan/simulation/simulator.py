"""Schedule and stage costs to a Timeline: an action starts when its device is free and its input has arrived.

After an action the engine (`gplan/runtime/torch_engine.py`) keeps the device for the moment that it takes itself, and as long
as sending the output takes the sender (`StageCost.gap_s` and the two sending times). From then on the transfer takes
nothing from computing and does not queue: receives have been posted before they are needed. Neighbours on one device
pass their tensors on at once. A backward that recomputes takes the extra forward; of a split backward that is in its
first half. The first stage, whose inputs want no gradient, has the whole backward in the second half. When a device has
done all its actions, it updates the weights of its stages, one stage after the other; the step ends with the last of
them. Before a stage's update its gradients are added up with those of other devices; what the engine takes around the
loop goes by before the first stage's (`before_update_s`).

For GPipe this gives, exactly,
    T = sum f + (M-1) max f + sum b + (M-1) max b + sum c
over the stages, f and b with what the engine takes after them and c the transfers of a micro-batch in both directions
(before the optimizer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import add
from typing import NamedTuple

from gplan.core import (
    Action,
    ActionKind,
    Origin,
    Plan,
    RecomputeMode,
    Schedule,
    Span,
    StageCost,
    Timeline,
    Transfer,
    is_recomputed,
)
from gplan.schedules.dependencies import INPUT_GRADIENT_KINDS, ExecutionOrder, execution_order
from gplan.schedules.registry import make_schedule


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
    duration_s, occupied_s = _planned(schedule, costs, recompute)
    actions = execution_order(schedule).actions
    durations, occupied = list(map(duration_s, actions)), list(map(occupied_s, actions))
    return _timeline(schedule, costs, durations, occupied, duration_s, origin="computed")


def timeline_of(
    schedule: Schedule, costs: Sequence[StageCost], *, duration_s: Callable[[Action], float], origin: Origin
) -> Timeline:
    """The schedule laid out with these durations, the gaps and transfers of `costs`,
    and the optimizers of `duration_s`."""
    actions = execution_order(schedule).actions
    durations = list(map(duration_s, actions))
    occupied = [x + gap_s(action, costs[action.stage]) for x, action in zip(durations, actions, strict=True)]
    return _timeline(schedule, costs, durations, occupied, duration_s, origin=origin)


def _timeline(
    schedule: Schedule,
    costs: Sequence[StageCost],
    durations: Sequence[float],
    occupied: Sequence[float],
    duration_s: Callable[[Action], float],  # of the updates
    *,
    origin: Origin,
) -> Timeline:
    flow = execution_order(schedule)
    starts, freed = laid_out(flow, occupied, _hops_s(schedule, costs))
    ends = list(map(add, starts, durations))
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    for action, device, start_s, end_s in zip(flow.actions, flow.devices, starts, ends, strict=True):
        spans[device].append(Span(device=device, action=action, start_s=start_s, end_s=end_s))
    updates = _updates(schedule, costs, _last_freed(schedule, freed), duration_s)
    return Timeline(
        num_devices=schedule.num_devices,
        num_microbatches=schedule.num_microbatches,
        spans=(*(span for own in spans for span in own), *updates),
        transfers=tuple(_transfers(schedule, costs, ends, freed)),
        origin=origin,
    )


def step_and_bubble(schedule: Schedule, costs: Sequence[StageCost], *, recompute: RecomputeMode) -> tuple[float, float]:
    """What `simulate_schedule` gives as `step_s` and `bubble`, without the timeline; O(K M)."""
    flow, (duration_s, occupied_s) = execution_order(schedule), _planned(schedule, costs, recompute)
    durations = list(map(duration_s, flow.actions))
    starts, freed = laid_out(flow, list(map(occupied_s, flow.actions)), _hops_s(schedule, costs))
    step_s = max(span.end_s for span in _updates(schedule, costs, _last_freed(schedule, freed), duration_s))
    available_s = schedule.num_devices * (max(map(add, starts, durations)) - min(starts))
    return step_s, max(0.0, 1.0 - sum(durations) / available_s) if available_s else 0.0


def equal_bubble(schedule: Schedule, costs: Sequence[StageCost], *, recompute: RecomputeMode) -> float:
    """The bubble that the schedule would have with equal stages, of the mean cost, and free transfers.

    (K-1)/(M+K-1) for GPipe and 1F1B, whatever the costs, if all micro-batches recompute or none does.
    """
    mean = _mean_cost(costs)
    return step_and_bubble(schedule, [mean] * len(costs), recompute=recompute)[1]


def planned_s(schedule: Schedule, costs: Sequence[StageCost], recompute: RecomputeMode) -> Callable[[Action], float]:
    """How long each action of a step takes with these costs."""
    num_microbatches = schedule.num_microbatches
    again = [is_recomputed(m, num_microbatches=num_microbatches, recompute=recompute) for m in range(num_microbatches)]
    table: dict[tuple[int, ActionKind, bool], float] = {}

    def duration_s(action: Action) -> float:
        key = action.stage, action.kind, again[action.microbatch]
        if key not in table:
            table[key] = action_s(action, costs[action.stage], is_again=again[action.microbatch])
        return table[key]

    return duration_s


def occupying(cost: StageCost) -> StageCost:
    """The same with what the engine takes after each action counted to the action."""
    first_s, second_s = cost.input_gradient_s, cost.weight_gradient_s
    return replace(
        cost,
        forward_s=cost.forward_s + cost.forward_gap_s,
        backward_s=cost.backward_s + cost.backward_gap_s,
        input_gradient_s=None if first_s is None else first_s + cost.backward_gap_s,
        weight_gradient_s=None if second_s is None else second_s + cost.gap_s,
        gap_s=0.0,
        forward_sending_s=0.0,
        backward_sending_s=0.0,
    )


def gap_s(action: Action, cost: StageCost) -> float:
    """Seconds from the end of an action on its stage until its device can begin the next one, by the engine alone."""
    match action.kind:
        case ActionKind.FORWARD:
            return cost.forward_gap_s
        case ActionKind.OPTIMIZER:
            return 0.0
        case ActionKind.INPUT_GRADIENT if action.stage == 0:
            return 0.0
        case ActionKind.WEIGHT_GRADIENT if action.stage > 0:
            return cost.gap_s
    return cost.backward_gap_s


def dependency_order(schedule: Schedule) -> tuple[Action, ...]:
    """All forwards and backwards in an order in which one device could run them: by time, were all as long."""
    flow, place = execution_order(schedule), list[int]()
    free = [0] * schedule.num_devices
    for device, need in zip(flow.devices, flow.dependencies, strict=True):
        place.append(max(free[device], 0 if need < 0 else place[need] + 1))
        free[device] = place[-1] + 1
    return tuple(flow.actions[i] for i in sorted(range(len(place)), key=place.__getitem__))


def action_s(action: Action, cost: StageCost, *, is_again: bool) -> float:
    """Seconds that one action takes on its stage; `is_again` where the micro-batch is recomputed.

    Raises ValueError for half a backward where the halves are not known.
    """
    again_s = cost.recompute_s if is_again else 0.0
    match action.kind:
        case ActionKind.FORWARD:
            return cost.forward_s
        case ActionKind.OPTIMIZER:
            return cost.optimizer_s
        case ActionKind.BACKWARD:
            return cost.backward_s + again_s
        case ActionKind.INPUT_GRADIENT if action.stage == 0:
            return 0.0
        case ActionKind.WEIGHT_GRADIENT if action.stage == 0:
            return cost.backward_s + again_s
    if cost.input_gradient_s is None or cost.weight_gradient_s is None:
        raise ValueError(f"{action} is half a backward, and how long the halves take is not known")
    return cost.input_gradient_s + again_s if action.kind is ActionKind.INPUT_GRADIENT else cost.weight_gradient_s


def _planned(
    schedule: Schedule, costs: Sequence[StageCost], recompute: RecomputeMode
) -> tuple[Callable[[Action], float], Callable[[Action], float]]:
    """How long each action takes, and how long it keeps its device, by the same sums as the planner's."""
    duration_s, kept = planned_s(schedule, costs, recompute), [occupying(cost) for cost in costs]
    return duration_s, duration_s if list(costs) == kept else planned_s(schedule, kept, recompute)


def _mean_cost(costs: Sequence[StageCost]) -> StageCost:
    """The mean of the seconds of some stages, without transfers."""

    def mean(field: str) -> float:
        return float(sum(getattr(cost, field) for cost in costs) / len(costs))

    whole = {x: mean(x) for x in ("forward_s", "backward_s", "recompute_s", "optimizer_s")}
    first_s, second_s = _equal_halves_s(costs, whole["backward_s"])
    return replace(
        costs[0], **whole, input_gradient_s=first_s, weight_gradient_s=second_s,
        activation_bytes=0, gradient_bytes=0, activation_s=0.0, gradient_s=0.0,
        gap_s=0.0, forward_sending_s=0.0, backward_sending_s=0.0, around_s=0.0,
    )  # fmt: skip


def _equal_halves_s(costs: Sequence[StageCost], backward_s: float) -> tuple[float | None, float | None]:
    """A backward in the proportion of all stages but the first, which has no first half;
    None where that is not known."""
    halves = [(cost.input_gradient_s, cost.weight_gradient_s) for cost in costs[1:]]
    known = [(first_s, second_s) for first_s, second_s in halves if first_s is not None and second_s is not None]
    if len(known) < len(halves):
        return None, None
    total_s = sum(map(sum, known))
    share = sum(first_s for first_s, _ in known) / total_s if total_s else 0.0
    return share * backward_s, (1.0 - share) * backward_s


def laid_out(
    flow: ExecutionOrder, occupied: Sequence[float], hops_s: Mapping[tuple[int, ActionKind], float]
) -> tuple[list[float], list[float]]:
    """When each action starts and its device is free again, by its place in the flow:
    as early as device and input allow.

    `occupied` is how long each keeps its device; an output arrives `hops_s` after that, by stage and kind of action.
    """
    free = [0.0] * (1 + max(flow.devices))
    starts, freed = list[float](), list[float]()
    for device, need, kept_s in zip(flow.devices, flow.dependencies, occupied, strict=True):
        start_s = free[device]
        if need >= 0 and flow.devices[need] != device:
            sent = flow.actions[need]
            start_s = max(start_s, freed[need] + hops_s[sent.stage, sent.kind])
        free[device] = start_s + kept_s
        starts.append(start_s)
        freed.append(free[device])
    return starts, freed


def _last_freed(schedule: Schedule, freed: Sequence[float]) -> list[float]:
    """When each device is free after its last action."""
    free = [0.0] * schedule.num_devices
    for device, free_s in zip(execution_order(schedule).devices, freed, strict=True):
        free[device] = free_s
    return free


class _Route(NamedTuple):
    """Where the output of an action goes, if that is another device."""

    target: int
    seconds: float
    num_bytes: int


def _routes(schedule: Schedule, costs: Sequence[StageCost]) -> dict[tuple[int, ActionKind], _Route]:
    """By stage and kind of action; what the next action on the same device needs is there at once."""
    routes = {}
    for stage, (device, following) in enumerate(pairwise(schedule.devices)):
        if device != following:
            cost = costs[stage]
            routes[stage, ActionKind.FORWARD] = _Route(following, cost.activation_s, cost.activation_bytes)
            for kind in INPUT_GRADIENT_KINDS:
                routes[stage + 1, kind] = _Route(device, cost.gradient_s, cost.gradient_bytes)
    return routes


def _hops_s(schedule: Schedule, costs: Sequence[StageCost]) -> dict[tuple[int, ActionKind], float]:
    return {key: route.seconds for key, route in _routes(schedule, costs).items()}


def _transfers(
    schedule: Schedule, costs: Sequence[StageCost], ends: Sequence[float], freed: Sequence[float]
) -> Iterator[Transfer]:
    """From the end of what is sent until it has arrived."""
    flow, routes = execution_order(schedule), _routes(schedule, costs)
    for action, device, end_s, free_s in zip(flow.actions, flow.devices, ends, freed, strict=True):
        if route := routes.get((action.stage, action.kind)):
            yield Transfer(
                action=action,
                source=device,
                target=route.target,
                start_s=end_s,
                end_s=max(end_s, free_s + route.seconds),
                num_bytes=route.num_bytes,
            )


def _updates(
    schedule: Schedule, costs: Sequence[StageCost], free: Sequence[float], duration_s: Callable[[Action], float]
) -> Iterator[Span]:
    """When it is free at last, each device updates the weights of its stages, one stage after the other."""
    for device, free_s in enumerate(free):
        for stage in schedule.stages_of(device):
            update = Action(stage, ActionKind.OPTIMIZER, 0)
            before_s = costs[stage].before_update_s
            end_s = free_s + (duration_s(update) + before_s)
            yield Span(device=device, action=update, start_s=free_s + before_s, end_s=end_s)
            free_s = end_s
