"""The statistics of a timeline: two devices, two micro-batches, stage 1 with its backward in halves.

device 0  0F0 0F1 . . . 0B0 0B1 0O0
device 1  .   1F0 1F1 1I0 1I1 1W0 1W1
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import BACKWARD_KINDS, Action, ActionKind, Span, Timeline, Transfer


def span(text: str, start_s: float, end_s: float) -> Span:
    kind = ActionKind(text[1])
    action = Action(int(text[0]), kind, int(text[2]))
    return Span(device=action.stage, action=action, start_s=start_s, end_s=end_s)


TIMELINE = Timeline(
    num_devices=2,
    num_microbatches=2,
    spans=(
        span("0F0", 0, 1), span("0F1", 1, 3), span("0B0", 6, 10), span("0B1", 10, 12), span("0O0", 12, 13),
        span("1F0", 1, 2), span("1F1", 3, 4), span("1I0", 4, 6), span("1I1", 6, 7), span("1W0", 7, 8), span("1W1", 8, 9),
    ),
    transfers=(
        Transfer(action=Action(0, ActionKind.FORWARD, 0), source=0, target=1, start_s=1, end_s=1.5, num_bytes=8),
        Transfer(action=Action(1, ActionKind.INPUT_GRADIENT, 0), source=1, target=0, start_s=6, end_s=7, num_bytes=8),
    ),
    origin="measured",
)  # fmt: skip


def test_stage_statistics() -> None:
    assert (TIMELINE.num_stages, TIMELINE.stages_by_device) == (2, ((0,), (1,)))
    assert TIMELINE.microbatch_s(*BACKWARD_KINDS, stage=1) == {0: 3.0, 1: 2.0}
    assert TIMELINE.total_s(ActionKind.FORWARD, stage=0) == 3.0
    assert TIMELINE.mean_s(*BACKWARD_KINDS, stage=1) == TIMELINE.median_s(*BACKWARD_KINDS, stage=1) == 2.5
    assert TIMELINE.mean_s(ActionKind.BACKWARD, stage=1) == 0.0
    assert TIMELINE.median_s(ActionKind.BACKWARD, stage=1) is None
    assert [TIMELINE.received_s(stage) for stage in range(2)] == [0.5, 0.25]


def test_device_statistics() -> None:
    assert [TIMELINE.busy_s(device) for device in range(2)] == [9.0, 7.0]
    assert [TIMELINE.update_s(device) for device in range(2)] == [1.0, 0.0]


@pytest.mark.parametrize(("recompute", "expected"), [("never", (3.0, 3.0)), ("except-last", (4.0, 2.0))])
def test_mean_durations_keep_recomputed_backwards_apart(recompute: str, expected: tuple[float, float]) -> None:
    means = TIMELINE.mean_durations(recompute)  # type: ignore[arg-type]
    assert tuple(means[Action(0, ActionKind.BACKWARD, m)] for m in range(2)) == expected
    assert {means[Action(1, ActionKind.WEIGHT_GRADIENT, m)] for m in range(2)} == {1.0}


def test_micro_batch_beyond_the_last() -> None:
    with pytest.raises(ValueError, match="spans name micro-batch 1; expected 0 to 0"):
        replace(TIMELINE, num_microbatches=1)
