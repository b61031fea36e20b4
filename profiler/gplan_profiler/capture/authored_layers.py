"""Which modules form a layer, and which modules are alike.

Two modules are alike, so that one can be traced or measured for both, if they have the same class, equal plain
attributes, parameters and buffers of the same shapes and dtypes, and children that are alike. Any other attribute must
be the same object in both.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Container, Hashable, Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
PART = ""
"""In place of a unit: the module belongs to the unit before it or after it, whichever makes the smaller cut."""


def unit_paths(model: nn.Module, divided: Container[str] = ()) -> dict[str, str]:
    """The path of the unit of every module inside one, by the module's path.

    A unit is a block of a ModuleList, a child of a Sequential, or a child of the model. From the model downwards, these
    modules are opened instead: the model itself; a Sequential, ModuleList or ModuleDict; the only child with parameters
    of an opened module; a child of an opened module that contains a ModuleList (GPT-2's `transformer`, BERT's
    `encoder`), unless it is itself an entry of a list; and the modules at the paths `divided`. Inside these
    only modules with a weight matrix are units; others, such as norms and activations, have `PART` in place of a unit.
    """
    units: dict[str, str] = {}
    opened: list[tuple[str, nn.Module, bool]] = [("", model, False)]
    while opened:
        path, module, is_part = opened.pop()
        children = dict(module.named_children())
        weighty = [name for name, child in children.items() if next(child.parameters(), None) is not None]
        for name, child in children.items():
            child_path = f"{path}.{name}" if path else name
            has_list = any(isinstance(x, nn.ModuleList) and len(x) > 1 for x in child.modules())
            is_entry = isinstance(module, _LISTS)
            is_opened = isinstance(child, _LISTS) or (not is_entry and (weighty == [name] or has_list))
            is_opened |= child_path in divided
            has_matrix = any(x.dim() > 1 for x in child.parameters())
            if is_opened and any(True for _ in child.children()):
                opened.append((child_path, child, is_part or child_path in divided))
            else:
                unit = PART if is_part and not has_matrix else child_path
                units.update(dict.fromkeys((x for x, _ in child.named_modules(prefix=child_path)), unit))
    return units


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size)
"""Classes of values that are compared by value."""

OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
"""Attributes of every nn.Module, which are not the author's."""


def names_in(code: CodeType) -> set[str]:
    """The names of globals and attributes in code, with that of functions defined in it."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    return {*code.co_names}.union(*map(names_in, inner))


def module_key(module: nn.Module) -> Hashable:
    """Equal for modules that are alike.

    >>> module_key(nn.Linear(2, 3)) == module_key(nn.Linear(2, 3)), module_key(nn.ReLU()) == module_key(nn.GELU())
    (True, False)
    """
    attributes = {name: value for name, value in module.__dict__.items() if name not in OF_EVERY_MODULE}
    return (
        type(module),
        module.training,
        tuple((name, _value_key(value)) for name, value in sorted(attributes.items())),
        tuple((name, _tensor_key(value)) for name, value in module._parameters.items()),
        tuple((name, _tensor_key(value)) for name, value in module._buffers.items()),
        tuple((name, None if child is None else module_key(child)) for name, child in module._modules.items()),
        tuple(id(hook) for hooks in (module._forward_hooks, module._forward_pre_hooks) for hook in hooks.values()),
    )


def _value_key(value: object) -> Hashable:
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(_value_key(x) for x in value)
    if isinstance(value, dict):
        return type(value), tuple((_value_key(key), _value_key(x)) for key, x in value.items())
    if isinstance(value, Tensor):
        return _tensor_key(value)
    return type(value), id(value)


def _tensor_key(value: Tensor | None) -> Hashable:
    if value is None:
        return None
    return tuple(value.shape), value.dtype, value.requires_grad, value.stride()


@contextmanager
def caches_empty(model: nn.Module) -> Iterator[None]:
    """Empty the caches of functools.lru_cache in the model's classes and beside them, now and at the end.

    A traced forward leaves fake tensors in them, which another run cannot use.
    """
    caches = list(_caches_of(model))
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


def _caches_of(model: nn.Module) -> Iterator[_lru_cache_wrapper[Any]]:
    """The caches, also those that a decorator keeps in a closure."""
    classes = {x for kind in {type(x) for x in model.modules()} for x in kind.__mro__}
    own = [x for x in classes if x.__module__.partition(".")[0] not in ("torch", "builtins")]
    modules = {x.__module__ for x in own} & sys.modules.keys()
    for space in [*map(vars, own), *(vars(sys.modules[name]) for name in modules)]:
        for value in list(space.values()):
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            cells = (function.__closure__ or ()) if isinstance(function, FunctionType) else ()
            for found in (function, *gc.get_referents(*cells)):
                if isinstance(found, _lru_cache_wrapper) and found.__module__ in modules:
                    yield found


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, tied ones under every name."""
    parameters: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return parameters | dict(module.named_buffers(remove_duplicate=False))
