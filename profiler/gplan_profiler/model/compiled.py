"""Code that its author compiled by torch.compile: it is measured and trained as the code that it was made from.

Compiled code cannot be cut, and what it keeps for the backward cannot be followed. So neither a profile nor a run
compiles anything, and both have the same seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gplan_profiler.torch_compat import is_compiled_function, is_compiled_module


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, modules and functions that torch.compile wrapped run as the code that they were made from."""
    with torch.compiler.set_stance("force_eager"):
        yield


def compiled_once(value: Any) -> Any:
    """A module that went through torch.compile twice, which is a function, as one that did once; anything else as it is."""
    method = inspect.unwrap(value) if inspect.isfunction(value) and is_compiled_function(value) else None
    owner = getattr(method, "__self__", None)
    is_whole = isinstance(owner, nn.Module) and getattr(method, "__name__", "") in ("forward", "__call__")
    return torch.compile(owner) if is_whole else value


def unwrapped(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The model itself, if it is the result of torch.compile; and a note if this or anything inside is compiled."""
    is_compiled = any(
        "_orig_mod" in x._modules or is_compiled_module(x) or is_compiled_function(vars(x).get("forward"))
        for x in model.modules()
    ) or any(map(is_compiled_function, _functions_of({type(x) for x in model.modules()})))
    note = "torch.compile has no effect here: the model is measured and trained as the code that it was made from"
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner, (note,) if is_compiled else ()


def _functions_of(kinds: Iterable[type]) -> Iterator[object]:
    """The methods of some classes, and what these call by names of their modules."""
    for method in [x for kind in kinds for x in vars(kind).values() if callable(x)]:
        yield method
        code = getattr(method, "__code__", None)
        yield from (method.__globals__.get(x) for x in code.co_names) if code is not None else ()
