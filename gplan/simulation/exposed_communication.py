"""The part of each transfer that its receiver waited for, in a measured step.

If the receiver was idle when the sender finished, its whole wait until its next action is exposed. If it was still busy,
its wait counts from the end of its own action, for at most the rest of the planned transfer; what is left is engine time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from gplan.core import Action, ActionKind, Plan, Span, Transfer
from gplan.schedules.dependencies import dependencies_of
from gplan.simulation.simulator import gap_s, sent_bytes, transfer_s


def exposed_transfers(
    spans: Sequence[Span],
    *,
    num_bytes: Callable[[Action], int] = lambda _: 0,
    hop_s: Callable[[Action], float] = lambda _: 0.0,
) -> tuple[Transfer, ...]:
    """By the spans of all devices, ordered by device and start; of what an action sends, its bytes, and the seconds
    from the action's end until the neighbour should have it."""
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
    """The same in a step of the plan, with what crosses its cuts."""
    costs = plan.stage_costs

    def hop_s(action: Action) -> float:
        return gap_s(action, costs[action.stage]) + transfer_s(action, costs)

    return exposed_transfers(spans, num_bytes=lambda action: sent_bytes(action, costs), hop_s=hop_s)
