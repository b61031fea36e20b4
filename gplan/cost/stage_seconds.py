"""The seconds for which a stage keeps its device, of one stage or of many candidate stages at once.

All arithmetic on a stage's times is written here once, for floats and for arrays [E] alike: what an action takes, with
and without the time that the engine takes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from gplan.core import Action, ActionKind, RecomputeMode, is_recomputed
from gplan.graph.down_sets import Bools, Floats, Ints

Seconds = TypeVar("Seconds", float, Floats)
Seconds_co = TypeVar("Seconds_co", float, Floats, covariant=True)


class PassTimes(Protocol[Seconds_co]):
    """Seconds of a stage's passes for one micro-batch; `StageCost` has them, and `StageSeconds`."""

    @property
    def forward_s(self) -> Seconds_co:
        """The forward."""
        ...

    @property
    def backward_s(self) -> Seconds_co:
        """The whole backward, without recompute."""
        ...

    @property
    def recompute_s(self) -> Seconds_co:
        """What recompute adds to the backward."""
        ...

    @property
    def optimizer_s(self) -> Seconds_co:
        """The update, once per step."""
        ...

    @property
    def input_gradient_s(self) -> Seconds_co | None:
        """The first half of a split backward."""
        ...

    @property
    def weight_gradient_s(self) -> Seconds_co | None:
        """The second half of a split backward."""
        ...


class StageTimes(PassTimes[Seconds_co], Protocol[Seconds_co]):
    """The times of `StageCost`: passes, transfers, and what the engine takes after each action."""

    @property
    def activation_s(self) -> Seconds_co:
        """From the end of sending activations until the next stage has them."""
        ...

    @property
    def gradient_s(self) -> Seconds_co:
        """From the end of sending gradients until this stage has them."""
        ...

    @property
    def gap_s(self) -> Seconds_co:
        """From the end of an action that sends nothing until the device can begin the next."""
        ...

    @property
    def forward_gap_s(self) -> Seconds_co:
        """From the end of a forward until the device can begin the next action."""
        ...

    @property
    def backward_gap_s(self) -> Seconds_co:
        """From the end of a backward, or of its first half, until the device can begin the next action."""
        ...

    @property
    def before_update_s(self) -> Seconds_co:
        """From the device's last action until the stage's update begins."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds(Generic[Seconds]):
    """Seconds for which a stage keeps its device, the engine's time after each action included."""

    forward_s: Seconds
    backward_s: Seconds
    recompute_s: Seconds
    optimizer_s: Seconds  # with what comes before the update
    activation_s: Seconds  # transfer to the next stage
    gradient_s: Seconds  # transfer from the next stage
    input_gradient_s: Seconds | None = None
    weight_gradient_s: Seconds | None = None

    def take(self: StageSeconds[Floats], index: Ints | Bools) -> StageSeconds[Floats]:
        """The seconds of some of the candidates."""
        return StageSeconds(**{name: seconds[index] for name, seconds in self.present.items()})

    @property
    def present(self) -> dict[str, Seconds]:
        """The seconds by name, without the halves of a backward where there are none."""
        found: dict[str, Seconds | None] = {x.name: getattr(self, x.name) for x in fields(self)}
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    @classmethod
    def joined(cls, parts: Sequence[StageSeconds[Floats]]) -> StageSeconds[Floats]:
        """The seconds of the candidates of all parts, in their order."""
        return StageSeconds(**{x: np.concatenate([p.present[x] for p in parts]) for x in parts[0].present})


def gaps(times: StageTimes[Seconds]) -> StageSeconds[Seconds]:
    """The seconds that the engine takes of the device after each action, and before the update."""
    nothing = 0.0 * times.gap_s
    return StageSeconds(
        forward_s=times.forward_gap_s,
        backward_s=times.backward_gap_s,
        recompute_s=nothing,
        optimizer_s=times.before_update_s,
        activation_s=nothing,
        gradient_s=nothing,
        input_gradient_s=times.backward_gap_s,
        weight_gradient_s=times.gap_s,
    )


def occupied(
    times: StageTimes[Seconds], *, halves: bool = True, recompute_s: Seconds | None = None
) -> StageSeconds[Seconds]:
    """The seconds for which each action keeps the device: what it takes and what the engine takes after it.

    Without `halves` those of a split backward are left out; `recompute_s` replaces that of recomputing whole stages.
    """
    after = gaps(times)
    first_s, second_s = (times.input_gradient_s, times.weight_gradient_s) if halves else (None, None)
    return StageSeconds(
        forward_s=times.forward_s + after.forward_s,
        backward_s=times.backward_s + after.backward_s,
        recompute_s=times.recompute_s if recompute_s is None else recompute_s,
        optimizer_s=times.optimizer_s + after.optimizer_s,
        activation_s=times.activation_s,
        gradient_s=times.gradient_s,
        input_gradient_s=None if first_s is None else first_s + after.backward_s,
        weight_gradient_s=None if second_s is None else second_s + times.gap_s,
    )


class ActionKey(NamedTuple):
    """What the duration of an action depends on."""

    stage: int
    kind: ActionKind
    recomputes: bool  # whether the backward of its micro-batch runs the forward again

    @classmethod
    def of(cls, action: Action, *, num_microbatches: int, recompute: RecomputeMode) -> ActionKey:
        """The key of an action of a step."""
        again = is_recomputed(action.microbatch, num_microbatches=num_microbatches, recompute=recompute)
        return cls(action.stage, action.kind, again)


def action_s(key: ActionKey, times: PassTimes[Seconds]) -> Seconds:
    """Seconds of one action with the times of its stage.

    The first stage needs no gradient of its input: of a split backward, all is in the second half there. Elsewhere a
    recompute belongs to the first half. Raises ValueError for half a backward where the halves are not known.
    """
    kind, is_first = key.kind, key.stage == 0
    if kind is ActionKind.FORWARD:
        return times.forward_s
    if kind is ActionKind.OPTIMIZER:
        return times.optimizer_s
    if kind is ActionKind.INPUT_GRADIENT and is_first:
        return 0.0 * times.backward_s
    if kind is ActionKind.BACKWARD or is_first:
        return times.backward_s + times.recompute_s if key.recomputes else times.backward_s
    first_s, second_s = times.input_gradient_s, times.weight_gradient_s
    if first_s is None or second_s is None:
        raise ValueError(f"{key.stage}{kind.value} is half a backward, and how long the halves take is not known")
    if kind is ActionKind.WEIGHT_GRADIENT:
        return second_s
    return first_s + times.recompute_s if key.recomputes else first_s
