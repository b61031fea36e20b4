"""Schedule and stage costs to a Timeline: an action starts when its device is free and its input has arrived.

Transfers overlap with computing and do not queue; a backward that recomputes takes the extra forward. The step ends
with each device's optimizer. For GPipe this gives, exactly,
    T = sum f + (M-1) max f + sum b + (M-1) max b + sum c
over the stages, with c the transfers of a micro-batch in both directions (before the optimizer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from gplan.nouns import Action, ActionKind, Origin, Plan, RecomputeMode, Schedule, Span, StageCost, Timeline, Transfer
from gplan.schedules import make_schedule


def simulate(plan: Plan) -> Timeline:
    """The step that the plan's costs and schedule predict."""
    schedule = make_schedule(plan.schedule, num_stages=plan.num_stages, num_microbatches=plan.num_microbatches)
    return simulate_schedule(schedule, [stage.cost for stage in plan.stages], recompute=plan.recompute)


def simulate_schedule(schedule: Schedule, costs: Sequence[StageCost], *, recompute: RecomputeMode) -> Timeline:
    """One step of `schedule` with `costs[s]` for stage s; O(K M).

    Raises ValueError where the order can never finish, naming the action that each stuck device waits at.
    """
    return timeline_of(schedule, costs, duration_s=_planned_s(schedule, costs, recompute), origin="computed")


def timeline_of(
    schedule: Schedule, costs: Sequence[StageCost], *, duration_s: Callable[[Action], float], origin: Origin
) -> Timeline:
    """The schedule laid out with these durations, the transfers of `costs`, and the optimizers of `duration_s`."""
    spans = lay_out(schedule, duration_s=duration_s, transfer_s=lambda action: _transfer_s(action, costs))
    return Timeline(
        num_devices=len(schedule.orders),
        num_microbatches=schedule.num_microbatches,
        spans=tuple(spans.values()) + _optimizer_spans(schedule, spans, duration_s),
        transfers=_transfers(schedule, costs, spans),
        origin=origin,
    )


def step_and_bubble(schedule: Schedule, costs: Sequence[StageCost], *, recompute: RecomputeMode) -> tuple[float, float]:
    """What `simulate_schedule` gives as `step_s` and `bubble`, without the timeline; O(K M)."""
    duration_s = _planned_s(schedule, costs, recompute)
    placed = action_times(schedule, duration_s=duration_s, transfer_s=lambda action: _transfer_s(action, costs))
    loop_end_s = max(end_s for done in placed for _, end_s in done.values())
    busy_s = sum(end_s - start_s for done in placed for start_s, end_s in done.values())
    step_s = max(end_s for done in placed for _, _, end_s in _updates(done, _end_s(done), duration_s))
    available_s = len(placed) * (loop_end_s - min(start_s for done in placed for start_s, _ in done.values()))
    return step_s, 1.0 - busy_s / available_s if available_s else 0.0


def _planned_s(schedule: Schedule, costs: Sequence[StageCost], recompute: RecomputeMode) -> Callable[[Action], float]:
    def duration_s(action: Action) -> float:
        return action_s(action, costs[action.stage], num_microbatches=schedule.num_microbatches, recompute=recompute)

    return duration_s


def _end_s(done: dict[Action, tuple[float, float]]) -> float:
    """When a device is done with all that was placed so far."""
    return next(reversed(done.values()))[1] if done else 0.0


def _updates(
    actions: Iterable[Action], free_s: float, duration_s: Callable[[Action], float]
) -> Iterator[tuple[Action, float, float]]:
    """The optimizers of the stages that these actions of a device are of, one after the other, with start and end."""
    for stage in sorted({action.stage for action in actions}):
        update = Action(stage, ActionKind.OPTIMIZER, 0)
        end_s = free_s + duration_s(update)
        yield update, free_s, end_s
        free_s = end_s


def dependency_order(schedule: Schedule) -> tuple[Action, ...]:
    """All forwards and backwards in an order in which one device could run them."""
    spans = lay_out(schedule, duration_s=lambda _: 1.0, transfer_s=lambda _: 0.0)
    return tuple(sorted(spans, key=lambda action: spans[action].start_s))


def lay_out(
    schedule: Schedule, *, duration_s: Callable[[Action], float], transfer_s: Callable[[Action], float]
) -> dict[Action, Span]:
    """Every action's span, grouped by device and in the order of each: as early as device and input allow."""
    times = action_times(schedule, duration_s=duration_s, transfer_s=transfer_s)
    return {
        action: Span(device=device, action=action, start_s=start_s, end_s=end_s)
        for device, done in enumerate(times)
        for action, (start_s, end_s) in done.items()
    }


def action_times(
    schedule: Schedule, *, duration_s: Callable[[Action], float], transfer_s: Callable[[Action], float]
) -> list[dict[Action, tuple[float, float]]]:
    """When each action of each device starts and ends, in the device's order; raises ValueError for one that cannot."""
    placed: list[dict[Action, tuple[float, float]]] = [{} for _ in schedule.orders]
    ready_s: dict[Action, float] = {}  # when an action's output has arrived where it is needed
    progress = True
    while progress:
        progress = False
        for device, order in enumerate(schedule.orders):
            done = placed[device]
            free_s = _end_s(done)
            for action in order[len(done) :]:
                needed = needed_action(action, schedule.num_stages)
                if needed is not None and needed not in ready_s:
                    break
                start_s = free_s if needed is None else max(free_s, ready_s[needed])
                free_s = start_s + duration_s(action)
                done[action] = (start_s, free_s)
                ready_s[action] = free_s + transfer_s(action)
                progress = True
    _check_finished(schedule, placed)
    return placed


def is_recomputed(microbatch: int, *, num_microbatches: int, recompute: RecomputeMode) -> bool:
    """Whether the backward of this micro-batch runs its forward again."""
    return recompute in ("always", "selected") or (recompute == "except-last" and microbatch < num_microbatches - 1)


def action_s(action: Action, cost: StageCost, *, num_microbatches: int, recompute: RecomputeMode) -> float:
    """Seconds that one action takes on its stage."""
    if action.kind is ActionKind.FORWARD:
        return cost.forward_s
    if action.kind is ActionKind.OPTIMIZER:
        return cost.all_reduce_s + cost.optimizer_s
    again = is_recomputed(action.microbatch, num_microbatches=num_microbatches, recompute=recompute)
    return cost.backward_s + (cost.recompute_s if again else 0.0)


def needed_action(action: Action, num_stages: int) -> Action | None:
    """The action of another stage whose output this one waits for; the last stage's backward needs its own forward."""
    if action.kind is ActionKind.FORWARD:
        return Action(action.stage - 1, action.kind, action.microbatch) if action.stage > 0 else None
    if action.stage < num_stages - 1:
        return Action(action.stage + 1, action.kind, action.microbatch)
    return Action(action.stage, ActionKind.FORWARD, action.microbatch)


def _check_finished(schedule: Schedule, placed: Sequence[dict[Action, tuple[float, float]]]) -> None:
    pairs = zip(schedule.orders, placed, strict=True)
    stuck = [str(order[len(done)]) for order, done in pairs if len(done) < len(order)]
    if stuck:
        raise ValueError(f"schedule {schedule.name} can never finish: devices wait forever at {', '.join(stuck)}")


def _transfer_s(action: Action, costs: Sequence[StageCost]) -> float:
    """Seconds from the end of an action to the arrival of its output at the neighbouring stage."""
    if action.kind is ActionKind.FORWARD:
        return costs[action.stage].activation_s if action.stage < len(costs) - 1 else 0.0
    return costs[action.stage - 1].gradient_s if action.stage > 0 else 0.0


def _transfers(schedule: Schedule, costs: Sequence[StageCost], spans: dict[Action, Span]) -> tuple[Transfer, ...]:
    transfers = []
    for action, span in spans.items():
        forward = action.kind is ActionKind.FORWARD
        target = action.stage + (1 if forward else -1)
        if not 0 <= target < schedule.num_stages:
            continue
        num_bytes = costs[action.stage].activation_bytes if forward else costs[target].gradient_bytes
        receiver = spans[Action(target, action.kind, action.microbatch)].device
        transfers.append(
            Transfer(
                action=action,
                source=span.device,
                target=receiver,
                num_bytes=num_bytes,
                start_s=span.end_s,
                end_s=span.end_s + _transfer_s(action, costs),
            )
        )
    return tuple(transfers)


def _optimizer_spans(
    schedule: Schedule, spans: dict[Action, Span], duration_s: Callable[[Action], float]
) -> tuple[Span, ...]:
    """After its last backward each device updates the weights of its stages, one stage after the other."""
    return tuple(
        Span(device=device, action=update, start_s=start_s, end_s=end_s)
        for device, order in enumerate(schedule.orders)
        for update, start_s, end_s in _updates(order, spans[order[-1]].end_s, duration_s)
    )
