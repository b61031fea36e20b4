"""The loss of a micro-batch, and what it must be for those of all, each by its weight, to add up to the mini-batch's.

A mean over the samples counts by the micro-batch's share of them, a sum as it is. Which of the two a loss is, the plan
says; one that is clearly the other kind would give gradients that are wrong by a factor, so the first micro-batch is
looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gplan.errors import ModelError, UsageError
from gplan.execute.batches import rows_of
from gplan.nouns import LossReduction
from profiler.model.data import rounding_of

Loss = Callable[[Any, Any], Tensor]
"""(the model's output, the target) of a micro-batch -> scalar, a mean or a sum over its samples."""


def checked_loss(loss: Any, *, trains: bool) -> Tensor:
    """A loss that is a scalar tensor and, where it `trains`, has a gradient; raises ModelError for anything else."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ModelError(f"the loss gave {found}; expected a scalar tensor, such as that of .mean()")
    if trains and not (loss.requires_grad and loss.is_floating_point()):
        raise ModelError(
            f"the loss gave a {loss.dtype} tensor that has no gradient; expected one computed from the model's output "
            "without detach(), item(), argmax() or no_grad()"
        )
    return loss


def check_reduction(loss: Loss, output: Any, target: Any, *, num_rows: int, expected: LossReduction) -> None:
    """Raise UsageError for a loss that is a sum where a mean is expected, or the other way round.

    It is evaluated for `num_rows` samples and for both halves of them. One that is neither, that the samples do not
    change, or that takes no other outputs is let pass: the profile says more of these.
    """
    if num_rows < 2:
        return
    half = num_rows // 2
    parts = (slice(0, half), slice(half, num_rows))
    try:
        with torch.no_grad():
            of_all = loss(output, target).detach()  # one that the model computed itself has its graph
            first, second = (
                float(loss(rows_of(output, x, num_rows), rows_of(target, x, num_rows)).detach()) for x in parts
            )
    except Exception:  # it takes the model's own outputs only, or these many samples
        return
    whole, tolerance = float(of_all), rounding_of(of_all)
    mean, total = (half * first + (num_rows - half) * second) / num_rows, first + second
    fits = {name: abs(x - whole) <= tolerance * abs(whole) + 1e-6 for name, x in (("mean", mean), ("sum", total))}
    if fits[expected] or not any(fits.values()) or abs(first - second) <= tolerance * abs(second):
        return
    found = next(name for name, does in fits.items() if does)
    raise UsageError(
        f"the loss is a {found} over the samples ({whole:.6g} for {num_rows}, {first:.6g} and {second:.6g} for both halves); "
        f"the plan is for a {expected}: pass the loss to gplan.profile too, with batches, or loss_reduction={found!r}, and "
        "balance again"
    )
