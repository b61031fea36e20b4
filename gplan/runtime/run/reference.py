"""Loss and gradients of the plain model for one mini-batch, which a pipeline must reproduce.

Where the result depends on how the mini-batch is divided, the plain model runs micro-batch by micro-batch here too: batch
norm has the statistics of a micro-batch, class weights are divided by their sum over a micro-batch, a router's auxiliary
loss is one of a micro-batch, and a router's bias that the forward changes routes the next micro-batch. The check also
reports how far the mini-batch in one piece differs. Any other model runs on the whole mini-batch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gplan.core import GradientCheck, Plan, WholeBatch
from gplan.core.errors import GplanError, ModelError, UsageError
from gplan.core.units import counted, some_names
from gplan.runtime.agreement import digest
from gplan.runtime.microbatches import take_rows
from gplan.runtime.sharded_tensors import full_tensor
from gplan_profiler.capture.chain import model_state_restored
from gplan_profiler.model.compiled import uncompiled
from gplan_profiler.model.data import CoarsestNumbers, draws_random_numbers, first_not_finite
from gplan_profiler.model.error_location import describe
from gplan_profiler.model.lazy_build import random_state_kept, seed_everything
from gplan_profiler.model.load import ModelFile
from gplan_profiler.torch_compat import BatchNorm

TOLERANCE = 1e-5  # of float32 numbers
_FINEST_TOLERANCE = 1e-10  # of float64 numbers
_ROUNDINGS = 8.0  # epsilons of coarser numbers, plus 2 sqrt(micro-batches), as every sum of gradients is rounded
_MOST_ROUNDING = 1e-3  # relative, of gradients that are sums of much larger numbers
_SMALLEST_SCALE = 1e-3  # of the model's largest gradient; see gradient_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Loss and gradients of the plain model, by parameter name."""

    loss: float
    gradients: Mapping[str, Tensor]
    epsilon: float  # of the coarsest numbers that were computed
    num_microbatches: int  # of a pipeline that is compared
    whole_batch: WholeBatch | None = None  # see GradientCheck
    weights: Mapping[str, tuple[torch.dtype, int]] = field(default_factory=dict)  # dtype and digest of each parameter

    @property
    def tolerance(self) -> float:
        """By how much the gradients of a pipeline may differ, relative."""
        if self.epsilon > torch.finfo(torch.float32).eps:
            return (_ROUNDINGS + 2.0 * math.sqrt(self.num_microbatches)) * self.epsilon
        return _FINEST_TOLERANCE if self.epsilon <= torch.finfo(torch.float64).eps else TOLERANCE

    def check_weights(self, parameters: Mapping[str, Tensor], model: str) -> None:
        """Raise ModelError if the parameters of a pipeline differ before the first step: its model was built again."""
        common = [x for x in self.weights if x in parameters]
        odd = [x for x in common if self.weights[x] != _weight_digest(parameters[x], self.weights[x][0])]
        if odd:
            raise ModelError(
                f"two builds of {model} from one seed have different weights ({some_names(odd)}), so --check cannot compare "
                "them; gplan seeds torch, random and numpy.random before each build: draw them "
                "from these, or from a generator with a fixed seed that is made within the function that builds the model, "
                "such as numpy.random.default_rng(0); torch.empty draws nothing and needs an initialization"
            )


def _weight_digest(tensor: Tensor, dtype: torch.dtype) -> tuple[torch.dtype, int]:
    return dtype, digest(full_tensor(tensor.detach()).to(dtype))


@uncompiled()
def plain_reference(file: ModelFile, plan: Plan, inputs: Any, target: Any) -> Reference:
    """Run the plain model on the mini-batch; the model is not changed.

    Raises UsageError for a model that draws random numbers, as no other run can match its gradients, and ModelError for
    a loss or gradients that are not finite.
    """
    num_parts = plan.num_replicas * plan.num_microbatches
    weights = {name: _weight_digest(x, x.dtype) for name, x in file.model.named_parameters()}
    divided = _plain_run(file, plan, inputs, target, num_parts=num_parts, seed=1)
    _check_finite(divided, file, inputs)
    try:
        whole = _plain_run(file, plan, inputs, target, num_parts=1, seed=2)
    except GplanError:
        raise
    except Exception as error:
        raise UsageError(
            f"--check runs the plain model on the whole mini-batch of {counted(plan.batch_size, 'sample')} too, which fails: "
            f"{describe(error)}; run without --check"
        ) from error
    worst, apart = _largest_error(gradient_errors(whole.gradients, divided.gradients))
    reason = _why_by_microbatch(file, divided, whole, apart)
    if reason is None:
        return replace(whole, weights=weights)
    in_one_piece = WholeBatch(loss=whole.loss, max_relative_error=apart, worst_parameter=worst, reason=reason)
    del whole  # its gradients
    again = _plain_run(file, plan, inputs, target, num_parts=num_parts, seed=2)
    random = _difference(divided, again)
    if random is not None:
        with _as_trained(file.model):
            where = draws_random_numbers(file, inputs)
        raise UsageError(
            f"{where}: two runs on the same batch gave {random}; --check compares with the plain model, which needs this off: "
            "for dropout profile again, with --set dropout=0 where the file has that setting, and balance"
        )
    return replace(divided, weights=weights, whole_batch=in_one_piece)


def _check_finite(run: Reference, file: ModelFile, inputs: Any) -> None:
    if not math.isfinite(run.loss):
        with random_state_kept(), model_state_restored(file.model), torch.no_grad():
            seed_everything(1)
            module = first_not_finite(file.model, lambda: file.forward(inputs))
        where = "the loss function, as every output is finite" if module is None else f"the output of {module}"
        raise ModelError(
            f"--check cannot compare: the plain model's loss is {run.loss:g} in the first step, not finite, beginning with "
            f"{where}; look at its weights and data"
        )
    odd = [name for name, x in run.gradients.items() if not bool(x.isfinite().all())]
    if odd:
        raise ModelError(
            f"--check cannot compare: the plain model's gradients of {some_names(odd)} are not finite in the first step, its "
            f"loss is {run.loss:g}; look for a derivative that is infinite, such as that of sqrt(0)"
        )


def _why_by_microbatch(file: ModelFile, divided: Reference, whole: Reference, apart: float) -> str | None:
    """Why the whole mini-batch has other results, or may have by design; None where it has the same.

    `apart` is the largest relative error of its gradients.
    """
    if divided.epsilon > torch.finfo(torch.float32).eps:
        return "the rounding of 16-bit numbers"
    if any(isinstance(x, BatchNorm) for x in file.model.modules()):
        return "batch norm, or a loss that depends on how the mini-batch is divided"
    if _difference(divided, whole) is None:
        return None
    if _have_same_loss(divided, whole) and apart <= _MOST_ROUNDING:
        return "rounding, as the loss is the same"
    return (
        "a loss or buffers that depend on how the mini-batch is divided (a contrastive loss takes its negatives from the "
        "micro-batch only)"
    )


def _difference(one: Reference, other: Reference) -> str | None:
    """What differs between two runs by more than rounding; None if nothing does."""
    if not _have_same_loss(one, other):
        return f"losses {one.loss:.6g} and {other.loss:.6g}"
    worst, error = _largest_error(gradient_errors(one.gradients, other.gradients))
    return f"gradients of {worst} that are {error:.1e} apart" if error > one.tolerance else None


def _have_same_loss(one: Reference, other: Reference) -> bool:
    """Whether two runs have the same loss, but for rounding."""
    return abs(other.loss - one.loss) <= _ROUNDINGS * one.epsilon * abs(one.loss)


def _largest_error(errors: Mapping[str, float]) -> tuple[str, float]:
    """The parameter with the largest error, and the error."""
    worst = max(errors, key=errors.__getitem__, default="")
    return worst, errors.get(worst, 0.0)


def as_dense(gradient: Tensor) -> Tensor:
    """Return the gradient as a dense tensor."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def gradient_errors(plain: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, float]:
    """Return each gradient's largest absolute difference from the plain model's, by parameter name.

    An error is relative to the largest entry of all plain gradients of the parameter's module, or to a thousandth of the
    model's largest entry if that is more. A bias before a batch norm has a gradient that is zero up to rounding and thus no
    scale of its own; the weight beside it has. An error below that scale's tolerance passes.
    """
    scales = dict[str, float]()
    for name, gradient in plain.items():
        module = name.rpartition(".")[0]
        scales[module] = max(scales.get(module, 0.0), _largest(gradient))
    least = max(_SMALLEST_SCALE * max(scales.values(), default=0.0), 1e-30)
    errors = {}
    for name, gradient in found.items():
        expected = plain.get(name, torch.zeros_like(gradient))
        error = _largest(gradient - expected) / max(scales.get(name.rpartition(".")[0], 0.0), least)
        errors[name] = error if math.isfinite(error) else sys.float_info.max
    return errors


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def gradient_check(reference: Reference, errors: Mapping[str, float], loss: float) -> GradientCheck:
    """Return the result over all stages; a gradient that only the plain model has is an error of 100 %."""
    everything = {name: errors.get(name, 1.0) for name in {**reference.gradients, **errors}}
    worst, error = _largest_error(everything)
    return GradientCheck(
        max_relative_error=error,
        worst_parameter=worst,
        loss=loss,
        plain_loss=reference.loss,
        num_parameters=len(everything),
        tolerance=reference.tolerance,
        whole_batch=reference.whole_batch,
    )


@contextmanager
def _as_trained(model: nn.Module) -> Iterator[None]:
    """The model in the mode of the stages, restored at the end: training, but for parts of a training model that are not."""
    with model_state_restored(model):
        if not model.training:
            model.train()
        yield


def _plain_run(file: ModelFile, plan: Plan, inputs: Any, target: Any, *, num_parts: int, seed: int) -> Reference:
    """One forward and backward of each part of a mini-batch."""
    with random_state_kept(), _as_trained(file.model), CoarsestNumbers() as numbers:
        seed_everything(seed)
        loss = accumulate_gradients(file, plan, inputs, target, range(num_parts))
        gradients = {n: as_dense(p.grad).clone() for n, p in file.model.named_parameters() if p.grad is not None}
    num = plan.num_replicas * plan.num_microbatches
    return Reference(loss=loss, gradients=gradients, epsilon=numbers.epsilon, num_microbatches=num)


def accumulate_gradients(file: ModelFile, plan: Plan, inputs: Any, target: Any, order: Sequence[int]) -> float:
    """Accumulate the gradients of the parts of a mini-batch, in this order; return its loss."""
    total, scale = 0.0, 1.0 / len(order) if plan.loss_reduction == "mean" else 1.0
    num_rows, size = plan.batch_size, plan.batch_size // len(order)
    for part in order:
        rows = slice(part * size, (part + 1) * size)
        loss = file.loss(file.forward(take_rows(inputs, rows, num_rows)), take_rows(target, rows, num_rows)) * scale
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total
