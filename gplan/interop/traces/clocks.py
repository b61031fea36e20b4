"""One clock for the traces of several ranks.

Traces of one host share its clock; each file names its start (`baseTimeNanoseconds`). If a file names none, the hosts
differ, or an action would start before its input was ready, the offsets are estimated by causality: no action starts
before its input is ready. This bounds the offset of two ranks from both sides, because work goes back and forth; the
middle is used, which assumes that the fastest transfer takes equally long in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gplan.core import Action, ActionKind
from gplan.interop.traces.busy_times import Times
from gplan.interop.traces.reading import RankTrace
from gplan.interop.traces.steps import RankSteps, StepKey
from gplan.schedules.dependencies import dependencies_of

_TOLERANCE_US = 20.0  # an action may seem to start this much too early before the host's clock is rejected
_US_PER_NS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffsets:
    """The offsets to add to each rank's microseconds, and how they were found."""

    offsets_us: tuple[float, ...]
    description: str


def common_clock(traces: Sequence[RankTrace], ranks: Sequence[RankSteps], keys: Sequence[StepKey]) -> ClockOffsets:
    """The offsets that put all ranks on the clock of the first."""
    bases = [trace.base_ns for trace in traces]
    hosts = sorted({trace.host or "?" for trace in traces})
    if len(traces) == 1:
        return ClockOffsets(offsets_us=(0.0,), description="one rank, one clock")
    known = [0.0 if base is None else _US_PER_NS * (base - (bases[0] or 0)) for base in bases]
    early_us = max((-x for x in _slack_us(ranks, keys, known).values()), default=0.0)
    if None in bases:
        why = "a trace does not name the start of its clock"
    elif len(hosts) > 1:
        why = f"the ranks ran on {len(hosts)} hosts ({', '.join(hosts)})"
    elif early_us > _TOLERANCE_US:
        why = f"by the host's clock an action would start {early_us:.0f} us before its input is ready"
    else:
        return ClockOffsets(offsets_us=tuple(known), description="the clock of the host that all ranks ran on")
    description = f"{why}, so the clocks were aligned by causality: no action starts before its input is ready"
    return ClockOffsets(offsets_us=_by_causes(ranks, keys), description=description)


def _by_causes(ranks: Sequence[RankSteps], keys: Sequence[StepKey]) -> tuple[float, ...]:
    """Offsets in the middle of what causality allows, rank after rank from the first."""
    slack, known = _slack_us(ranks, keys, [0.0] * len(ranks)), {0: 0.0}
    while len(known) < len(ranks):
        there, here = next((b, a) for pair in slack for a, b in (pair, pair[::-1]) if a in known and b not in known)
        least, most = -slack.get((here, there), math.inf), slack.get((there, here), math.inf)
        bounds = [x for x in (least, most) if math.isfinite(x)]
        known[there] = known[here] + sum(bounds) / len(bounds)
    return tuple(known[i] for i in range(len(ranks)))


def _slack_us(
    ranks: Sequence[RankSteps], keys: Sequence[StepKey], offsets_us: Sequence[float]
) -> dict[tuple[int, int], float]:
    """By sender and receiver: the shortest time from the end of an action to the start of the one that depends on it.

    Below 0 the dependent action seems to start too early.
    """
    device = {action: i for i, rank in enumerate(ranks) for action in rank.actions}
    done = [action for action in device if action.kind is not ActionKind.OPTIMIZER]
    slack: dict[tuple[int, int], float] = {}
    for action, need in dependencies_of(done, 1 + max(x.stage for x in done)).items():
        pair = device[need], device[action]
        if pair[0] == pair[1]:
            continue
        for key in keys:
            left = _time(ranks, offsets_us, pair[1], key, action)[0] - _time(ranks, offsets_us, pair[0], key, need)[1]
            slack[pair] = min(left, slack.get(pair, math.inf))
    return slack


def _time(ranks: Sequence[RankSteps], offsets_us: Sequence[float], rank: int, key: StepKey, action: Action) -> Times:
    steps: Mapping[Action, Times] = ranks[rank].steps[key]
    return steps[action][0] + offsets_us[rank], steps[action][1] + offsets_us[rank]
