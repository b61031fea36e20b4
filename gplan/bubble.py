"""The bubble, piece by piece: why each device waited. Works on predicted and measured timelines alike.

Within the micro-batch loop a device's idle time is
  warm-up        before its first action, and before its first backward, while the pipeline fills
  drain          after its last action, and between two backwards that some device separates by a forward (1F1B's end)
  communication  the part of a wait during which the awaited input was in transfer
  imbalance      every other wait: the neighbour was slower
The pieces of a device add up to its idle time exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from gplan.nouns import Action, ActionKind, Idle, IdleCause, Span, Timeline
from gplan.schedules import needs_of

_SHORTEST_S = 1e-12  # differences below this are rounding


def idle_pieces(timeline: Timeline) -> tuple[Idle, ...]:
    """Every idle piece of the micro-batch loop, by device, then by time."""
    pieces = [piece for device in range(timeline.num_devices) for piece in _device_pieces(timeline, device)]
    return tuple(piece for piece in pieces if piece.duration_s > _SHORTEST_S)


def idle_by_cause(timeline: Timeline) -> dict[IdleCause, float]:
    """Seconds of idle device time for each cause, all devices together."""
    pieces = idle_pieces(timeline)
    return {cause: sum(x.duration_s for x in pieces if x.cause is cause) for cause in IdleCause}


def _device_pieces(timeline: Timeline, device: int) -> Iterator[Idle]:
    spans = [span for span in timeline.loop_spans if span.device == device]
    first_backward = next(span for span in spans if span.action.kind is ActionKind.BACKWARD)
    arrivals, waves = _arrivals(timeline), _waves(timeline)
    yield Idle(device=device, cause=IdleCause.WARM_UP, start_s=timeline.loop_start_s, end_s=spans[0].start_s)
    for before, after in pairwise(spans):
        if after is first_backward:
            cause = IdleCause.WARM_UP
        elif after.action.kind is before.action.kind is ActionKind.BACKWARD and _is_separated(
            before.action.microbatch, after.action.microbatch, waves
        ):
            cause = IdleCause.DRAIN
        else:
            cause = IdleCause.IMBALANCE
        yield from _split_off_transfer(cause, before, after, arrivals.get(after.action))
    yield Idle(device=device, cause=IdleCause.DRAIN, start_s=spans[-1].end_s, end_s=timeline.loop_end_s)


def _waves(timeline: Timeline) -> list[dict[int, int]]:
    """For each device and micro-batch, how many forwards the device runs before that micro-batch's backward."""
    waves: list[dict[int, int]] = [{} for _ in range(timeline.num_devices)]
    num_forwards = [0] * timeline.num_devices
    for span in timeline.loop_spans:
        if span.action.kind is ActionKind.FORWARD:
            num_forwards[span.device] += 1
        else:
            waves[span.device][span.action.microbatch] = num_forwards[span.device]
    return waves


def _is_separated(one: int, other: int, waves: list[dict[int, int]]) -> bool:
    """Whether some device runs a forward between the backwards of two micro-batches."""
    return any(wave[one] != wave[other] for wave in waves)


def _arrivals(timeline: Timeline) -> dict[Action, tuple[float, float]]:
    """For each action that awaits a transfer, when that transfer began and ended."""
    sent = {transfer.action: (transfer.start_s, transfer.end_s) for transfer in timeline.transfers}
    num_stages = 1 + max(span.action.stage for span in timeline.loop_spans)
    needs = needs_of([span.action for span in timeline.loop_spans], num_stages)
    return {action: sent[needed] for action, needed in needs.items() if needed in sent}


def _split_off_transfer(
    cause: IdleCause, before: Span, after: Span, arrival: tuple[float, float] | None
) -> Iterator[Idle]:
    """The wait between two spans, cut where the transfer that ends it begins and ends."""
    start_s, end_s = before.end_s, max(before.end_s, after.start_s)
    first_s, last_s = (min(max(moment, start_s), end_s) for moment in arrival or (end_s, end_s))
    yield Idle(device=before.device, cause=cause, start_s=start_s, end_s=first_s)
    yield Idle(device=before.device, cause=IdleCause.COMMUNICATION, start_s=first_s, end_s=last_s)
    yield Idle(device=before.device, cause=cause, start_s=last_s, end_s=end_s)
