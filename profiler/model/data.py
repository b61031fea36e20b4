"""A model file's data and its loss: micro-batches that are checked, and how the loss combines samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gplan.core import LossReduction
from gplan.core.errors import ModelError, UsageError
from profiler.capture.chain import Tensors, call_arguments, flat_tensors
from profiler.model.error_location import describe, failing_module, first_difference, first_not_finite
from profiler.model.load import ModelFile


def sample_batch(file: ModelFile, batch_size: int, *, device: str = "cpu") -> tuple[Any, Any]:
    """Inputs and target for one micro-batch; the target is None where the file gives no batches."""
    if file.has("batches"):
        inputs, target = next(file.batches(batch_size))
        check_batch(inputs, batch_size, what=f"the inputs that batches({batch_size}) of {file.name} gives")
        check_target(target, batch_size, what=f"the targets that batches({batch_size}) of {file.name} gives")
    else:
        inputs, target = file.example_inputs(batch_size), None
        check_batch(inputs, batch_size, what=f"the inputs that example_inputs({batch_size}) of {file.name} gives")
    moved: tuple[Any, Any] = pytree.tree_map_only(Tensor, lambda x: x.to(device), (inputs, target))
    return moved


def check_microbatch_sizes(sizes: Sequence[int]) -> None:
    """Raise UsageError unless there are sizes, at least 1 and rising."""
    if not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
        raise UsageError(f"micro-batch sizes are {sizes}; expected rising numbers of at least 1, such as 1,2,4")


def check_batch(value: Any, batch_size: int, *, what: str) -> Tensors:
    """The tensors of a batch, checked to have `batch_size` rows each."""
    tensors = flat_tensors(value, what=what)
    check_target(tensors, batch_size, what=what)
    return tensors


def check_target(value: Any, batch_size: int, *, what: str) -> None:
    """A target may be anything, None included; each tensor in it has `batch_size` rows."""
    for tensor in pytree.tree_leaves(value):
        if isinstance(tensor, Tensor) and (tensor.dim() == 0 or tensor.shape[0] != batch_size):
            raise ModelError(
                f"{what} have shape {tuple(tensor.shape)}; expected {batch_size} samples in dimension 0 (of a data set "
                "that does not divide, leave out the last, short batch)"
            )


def find_loss_reduction(
    file: ModelFile, batch_size: int, *, device: str = "cpu"
) -> tuple[LossReduction, tuple[str, ...]]:
    """Whether the loss is a mean or a sum over the samples, and what there is to say about the data and the loss.

    Found by evaluating a batch and its two parts, unless the file says it. Raises ModelError for a model that does not
    accept its inputs and for a loss that is neither, such as a mean over tokens that are not padding: its micro-batches
    would add up to something else.
    """
    batch_size = max(2, batch_size)
    inputs, target = sample_batch(file, batch_size, device=device)
    notes = _data_notes(file, batch_size)
    file.model.eval()
    try:
        with torch.no_grad():
            output = call_model(file, inputs)
            if not file.has_loss:
                return "mean", notes
            loss = file.loss(output, target)
            whole = float(loss)
            if file.loss_reduction is not None:
                return file.loss_reduction, notes
            parts = [float(file.loss(call_model(file, x), y)) for x, y in _two_parts(inputs, target, batch_size)]
            if not all(map(math.isfinite, (whole, *parts))):
                return "mean", (*notes, _not_finite_note(file, inputs, whole, parts))
            found = _reduction(whole, parts, batch_size, tolerance=loss_tolerance(loss))
            return (found or _refused(file, inputs, target, whole, parts)), notes
    finally:
        file.model.train()


def find_reduction_of_outputs(file: ModelFile, output: Any, target: Any, batch_size: int) -> LossReduction:
    """Whether the loss of a model that cannot be run is a mean or a sum, from made-up outputs.

    A mean where a single sample tells nothing, and where the loss is neither.
    """
    if file.loss_reduction is not None or not file.has_loss or batch_size < 2:
        return file.loss_reduction or "mean"
    with torch.no_grad():
        loss = file.loss(output, target)
        parts = [float(file.loss(x, y)) for x, y in _two_parts(output, target, batch_size)]
    return _reduction(float(loss), parts, batch_size, tolerance=loss_tolerance(loss)) or "mean"


def loss_tolerance(loss: Tensor) -> float:
    """The share by which two ways to add up a loss may differ; one of 16 bits has only 2 or 3 digits."""
    return max(1e-3, 2 * torch.finfo(loss.dtype).eps) if loss.is_floating_point() else 1e-3


def _reduction(whole: float, parts: list[float], batch_size: int, *, tolerance: float) -> LossReduction | None:
    share = (batch_size // 2) / batch_size
    mean, total = share * parts[0] + (1 - share) * parts[1], sum(parts)
    for combined, reduction in ((mean, "mean"), (total, "sum")):
        if abs(combined - whole) <= tolerance * abs(whole) + 1e-6:
            return cast(LossReduction, reduction)
    return None


def _refused(file: ModelFile, inputs: Any, target: Any, whole: float, parts: list[float]) -> LossReduction:
    """Says why the loss is neither a mean nor a sum: random numbers, or the loss itself."""
    again = float(file.loss(call_model(file, inputs), target))
    if again != whole:
        where = first_difference(file.model, lambda: call_model(file, inputs)) or "the loss"
        raise ModelError(
            f"the loss of {file.name} is {whole:.6g} and then {again:.6g} for the same batch in evaluation mode: {where} "
            'draws random numbers; let it do so in training only (self.training), or state loss_reduction = "mean" (or '
            '"sum") in the model file'
        )
    raise ModelError(
        f"the loss of {file.name} is {whole:.6g} for a batch, and {parts[0]:.6g} and {parts[1]:.6g} for the first and the "
        f"second part of it; expected their mean over the samples or {sum(parts):.6g} (a sum), so that micro-batches add "
        "up to the batch; weight every sample alike, and compute each independently of the others"
    )


def _not_finite_note(file: ModelFile, inputs: Any, whole: float, parts: list[float]) -> str:
    where = first_not_finite(file.model, lambda: call_model(file, inputs)) or "the loss"
    values = ", ".join(f"{x:.6g}" for x in (whole, *parts))
    return (
        f"the loss before any training is not finite ({values} for a batch and its two halves), first in {where}: look at "
        "its weights, its inputs and its dtype; times and bytes are measured all the same, and the loss is taken for a mean"
    )


def _data_notes(file: ModelFile, batch_size: int) -> tuple[str, ...]:
    """Data that differ from one reading to the next make profiles differ."""
    if not file.has("batches"):
        return ()
    state = torch.random.get_rng_state()
    first, second = (pytree.tree_leaves(next(file.batches(batch_size))) for _ in range(2))
    torch.random.set_rng_state(state)
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=False) if isinstance(a, Tensor))
    if same:
        return ()
    return (
        "batches gives other data each time it begins: costs that depend on the data may differ from profile to profile; "
        "draw them from a generator with a seed, torch.Generator().manual_seed(0)",
    )


def _two_parts(inputs: Any, target: Any, batch_size: int) -> list[tuple[Any, Any]]:
    """The first half of a batch, and the rest."""

    def rows(value: Any, part: slice) -> Any:
        return pytree.tree_map(lambda x: x[part] if isinstance(x, Tensor) else x, value)

    cuts = (slice(0, batch_size // 2), slice(batch_size // 2, batch_size))
    return [(rows(inputs, cut), rows(target, cut)) for cut in cuts]


def call_model(file: ModelFile, inputs: Any) -> Any:
    """The model's output; a ModelError that names the inputs and the layer where it fails."""
    args, kwargs = call_arguments(inputs)
    try:
        return file.model(*args, **kwargs)
    except Exception as error:
        shapes = ", ".join(
            f"{tuple(x.shape)} {x.dtype}".replace("torch.", "") for x in flat_tensors(inputs, what="inputs")
        )
        where = failing_module(file.model, error)
        raise ModelError(f"the model fails on its inputs, {shapes}; in {where}: {describe(error)}") from error
