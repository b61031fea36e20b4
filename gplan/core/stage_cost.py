"""Seconds of a stage: of its passes, its update and what it sends; of one stage, or of many candidate stages at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from gplan.core.checks import check_amounts

Floats = NDArray[np.float64]
Seconds = TypeVar("Seconds", float, Floats)

_NOTHING: Any = 0.0  # seconds of either type


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds(Generic[Seconds]):
    """What a stage takes: passes and transfers for one micro-batch, the update once per step."""

    forward_s: Seconds
    backward_s: Seconds  # without recompute
    recompute_s: Seconds  # extra seconds of a backward that recomputes
    optimizer_s: Seconds  # once per step
    activation_s: Seconds  # transfer of the activations to the next stage
    gradient_s: Seconds  # transfer of their gradients back from it
    input_gradient_s: Seconds | None = None  # the halves of a split backward, without recompute; None: not known
    weight_gradient_s: Seconds | None = None
    is_tied: Seconds | None = None  # 1 where the update waits for another device with the same weight, else 0

    @property
    def present(self) -> dict[str, Seconds]:
        """What is known, by name: not the halves of a backward where there are none."""
        found: dict[str, Seconds | None] = {x.name: getattr(self, x.name) for x in fields(self)}
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    def take(self: StageSeconds[Floats], index: NDArray[Any] | slice) -> StageSeconds[Floats]:
        """The seconds of some of the candidates."""
        return StageSeconds(**{name: seconds[index] for name, seconds in self.present.items()})

    @classmethod
    def joined(cls, parts: Sequence[StageSeconds[Floats]]) -> StageSeconds[Floats]:
        """The seconds of the candidates of all parts, in their order."""
        return StageSeconds(**{x: np.concatenate([p.present[x] for p in parts]) for x in parts[0].present})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes(StageSeconds[Seconds]):
    """The same with what the engine and other devices take beside the stage's own work."""

    all_reduce_s: Seconds = _NOTHING  # once per step, before the update: gradients of tied weights and of replicas
    gap_s: Seconds = _NOTHING  # what the engine itself takes of the device after every action
    forward_sending_s: Seconds = _NOTHING  # for how much longer the device is kept by sending the activations on,
    backward_sending_s: Seconds = _NOTHING  # and by sending gradients to the stage before
    around_s: Seconds = _NOTHING  # once per step, of the first stage: what the engine takes before and after the loop

    @property
    def forward_gap_s(self) -> Seconds:
        """From the end of a forward until the device can begin its next action."""
        return self.gap_s + self.forward_sending_s

    @property
    def backward_gap_s(self) -> Seconds:
        """From the end of a backward, or of its first half, until the device can begin its next action."""
        return self.gap_s + self.backward_sending_s

    @property
    def before_update_s(self) -> Seconds:
        """From when the device can update (`when_updates_begin`), or from the update before, until the stage's update begins."""
        return self.all_reduce_s + self.around_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost(StageTimes[float]):
    """Seconds of one stage of a plan, and what crosses the cut to the next one (0 on the last stage)."""

    activation_bytes: int
    gradient_bytes: int

    def __post_init__(self) -> None:
        check_amounts(self)
