"""Schedule and stage costs to a Timeline: an action starts when its device is free and its input has arrived.

After an action the engine (`gplan/runtime/torch_engine.py`) keeps the device for the moment that it takes itself, and as long
as sending the output takes the sender (`StageCost.gap_s` and the two sending times). From then on the transfer takes
nothing from computing; receives have been posted before they are needed. What a device sends to another one goes over
one link, one transfer after the other in the order of sending, each for as long as it takes by itself. Neighbours on one device
pass their tensors on at once. A backward that recomputes takes the extra forward; of a split backward that is in its
first half. The first stage, whose inputs want no gradient, has the whole backward in the second half. When a device has
done all its actions, it updates the weights of its stages, one stage after the other; the step ends with the last of
them. Before a stage's update its gradients are added up with those of other devices; what the engine takes around the
loop goes by before the first stage's (`before_update_s`). The devices that share tied weights wait for each other before
their updates (`when_updates_begin`).

For GPipe this gives, exactly,
    T = sum f + sum a + (M-1) max(f, a) + sum b + sum g + (M-1) max(b, g)
over the stages, f and b with what the engine takes after them, a and g the transfers of a micro-batch's activations and
gradients (before the optimizer): a slow link is like one more stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

from gplan.core import (
    Action,
    ActionKind,
    Origin,
    Plan,
    RecomputeMode,
    Schedule,
    Seconds,
    Span,
    StageCost,
    Timeline,
    Transfer,
    idle_share,
)
from gplan.schedules.dependencies import dependencies_of
from gplan.schedules.registry import make_schedule
from gplan.simulation.kernel import (
    NONE,
    ActionKey,
    ActionProgram,
    TiedDevices,
    action_s,
    action_times,
    gaps,
    occupied,
    tied_devices,
    when_updates_begin,
    whole_program,
)


def schedule_of(plan: Plan) -> Schedule:
    """The order in which the plan's devices perform their actions."""
    return make_schedule(plan.schedule, num_devices=plan.num_devices, num_microbatches=plan.num_microbatches)


def simulate(plan: Plan) -> Timeline:
    """The step that the plan's costs and schedule predict."""
    return simulate_schedule(schedule_of(plan), plan.stage_costs, recompute=plan.recompute)


def simulate_schedule(schedule: Schedule, costs: Sequence[StageCost], *, recompute: RecomputeMode) -> Timeline:
    """One step of `schedule` with `costs[s]` for stage s; O(K M).

    Raises ValueError where the order can never finish, naming the action that each stuck device waits at.
    """
    program, occupied_s, hops_s = _program(schedule, costs, recompute)
    duration_s = planned_s(schedule, costs, recompute)
    rows = action_times(program, occupied_s, hops_s, zero=0.0)
    return _timeline(schedule, costs, program, rows, duration_s, origin="computed")


def timeline_of(
    schedule: Schedule, costs: Sequence[StageCost], *, duration_s: Callable[[Action], float], origin: Origin
) -> Timeline:
    """The schedule laid out with these durations, updates included, and the gaps and transfers of `costs`."""
    program, _, hops_s = _program(schedule, costs, "never")
    duration_s = cache(duration_s)
    occupied_s = [duration_s(action) + gap_s(action, costs[action.stage]) for action in program.actions]
    transfers_s = [hops_s[x.hop] if x.hop >= 0 else 0.0 for x in program.entries]
    rows = action_times(program.individual, occupied_s, transfers_s, zero=0.0)
    return _timeline(schedule, costs, program, rows, duration_s, origin=origin)


def _program(
    schedule: Schedule, costs: Sequence[StageCost], recompute: RecomputeMode
) -> tuple[ActionProgram, list[float], list[float]]:
    """The program of the schedule, for how long its actions keep their devices, and its transfers."""
    program, times = whole_program(schedule, recompute), [occupied(cost) for cost in costs]
    return program, program.durations_s(times), program.hops_s(times)


def _timeline(
    schedule: Schedule,
    costs: Sequence[StageCost],
    program: ActionProgram,
    rows: Iterable[tuple[float, float, float]],  # of `action_times`
    duration_s: Callable[[Action], float],
    *,
    origin: Origin,
) -> Timeline:
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    transfers, free = list[Transfer](), [0.0] * schedule.num_devices
    for action, entry, (start_s, free_s, arrival_s) in zip(program.actions, program.entries, rows, strict=True):
        end_s, device = start_s + duration_s(action), entry.device
        spans[device].append(Span(device=device, action=action, start_s=start_s, end_s=end_s))
        free[device] = free_s
        if entry.link != NONE:
            transfers.append(
                Transfer(
                    action=action,
                    source=device,
                    target=schedule.devices[action.receiver],
                    start_s=end_s,
                    end_s=max(end_s, arrival_s),
                    num_bytes=sent_bytes(action, costs),
                )
            )
    updates = (
        Span(device=device, action=update, start_s=start_s, end_s=end_s)
        for device, update, start_s, end_s in update_times(schedule, costs, free, duration_s)
    )
    return Timeline(
        num_devices=schedule.num_devices,
        num_microbatches=schedule.num_microbatches,
        spans=(*(span for own in spans for span in own), *updates),
        transfers=tuple(transfers),
        origin=origin,
    )


def step_and_bubble(schedule: Schedule, costs: Sequence[StageCost], *, recompute: RecomputeMode) -> tuple[float, float]:
    """`step_s` and `bubble` of `simulate_schedule`, without the timeline; O(K M)."""
    program, occupied_s, hops_s = _program(schedule, costs, recompute)
    durations = [action_s(key, costs[key.stage]) for key in program.durations]
    free, ends, starts, total_s = [0.0] * schedule.num_devices, list[float](), list[float](), 0.0
    for entry, (start_s, free_s, _) in zip(
        program.entries, action_times(program, occupied_s, hops_s, zero=0.0), strict=True
    ):
        free[entry.device] = free_s
        starts.append(start_s)
        ends.append(start_s + durations[entry.duration])
        total_s += durations[entry.duration]
    updates = update_times(schedule, costs, free, planned_s(schedule, costs, recompute))
    step_s = max(end_s for _, _, _, end_s in updates)
    available_s = schedule.num_devices * (max(ends) - min(starts))
    return step_s, idle_share(total_s, available_s)


def equal_bubble(schedule: Schedule, costs: Sequence[StageCost], *, recompute: RecomputeMode) -> float:
    """The bubble that the schedule would have with equal stages, of the mean cost, and free transfers.

    (K-1)/(M+K-1) for GPipe and 1F1B, whatever the costs, if all micro-batches recompute or none does.
    """
    return step_and_bubble(schedule, [_mean_cost(costs)] * len(costs), recompute=recompute)[1]


def planned_s(schedule: Schedule, costs: Sequence[StageCost], recompute: RecomputeMode) -> Callable[[Action], float]:
    """How long each action of a step takes with these costs, without the engine's time after it."""
    num_microbatches = schedule.num_microbatches

    @cache
    def of_key(key: ActionKey) -> float:
        return action_s(key, costs[key.stage])

    return lambda action: of_key(ActionKey.of(action, num_microbatches=num_microbatches, recompute=recompute))


def gap_s(action: Action, cost: StageCost) -> float:
    """Seconds from the end of an action of the loop until its device can begin the next one, by the engine alone."""
    return action_s(ActionKey(action.stage, action.kind, recomputes=False), gaps(cost))


def transfer_s(action: Action, costs: Sequence[StageCost]) -> float:
    """Seconds of the transfer of an action's output: activations to the next stage, or gradients to the one before."""
    if action.kind is ActionKind.FORWARD:
        return costs[action.stage].activation_s
    return costs[action.receiver].gradient_s if action.stage else 0.0


def sent_bytes(action: Action, costs: Sequence[StageCost]) -> int:
    """Bytes of an action's output that go to another stage: activations, or their gradients; 0 for stage 0's."""
    if action.kind is ActionKind.FORWARD:
        return costs[action.stage].activation_bytes
    return costs[action.receiver].gradient_bytes if action.stage else 0


def dependency_order(schedule: Schedule) -> tuple[Action, ...]:
    """All forwards and backwards in an order in which one device could run them: by time, were all as long."""
    program = whole_program(schedule, "never")
    rows = action_times(program, [1.0] * len(program.durations), [0.0] * len(program.hops), zero=0.0)
    pairs = sorted(zip(rows, program.actions, strict=True), key=lambda pair: pair[0][0])
    return tuple(action for _, action in pairs)


def _mean_cost(costs: Sequence[StageCost]) -> StageCost:
    """The mean of the seconds of some stages, without transfers.

    Its backward has halves in the proportion of all stages but the first, which has no first half, where these are known.
    """
    whole = {
        x: float(sum(getattr(cost, x) for cost in costs) / len(costs))
        for x in ("forward_s", "backward_s", "recompute_s", "optimizer_s")
    }
    halves = [(x.input_gradient_s, x.weight_gradient_s) for x in costs[1:]]
    known = [(first_s, second_s) for first_s, second_s in halves if first_s is not None and second_s is not None]
    first_s = second_s = None
    if len(known) == len(halves):
        total_s = sum(map(sum, known))
        share = sum(first_s for first_s, _ in known) / total_s if total_s else 0.0
        first_s, second_s = share * whole["backward_s"], (1.0 - share) * whole["backward_s"]
    return replace(
        costs[0], **whole, input_gradient_s=first_s, weight_gradient_s=second_s,
        activation_bytes=0, gradient_bytes=0, activation_s=0.0, gradient_s=0.0,
        gap_s=0.0, forward_sending_s=0.0, backward_sending_s=0.0, around_s=0.0,
    )  # fmt: skip


def tied_devices_of(schedule: Schedule, costs: Sequence[StageCost]) -> TiedDevices:
    """Of each device whether any of its stages has a tied weight."""
    return tied_devices([schedule.stages_of(device) for device in range(schedule.num_devices)], costs)


def update_times(
    schedule: Schedule, costs: Sequence[StageCost], free: Sequence[Seconds], update_s: Callable[[Action], Seconds]
) -> Iterator[tuple[int, Action, Seconds, Seconds]]:
    """The device, action, start and end of each update, given when each device has done all its actions."""
    for device, free_s in enumerate(when_updates_begin(tied_devices_of(schedule, costs), free)):
        for stage in schedule.stages_of(device):
            update, before_s = Action(stage, ActionKind.OPTIMIZER, 0), costs[stage].before_update_s
            end_s = free_s + (update_s(update) + before_s)
            yield device, update, free_s + before_s, end_s
            free_s = end_s


def exposed_transfers(
    spans: Sequence[Span],
    *,
    num_bytes: Callable[[Action], int] = lambda _: 0,
    hop_s: Callable[[Action], float] = lambda _: 0.0,
) -> tuple[Transfer, ...]:
    """The part of each transfer that its receiver waited for, by the spans of all devices, ordered by device and start.

    Given are, of what an action sends, its bytes, and the seconds from the action's end until the neighbour should have it.
    If the receiver was idle when the sender finished, its whole wait until its next action is exposed. If it was still
    busy, its wait counts from the end of its own action, for at most the rest of the planned transfer; what is left is
    engine time.
    """
    by_action = {span.action: span for span in spans if span.action.kind is not ActionKind.OPTIMIZER}
    before = {b.action: a for a, b in pairwise(spans) if a.device == b.device}
    found = []
    for action, needed in dependencies_of(by_action, 1 + max(x.stage for x in by_action)).items():
        span, sender = by_action[action], by_action[needed]
        if sender.device == span.device:
            continue
        free_s = before[action].end_s if action in before else 0.0
        start_s = max(free_s, sender.end_s)
        end_s = max(start_s, span.start_s)
        if free_s > sender.end_s:
            end_s = min(end_s, max(start_s, sender.end_s + hop_s(needed)))
        found.append(
            Transfer(
                action=needed,
                source=sender.device,
                target=span.device,
                start_s=start_s,
                end_s=end_s,
                num_bytes=num_bytes(needed),
            )
        )
    return tuple(found)


def exposed_in(plan: Plan, spans: Sequence[Span]) -> tuple[Transfer, ...]:
    """The exposed transfers of a measured step of the plan, with what crosses its cuts."""
    costs = plan.stage_costs

    def hop_s(action: Action) -> float:
        return gap_s(action, costs[action.stage]) + transfer_s(action, costs)

    return exposed_transfers(spans, num_bytes=lambda action: sent_bytes(action, costs), hop_s=hop_s)
