"""What to tell the author of a model that cannot be captured: the line or the weight at fault, and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gplan.core.errors import ModelError
from profiler.capture.chain import untouched
from profiler.model.error_location import author_line

_USES_OF_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
_UNKNOWN_OUTPUT = re.compile(r"Found <class '([^']+)'> in output")  # as torch.export says it
_CACHE = "transformers.cache_utils."  # of keys and values, for generation only; part of the output by default
_PLAIN = (RuntimeError, TypeError, ValueError, IndexError, KeyError)
_OF_TRACING = ("data-dependent", "data dependent", "fake", "symbolic", "proxy", "export", "trace", "subclass", "symint")
_DATA_OF_A_TENSOR = "fake tensor in the exported program constant"  # what torch.export says of `.data`


def parameter_changed(path: str, parameter: str) -> str:
    """Why a model is refused whose module at `path` writes into a parameter."""
    return (
        f"{_who(path)} writes into the parameter {parameter} in its forward; expected a forward "
        "that leaves parameters as they are, since it runs once for every micro-batch: compute a new tensor from the "
        "parameter and use that, keep it as a buffer, or change the parameter after the optimizer's step"
    )


def why_untraceable(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> str:
    """What is at fault where torch.export ended with `error`."""
    if isinstance(error, ModelError):
        return str(error)
    if _DATA_OF_A_TENSOR in str(error):
        for name, is_changed in _parameters_whose_data_is_used(model, args, kwargs):
            path = name.rpartition(".")[0]
            return parameter_changed(path, name) if is_changed else _data_used(path, name)
    output = _UNKNOWN_OUTPUT.match(str(error))
    if output is not None:
        advice = "return those of its tensors that the loss needs"
        if output[1].startswith(_CACHE):
            advice = "set model.config.use_cache = False, as the cache of keys and values serves generation only"
        return (
            f"{type(model).__name__} returns an object of class {output[1]}; expected tensors, alone or in tuples, lists, "
            f"dicts or dataclasses that torch.utils._pytree knows: {advice}"
        )
    where = author_line(error)
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if _is_plain_failure(error):
        return f"{type(model).__name__} fails: {where or 'in the model'}: {reason[:300]}"
    return (
        f"{type(model).__name__} cannot be captured by torch.export: {where or 'in the model'}: {reason[:300]}. "
        "If that line decides by the values of a tensor (an `if`, a loop, .item()), rewrite it without "
        "(torch.where, torch.cond), or hand the model over as an nn.Sequential or a list of stages, which is cut "
        "between its children without tracing"
    )


def _is_plain_failure(error: Exception) -> bool:
    """Whether the model would fail on these inputs without the exporter too: wrong shapes or arguments."""
    text = str(error).lower()
    return type(error) in _PLAIN and not any(word in text for word in _OF_TRACING)


def _data_used(path: str, parameter: str) -> str:
    return (
        f"{_who(path)} reads `.data` of the parameter {parameter} in its forward, which a trace "
        "cannot follow; expected .detach(), which has the same values"
    )


class _DataUses(TorchFunctionMode):
    """The identities of the tensors whose `.data` is read or assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _USES_OF_DATA:
            self.found.append(id(args[0]))
        return function(*args, **(kwargs or {}))


def _parameters_whose_data_is_used(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, bool]]:
    """Names of such parameters, and whether forward changed them; found by running it on copies of the parameters."""
    copies: dict[str, Tensor] = {name: nn.Parameter(x.detach().clone()) for name, x in model.named_parameters()}
    uses = _DataUses()
    try:
        with untouched(model), uses:
            torch.func.functional_call(model, copies, args, kwargs)
    except Exception:  # a model that fails by itself is described by the exporter's own error
        return []
    used = [name for name, x in copies.items() if id(x) in uses.found]
    return [(name, not torch.equal(copies[name], model.get_parameter(name))) for name in used]


def reassigned(model: nn.Module, name: str) -> str:
    """Why a model that puts a new tensor in the place of the parameter or buffer `name` is refused."""
    path, _, last = name.rpartition(".")
    if name in dict(model.named_parameters(remove_duplicate=False)):
        return parameter_changed(path, name)
    return (
        f"{_who(path)} assigns a new tensor to the buffer {name} in its forward, which a trace loses; expected a buffer "
        f"that is written in place: self.{last}.copy_(...)"
    )


def _who(path: str) -> str:
    return f"layer {path}" if path else "the model itself"
