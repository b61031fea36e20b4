"""The seconds for which a stage keeps its device, of one stage or of many candidate stages at once.

What an action takes, for floats and for arrays [E] alike, with and without the engine's time after it.
"""

from __future__ import annotations

from typing import NamedTuple

from gplan.core import Action, ActionKind, RecomputeMode, Seconds, StageSeconds, StageTimes, is_recomputed


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


def occupied(times: StageTimes[Seconds]) -> StageSeconds[Seconds]:
    """The seconds for which each action keeps the device: what it takes and what the engine takes after it."""
    after, first_s, second_s = gaps(times), times.input_gradient_s, times.weight_gradient_s
    return StageSeconds(
        forward_s=times.forward_s + after.forward_s,
        backward_s=times.backward_s + after.backward_s,
        recompute_s=times.recompute_s,
        optimizer_s=times.optimizer_s + after.optimizer_s,
        activation_s=times.activation_s,
        gradient_s=times.gradient_s,
        input_gradient_s=None if first_s is None else first_s + after.backward_s,
        weight_gradient_s=None if second_s is None else second_s + times.gap_s,
        is_tied=times.is_tied,
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


def action_s(key: ActionKey, times: StageSeconds[Seconds]) -> Seconds:
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
