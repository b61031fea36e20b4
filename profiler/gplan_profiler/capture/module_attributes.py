"""Attributes of modules that a forward sets, such as `self.aux_loss = ...`.

A trace does not set them again in training, and in a pipeline they are set on the device of one stage, by whichever
micro-batch ran last. So they are restored after a capture, and a loss that reads one is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeAlias

from torch import nn

from gplan.core.errors import ModelError
from gplan_profiler.capture.authored_layers import OF_EVERY_MODULE, PLAIN, names_in
from gplan_profiler.torch_compat import module_calls_replaced

_NOT_RESTORED = frozenset({"training", "_parameters", "_buffers", "_modules"})
NOT_OF_A_FORWARD = frozenset({"__init__", "__repr__", "extra_repr", "reset_parameters", "_reset_parameters"})
_ABSENT = object()

Attributes: TypeAlias = list[tuple[str, nn.Module, dict[str, tuple[Any, Any]]]]
"""Path, module, and by name each attribute with a copy of its entries, or None where it has none."""


@dataclass(frozen=True, slots=True)
class AssignedAttribute:
    """An attribute that a forward sets on modules of a class."""

    owner: type[nn.Module]
    name: str
    path: str  # of the first such module, with the name


def attributes_of(model: nn.Module) -> Attributes:
    """All modules' plain attributes and hooks, and the entries of lists, dicts and sets; not parameters and submodules."""
    return [
        (
            path,
            module,
            {
                name: (value, value.copy() if type(value) in (list, dict, set, OrderedDict) else None)
                for name, value in module.__dict__.items()
                if name not in _NOT_RESTORED
            },
        )
        for path, module in model.named_modules()
    ]


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Restore all modules' attributes at the end: a traced forward may leave fake tensors in them, or hooks."""
    before = attributes_of(model)
    try:
        yield
    finally:
        for _, module, kept in before:
            attributes = module.__dict__
            for name in attributes.keys() - kept.keys() - _NOT_RESTORED:
                del attributes[name]
            for name, (value, entries) in kept.items():
                attributes[name] = value
                if entries is not None:
                    value.clear()
                    (value.extend if isinstance(entries, list) else value.update)(entries)


def assigned_since(before: Attributes) -> tuple[AssignedAttribute, ...]:
    """The attributes that have another value than before, once for each class of modules."""
    found: dict[tuple[type[nn.Module], str], AssignedAttribute] = {}
    for path, module, kept in before:
        for name, value in module.__dict__.items():
            if name in OF_EVERY_MODULE or not _differs(value, *kept.get(name, (_ABSENT, None))):
                continue
            place = f"{path}.{name}" if path else name
            found.setdefault((type(module), name), AssignedAttribute(type(module), name, place))
    return tuple(found.values())


def changed_since(before: Attributes) -> Iterator[str]:
    """The paths of those attributes that have another value now, or none."""
    for path, module, kept in before:
        now = module.__dict__
        yield from (
            f"{path}.{name}".lstrip(".") for name, x in kept.items() if name not in now or _differs(now[name], *x)
        )


def _differs(value: object, before: object, entries: object) -> bool:
    if isinstance(value, PLAIN):
        return type(value) is not type(before) or value != before
    if value is not before or not isinstance(value, list | dict | set):
        return value is not before

    def identities(x: Any) -> list[Any]:
        return [(key, id(y)) for key, y in x.items()] if isinstance(x, dict) else [id(y) for y in x]

    return identities(value) != identities(entries)


def attributes_read(model: nn.Module) -> Attributes:
    """Those of `attributes_of` that the code of some module's class names outside its constructor."""
    everywhere = {
        name
        for kind in {type(x) for x in model.modules()}
        for base in kind.__mro__
        if base not in (nn.Module, object)
        for method, x in vars(base).items()
        if method not in NOT_OF_A_FORWARD and isinstance(code := getattr(x, "__code__", None), CodeType)
        for name in names_in(code)
    }
    found = (
        (path, module, {name: x for name, x in kept.items() if name in everywhere and name not in OF_EVERY_MODULE})
        for path, module, kept in attributes_of(model)
    )
    return [x for x in found if x[2]]


@contextmanager
def unreadable(assigned: Collection[AssignedAttribute]) -> Iterator[None]:
    """Inside, code that reads one of these attributes raises ModelError, except in a forward of their module.

    Modules of other builds of the model are refused too, as a loss may hold any of them.
    """
    if not assigned:
        yield
        return
    running = list[nn.Module]()

    def call(plain: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        running.append(module)
        try:
            return plain(module, *args, **kwargs)
        finally:
            running.pop()

    own = [(x, vars(x.owner).get(x.name, _ABSENT)) for x in assigned]
    for x in assigned:
        setattr(x.owner, x.name, _refusing(x, running))
    try:
        with module_calls_replaced(call):
            yield
    finally:
        for x, value in own:
            if value is _ABSENT:
                delattr(x.owner, x.name)
            else:
                setattr(x.owner, x.name, value)


def _refusing(assigned: AssignedAttribute, running: list[nn.Module]) -> property:
    """A property in place of the attribute."""
    name, default = assigned.name, getattr(assigned.owner, assigned.name, _ABSENT)

    def read(module: nn.Module) -> Any:
        if not any(x is module for x in running):
            raise ModelError(
                f"the loss reads the attribute {name} of {assigned.owner.__name__}, which the forward of the model sets "
                f"({assigned.path}); stages pass only tensors that a forward returns: return it from the model's forward, "
                "and let the loss take it from the output"
            )
        found = module.__dict__.get(name, default)
        if found is _ABSENT:
            raise AttributeError(name)
        return found

    def write(module: nn.Module, value: Any) -> None:
        module.__dict__[name] = value

    return property(read, write)
