"""Schedules to try laws on, stages to simulate them with, and counts of what is in flight."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from gplan.core import Action, ActionKind, Schedule, StageCost
from gplan.schedules.registry import SCHEDULES, make_schedule

NAMES = tuple(
    name
    for word, rule in SCHEDULES.items()
    for name in ([f"{word}:{number}" for number in range(1, 5)] if rule.number else [word])
)
"""Every schedule of the registry, those with a number after their name with 1 to 4."""
num_devices = st.integers(1, 8)
num_microbatches = st.integers(1, 32)
num_chunks = st.integers(1, 4)
schedules = st.builds(
    lambda name, k, m: make_schedule(name, num_devices=k, num_microbatches=m),
    st.sampled_from(NAMES), num_devices, num_microbatches,
)  # fmt: skip
FORWARD, BACKWARD, INPUT, WEIGHT = (ActionKind(letter) for letter in "FBIW")


def cost(
    forward_s: float = 1.0,
    input_s: float = 1.0,
    weight_s: float = 1.0,
    *,
    hop_s: float = 0.0,
    recompute_s: float = 0.0,
    optimizer_s: float = 0.0,
) -> StageCost:
    """A stage whose backward takes as long as its halves, with a transfer as long in both directions."""
    return StageCost(
        forward_s=forward_s, backward_s=input_s + weight_s, recompute_s=recompute_s, optimizer_s=optimizer_s,
        activation_bytes=3, gradient_bytes=2, activation_s=hop_s, gradient_s=hop_s, input_gradient_s=input_s,
        weight_gradient_s=weight_s,
    )  # fmt: skip


def most_in_flight(schedule: Schedule, device: int, counts: Callable[[Action], bool] = lambda _: True) -> int:
    """The most pairs of micro-batch and chunk from F to the end of their backward, B or W, at any time."""
    level = peak = 0
    for action in filter(counts, schedule.orders[device]):
        level += {FORWARD: 1, INPUT: 0}.get(action.kind, -1)
        peak = max(peak, level)
    return peak
