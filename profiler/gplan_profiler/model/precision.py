"""A model in another precision than its file makes it: a copy whose parameters are stored and accumulated otherwise.

Parameters and floating-point buffers are converted as `model.to(dtype)` does, and floating-point inputs with them.
`Tensor.grad_dtype` makes autograd accumulate gradients in another dtype than the parameter's. float32 master weights
are the optimizer's parameters; after its step they are rounded into those that the model computes with
(Micikevicius et al. 2018, section 3.1).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gplan.core.errors import ModelError
from gplan.core.precision import AS_MADE, Precision
from gplan_profiler.model.error_location import describe
from gplan_profiler.model.load import ModelFile
from gplan_profiler.model.materialise import parameter_as
from gplan_profiler.torch_compat import foreach_copy_, pytree

MASTER_DTYPE = torch.float32


def in_precision(file: ModelFile, precision: Precision) -> ModelFile:
    """The file with a model of this precision and inputs for it; the file's own model is left as it is.

    Raises ModelError for a model that its author made in another dtype than float32 or that of the precision.
    """
    if precision == AS_MADE:
        return file
    dtype = input_dtype(precision)
    assert dtype is not None
    allowed = {dtype} if precision.name in ("float32", "autocast") else {dtype, torch.float32}
    for name, x in file.model.named_parameters():
        if x.is_floating_point() and x.dtype not in allowed:
            expected = " or ".join(sorted(str(y).removeprefix("torch.") for y in allowed))
            raise ModelError(
                f"{file.name} makes {name} in {str(x.dtype).removeprefix('torch.')}; precision {precision.name} takes a model "
                f"in {expected}: leave the precision out, or change the model"
            )
    functions = dict(file.functions)
    for name in {"batches", "example_inputs"} & functions.keys():
        functions[name] = _converting(functions[name], dtype, are_batches=name == "batches")
    try:
        gradients = None if precision.gradients is None else getattr(torch, precision.gradients)
        model = _converted(file.model, dtype, gradients)
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"{file.name} cannot be copied to convert it to precision {precision.name}: {describe(error)}; leave the precision "
            "out, or keep locks, files and computed tensors out of the modules' attributes"
        ) from error
    return replace(
        file,
        model=model,
        functions=functions,
        fixed_inputs=convert_floats(file.fixed_inputs, dtype),
        precision=precision,
    )


def convert_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """A structure with its floating-point tensors converted; None: unchanged."""
    if dtype is None:
        return value
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, value)


def input_dtype(precision: Precision) -> torch.dtype | None:
    """What floating-point inputs are converted to; None: nothing."""
    found: torch.dtype | None = None if precision.parameters is None else getattr(torch, precision.parameters)
    return found


def master_bytes(parameters: Iterable[nn.Parameter], precision: Precision) -> int:
    """Bytes of the master weights of some parameters, if the precision has them; frozen ones have none."""
    if not precision.master_weights:
        return 0
    return sum(x.numel() * MASTER_DTYPE.itemsize for x in parameters if x.requires_grad)


@torch.no_grad()
def round_into(parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Copy master weights into the parameters that the model computes with."""
    if parameters:
        foreach_copy_(list(parameters), list(masters))


def _converted(model: nn.Module, dtype: torch.dtype, gradients: torch.dtype | None) -> nn.Module:
    """A copy of the model's modules with converted tensors; those that need no conversion are shared with it."""
    made: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        is_float = tensor.is_floating_point()
        new = tensor.detach().to(dtype) if is_float else tensor.detach()
        if not isinstance(tensor, nn.Parameter):
            made[id(tensor)] = new if is_float and new.dtype != tensor.dtype else tensor
            continue
        parameter = parameter_as(new, tensor)
        if is_float and tensor.requires_grad:
            parameter.grad_dtype = gradients
        made[id(tensor)] = parameter
    return copy.deepcopy(model, made)


def _converting(function: Callable[..., Any], dtype: torch.dtype, *, are_batches: bool) -> Callable[..., Any]:
    """A function of the file whose inputs are converted; targets are left as they are."""

    def batches(*args: Any) -> Iterator[Any]:
        for batch in function(*args):
            if isinstance(batch, tuple | list) and len(batch) == 2:
                yield convert_floats(batch[0], dtype), batch[1]
            else:
                yield convert_floats(dict(batch) if isinstance(batch, Mapping) else batch, dtype)

    return batches if are_batches else lambda *args: convert_floats(function(*args), dtype)
