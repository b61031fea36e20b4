"""A model file's data and its loss: micro-batches that are checked, and how the loss combines samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from gplan.core import LossReduction
from gplan.core.errors import ModelError, UsageError
from gplan_profiler.capture.chain import flat_tensors, modules_that_train
from gplan_profiler.capture.python_state import changed_state_refused
from gplan_profiler.memory.allocations import tensors_in
from gplan_profiler.model.error_location import describe, objects_running, own_gradients_text
from gplan_profiler.model.load import ModelFile
from gplan_profiler.model.random_draws import is_random, line_of_first_draw
from gplan_profiler.torch_compat import TorchDispatchMode, pytree

_NUM_LOSS_BATCHES = 4  # that show how a loss combines samples
_MOST_REPEATS = 5  # of a forward that may be random now and then
_ROUNDINGS = 16.0  # epsilons by which the losses of a batch and of its parts may differ


def sample_batch(file: ModelFile, batch_size: int, *, device: str = "cpu") -> tuple[Any, Any]:
    """Inputs and target for one micro-batch; the target is None if the file defines no batches."""
    return next(sample_batches(file, batch_size, device=device))


def sample_batches(file: ModelFile, batch_size: int, *, device: str = "cpu") -> Iterator[tuple[Any, Any]]:
    """Inputs and targets of the file's batches, or one example without a target if it defines none."""
    if file.has("batches"):
        found, source = file.batches(batch_size), "batches"
    else:
        found, source = iter([(file.example_inputs(batch_size), None)]), "example_inputs"
    for inputs, target in found:
        check_batch(inputs, batch_size, what=f"the inputs of {source}({batch_size}) in {file.name}")
        check_target(target, batch_size, what=f"the targets of {source}({batch_size}) in {file.name}")
        yield pytree.tree_map_only(Tensor, lambda x: x.to(device), (inputs, target))


def check_microbatch_sizes(sizes: Sequence[int]) -> None:
    """Raise UsageError unless there are sizes, at least 1 and increasing."""
    if not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
        raise UsageError(f"micro-batch sizes are {sizes}; expected increasing numbers of at least 1, such as 1,2,4")


def check_batch(value: Any, batch_size: int, *, what: str) -> None:
    """Raise ModelError unless a batch has tensors, with `batch_size` rows each."""
    check_target(flat_tensors(value, what=what), batch_size, what=what)


def check_target(value: Any, batch_size: int, *, what: str) -> None:
    """Raise ModelError unless each tensor in a target, which may be anything, has `batch_size` rows."""
    for tensor in tensors_in(value):
        if tensor.dim() == 0 or tensor.shape[0] != batch_size:
            shape = tuple(tensor.shape)
            remedy = "drop the last batch of a data set if it is shorter"
            if shape and shape[0] > batch_size:
                rows = shape[0] // batch_size
                remedy = (
                    f"where a sample has several rows, as a graph has nodes and edges, pad all samples to one size, such as "
                    f"{(batch_size, rows, *shape[1:])}, and let the model join them with x.flatten(0, 1)"
                )
            elif len(shape) > 1:
                remedy += ", or transpose a tensor whose samples are in another dimension, such as the edges of graphs"
            raise ModelError(f"{what} have shape {shape}; expected {batch_size} samples in dimension 0: {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """How a loss combines samples."""

    reduction: LossReduction
    notes: tuple[str, ...] = ()
    plan_notes: tuple[str, ...] = ()  # for the plans that are made with it


def find_loss_reduction(file: ModelFile, batch_size: int, *, device: str = "cpu") -> LossFacts:
    """Whether the loss is a mean or a sum over the samples, stated by the file or found from a batch and its two parts.

    Several batches count, as one of them may happen to have no padding. Raises ModelError for a model that does not accept
    its inputs, and for a loss that is neither, such as a mean over tokens without padding: the losses of micro-batches
    would not add up to that of the batch.
    """
    batch_size = max(2, batch_size)
    batches = islice(sample_batches(file, batch_size, device=device), _NUM_LOSS_BATCHES)
    inputs, target = next(batches)
    versions = [x._version for x in file.model.parameters()]
    training = modules_that_train(file.model)
    file.model.eval()
    try:
        with torch.no_grad(), CoarsestNumbers() as numbers:
            with changed_state_refused(file.functions.get("loss"), file.model):
                output = call_model(file, inputs)
            if not file.has_loss:
                return LossFacts(reduction="mean")
            loss = file.loss(output, target)
            whole = float(loss)
            found = file.loss_reduction
            try:
                parts = [float(file.loss(call_model(file, x), y)) for x, y in _two_parts(inputs, target, batch_size)]
            except Exception:
                if found is None:
                    raise
                return LossFacts(reduction=found)  # it takes batches of this size only
            if not all(map(math.isfinite, (whole, *parts))):
                if found is not None:
                    return LossFacts(reduction=found)
                where = first_not_finite(file.model, lambda: call_model(file, inputs)) or "the loss"
                values = ", ".join(f"{x:.6g}" for x in (whole, *parts))
                note = (
                    f"the loss before any training is not finite ({values} for a batch and its two halves), first in {where}: "
                    "check its weights, its inputs and its dtype; times and bytes are measured anyway, and the loss is "
                    "assumed to be a mean"
                )
                return LossFacts(reduction="mean", notes=(note,))
            fitting = fitting_reductions(whole, parts, batch_size, tolerance=loss_tolerance(loss))
            found = found or next(iter(fitting), None)
            if found is None:
                raise _not_reducible(file, inputs, target, whole, parts)
            if file.loss_reduction is None:
                for batch in batches:
                    _check_reduction(file, *batch, batch_size, found)
            joined = _combined(parts, batch_size)[found]
            is_same = abs(joined - whole) <= _ROUNDINGS * numbers.epsilon * abs(whole)
            is_random = not is_same and float(file.loss(call_model(file, inputs), target)) != whole
            return LossFacts(
                reduction=found,
                plan_notes=()
                if is_same or is_random
                else (
                    f"the loss depends on how a mini-batch is divided ({whole:.6g} for a batch, {joined:.6g} as the {found} "
                    "of two halves): a step has the gradients of a plain loop over the same micro-batches",
                ),
            )
    finally:
        file.model.train()
        for module, trains in training.items():
            module.training = trains
        if versions != [x._version for x in file.model.parameters()]:
            with torch.no_grad():  # a model that changes its weights for evaluation changes them back
                call_model(file, inputs)


def _check_reduction(file: ModelFile, inputs: Any, target: Any, batch_size: int, found: LossReduction) -> None:
    """Raise ModelError where the loss of a further batch is not the mean, or sum, of those of its parts, as that of the
    first batch was."""
    loss = file.loss(call_model(file, inputs), target)
    parts = [float(file.loss(call_model(file, x), y)) for x, y in _two_parts(inputs, target, batch_size)]
    fitting = fitting_reductions(float(loss), parts, batch_size, tolerance=loss_tolerance(loss))
    if found not in fitting and all(map(math.isfinite, (float(loss), *parts))):
        raise _not_reducible(file, inputs, target, float(loss), parts)


def find_reduction_of_outputs(file: ModelFile, output: Any, target: Any, batch_size: int) -> LossReduction:
    """Whether the loss of a model that cannot be run is a mean or a sum, by random outputs.

    A mean for a single sample, and if the loss is neither.
    """
    if file.loss_reduction is not None or not file.has_loss or batch_size < 2:
        return file.loss_reduction or "mean"
    with torch.no_grad():
        loss = file.loss(output, target)
        parts = [float(file.loss(x, y)) for x, y in _two_parts(output, target, batch_size)]
    fitting = fitting_reductions(float(loss), parts, batch_size, tolerance=loss_tolerance(loss))
    return next(iter(fitting), "mean")


def loss_tolerance(loss: Tensor) -> float:
    """The relative difference allowed between two sums of a loss; 16-bit floats have only 2 or 3 digits."""
    return max(1e-3, 2 * torch.finfo(loss.dtype).eps) if loss.is_floating_point() else 1e-3


def fitting_reductions(whole: float, parts: list[float], batch_size: int, *, tolerance: float) -> list[LossReduction]:
    """How the losses of the two parts of a batch can combine to that of the batch."""
    return [x for x, y in _combined(parts, batch_size).items() if abs(y - whole) <= tolerance * abs(whole) + 1e-6]


def _combined(parts: list[float], batch_size: int) -> dict[LossReduction, float]:
    """The loss of a batch from those of its two parts."""
    share = (batch_size // 2) / batch_size
    return {"mean": share * parts[0] + (1 - share) * parts[1], "sum": sum(parts)}


class CoarsestNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the coarsest floating-point numbers that operations make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.epsilon = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for x in tensors_in(output):
            if x.is_floating_point() or x.is_complex():
                self.epsilon = max(self.epsilon, torch.finfo(x.dtype).eps)
        return output


def _not_reducible(file: ModelFile, inputs: Any, target: Any, whole: float, parts: list[float]) -> ModelError:
    """The error for a loss that is neither a mean nor a sum, or random."""
    repeated = (float(file.loss(call_model(file, inputs), target)) for _ in range(_MOST_REPEATS))
    again = next((x for x in repeated if x != whole), whole)
    if again != whole:
        where = draws_random_numbers(file, inputs)
        return ModelError(
            f"the loss of {file.name} is {whole:.6g} and then {again:.6g} for the same batch in evaluation mode: {where}; "
            'let it do so in training only (self.training), or state loss_reduction = "mean" (or "sum") in the model file'
        )
    return ModelError(
        f"the loss of {file.name} is {whole:.6g} for a batch, and {parts[0]:.6g} and {parts[1]:.6g} for the first and the "
        f"second part of it; expected their mean over the samples or their sum, {sum(parts):.6g}. With "
        "ignored or padding tokens, sum over those that count and divide by their number in the whole batch, which comes with "
        "the targets (docs/from-ddp.md, Masked tokens). With class weights, a contrastive loss or a router's auxiliary loss, state "
        'loss_reduction = "mean" (or "sum") in the model file: each micro-batch is then trained with its own loss'
    )


def _two_parts(inputs: Any, target: Any, batch_size: int) -> list[tuple[Any, Any]]:
    """The first half of a batch, and the rest."""

    def rows(value: Any, part: slice) -> Any:
        return pytree.tree_map(lambda x: x[part] if isinstance(x, Tensor) else x, value)

    cuts = (slice(0, batch_size // 2), slice(batch_size // 2, batch_size))
    return [(rows(inputs, cut), rows(target, cut)) for cut in cuts]


def call_model(file: ModelFile, inputs: Any) -> Any:
    """The model's output; a ModelError that names the inputs and the layer where it fails."""
    try:
        return file.forward(inputs)
    except Exception as error:
        shapes = ", ".join(
            f"{tuple(x.shape)} {x.dtype}".replace("torch.", "") for x in flat_tensors(inputs, what="inputs")
        )
        names = _names(file.model)  # the innermost module that was running, or the model
        inside = [names[x] for x in objects_running(error) if isinstance(x, nn.Module) and x in names]
        where = inside[-1] if inside else type(file.model).__name__
        raise ModelError(
            f"the model fails on its inputs, {shapes}; in {where}: {own_gradients_text(error) or describe(error)}"
        ) from error


def first_not_finite(model: nn.Module, run: Callable[[], Any]) -> str | None:
    """The module whose output is the first one with a NaN or an infinity while `run` calls the model."""
    values = _fingerprints(model, run)
    return next((x.module for x in values if x.given_to is None and not math.isfinite(x.total)), None)


def first_difference(model: nn.Module, run: Callable[[], Any]) -> str | None:
    """The module that first makes another value in a second call of `run`: in its output, or for a module inside."""
    pairs = zip(_fingerprints(model, run), _fingerprints(model, run), strict=False)
    return next((one.module for one, other in pairs if one != other), None)


def draws_random_numbers(file: ModelFile, inputs: Any) -> str:
    """The clause "... draws random numbers" for a model or loss that does, with the module and the author's line.

    Where nothing draws from a generator of torch, Python or numpy, other causes are named.
    """

    def run() -> Any:
        return call_model(file, inputs)

    where = next(filter(None, (first_difference(file.model, run) for _ in range(_MOST_REPEATS))), "the loss")
    if where != "the loss" and not is_random(run):
        return f"{where} keeps values from call to call or draws random numbers by a generator of its own"
    line = None if where == "the loss" else line_of_first_draw(run)
    return f"{where} draws random numbers" + (f" ({line})" if line else "")


def _names(model: nn.Module) -> dict[nn.Module, str]:
    """The name of every module in messages: 1.1 (Log)."""
    names = {module: name or "the model" for name, module in model.named_modules()}
    return {module: f"{name} ({type(module).__name__})" for module, name in names.items()}


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that a module returns, or gives to a module inside."""

    module: str
    total: float  # of its elements, each with its own weight, so that another order is seen
    given_to: str | None  # None: an output


def _fingerprints(model: nn.Module, run: Callable[[], Any]) -> list[_Value]:
    """The values of a run in the order in which they are made."""
    found = list[_Value]()
    names, running = _names(model), list[nn.Module]()

    def enter(module: nn.Module, arguments: Any) -> None:
        if running:
            found.append(_Value(names[running[-1]], _sum(arguments), names[module]))
        running.append(module)

    def leave(module: nn.Module, _arguments: object, output: object) -> None:
        running.pop()
        found.append(_Value(names[module], _sum(output), None))

    hooks = [hook for x in names for hook in (x.register_forward_pre_hook(enter), x.register_forward_hook(leave))]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _sum(output: object) -> float:
    found = (x.detach().double().flatten() for x in tensors_in(output) if x.is_floating_point())
    return math.fsum(float(x @ torch.linspace(0.5, 1.5, len(x)).to(x)) for x in found)
