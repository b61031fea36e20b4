"""Loss and gradients of the plain model for one mini-batch, which a pipeline must reproduce.

A model whose loss depends on how the mini-batch is divided runs micro-batch by micro-batch here too: batch norm has the
statistics of a micro-batch, a router's auxiliary loss is one of a micro-batch, and a router's bias that the forward
changes routes the next micro-batch. Any other model runs on the whole mini-batch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from gplan.core import GradientCheck, Plan
from gplan.core.errors import UsageError
from gplan.runtime.microbatches import take_rows
from profiler.capture.chain import model_state_restored
from profiler.model.load import ModelFile

TOLERANCE = 1e-5  # of float32 and finer numbers
_ROUNDINGS = 8.0  # epsilons of coarser numbers, plus 2 sqrt(micro-batches), as every sum of gradients is rounded
_SMALLEST_SCALE = 1e-3  # of the model's largest gradient; see gradient_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Loss and gradients of the plain model, by parameter name."""

    loss: float
    gradients: Mapping[str, Tensor]
    how: str
    tolerance: float


def plain_reference(file: ModelFile, plan: Plan, inputs: Any, target: Any) -> Reference:
    """Run the plain model on the mini-batch; the model is not changed.

    Raises UsageError for a model that draws random numbers, as no other run can match its gradients.
    """
    reason = _why_by_microbatch(file, plan, inputs, target)
    order = range(plan.num_replicas * plan.num_microbatches if reason else 1)
    with model_state_restored(file.model):
        torch.manual_seed(1)
        loss = accumulate_gradients(file, plan, inputs, target, order)
        gradients = {n: as_dense(p.grad).clone() for n, p in file.model.named_parameters() if p.grad is not None}
    with model_state_restored(file.model):
        torch.manual_seed(2)
        again = accumulate_gradients(file, plan, inputs, target, order)
    coarsest = max((torch.finfo(x.dtype).eps for x in gradients.values()), default=0.0)
    roundings = _ROUNDINGS + 2.0 * math.sqrt(plan.num_replicas * plan.num_microbatches)
    tolerance = roundings * coarsest if coarsest > torch.finfo(torch.float32).eps else TOLERANCE
    if abs(again - loss) > TOLERANCE * max(abs(loss), 1e-12):
        raise UsageError(
            f"the model draws random numbers: two runs on the same batch gave losses {loss:.6g} and {again:.6g}; "
            "--check compares with the plain model and needs dropout off, such as --set dropout=0 where the file has that "
            "setting"
        )
    how = f"micro-batch by micro-batch ({reason})" if reason else "the mini-batch in one piece"
    return Reference(loss=loss, gradients=gradients, how=how, tolerance=tolerance)


def _why_by_microbatch(file: ModelFile, plan: Plan, inputs: Any, target: Any) -> str | None:
    """Why the loss or its gradients depend on how the mini-batch is divided; None where they do not."""
    if file.precision.compute == "bfloat16":
        return "sums in bfloat16 are rounded"
    if any(isinstance(module, _BatchNorm) for module in file.model.modules()):
        return "batch norm"
    losses: list[Tensor] = []
    for num_parts in (1, plan.num_replicas * plan.num_microbatches):
        with model_state_restored(file.model), torch.no_grad():
            torch.manual_seed(1)
            losses.append(torch.stack(list(_losses(file, plan, inputs, target, range(num_parts)))).sum())
    whole, divided = (float(x) for x in losses)
    rounding = _ROUNDINGS * torch.finfo(losses[0].dtype).eps
    is_same = abs(divided - whole) <= rounding * abs(whole)
    return None if is_same else f"whose losses combine to {divided:.6g}, where that of the whole is {whole:.6g}"


def as_dense(gradient: Tensor) -> Tensor:
    """Return the gradient as a dense tensor."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def gradient_errors(reference: Reference, found: Mapping[str, Tensor]) -> dict[str, float]:
    """Return each gradient's largest absolute difference from the plain model's, by parameter name.

    Relative to the largest entry of the plain gradient, or to a thousandth of the model's largest if that is more,
    as a gradient that is zero up to rounding has no scale of its own.
    """
    largest = max((float(x.abs().max()) for x in reference.gradients.values()), default=0.0)
    errors = {}
    for name, gradient in found.items():
        plain = reference.gradients.get(name, torch.zeros_like(gradient))
        scale = max(float(plain.abs().max()), _SMALLEST_SCALE * largest, 1e-30)
        error = float((gradient - plain).abs().max()) / scale
        errors[name] = error if math.isfinite(error) else sys.float_info.max
    return errors


def gradient_check(reference: Reference, errors: Mapping[str, float], loss: float) -> GradientCheck:
    """Return the result over all stages; a gradient that only the plain model has is an error of 100 %."""
    everything = {name: errors.get(name, 1.0) for name in {**reference.gradients, **errors}}
    worst = max(everything, key=everything.__getitem__, default="")
    return GradientCheck(
        max_relative_error=everything.get(worst, 0.0),
        worst_parameter=worst,
        loss=loss,
        plain_loss=reference.loss,
        num_parameters=len(everything),
        tolerance=reference.tolerance,
        reference=reference.how,
    )


def accumulate_gradients(file: ModelFile, plan: Plan, inputs: Any, target: Any, order: Sequence[int]) -> float:
    """Accumulate the gradients of the parts of a mini-batch, in this order; return its loss."""
    total = 0.0
    for loss in _losses(file, plan, inputs, target, order):
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def _losses(file: ModelFile, plan: Plan, inputs: Any, target: Any, order: Sequence[int]) -> Iterator[Tensor]:
    """The share of each part of a mini-batch in its loss."""
    scale = 1.0 / len(order) if plan.loss_reduction == "mean" else 1.0
    num_rows, size = plan.batch_size, plan.batch_size // len(order)
    for part in order:
        rows = slice(part * size, (part + 1) * size)
        yield file.loss(file.forward(take_rows(inputs, rows, num_rows)), take_rows(target, rows, num_rows)) * scale
