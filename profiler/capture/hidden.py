"""Hiding the parameters and buffers of blocks that are expected to repeat, since an exporter's work grows with each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from profiler.capture.blocks import Unit, modules_outside


@contextmanager
def hidden_state(
    model: nn.Module, units: Sequence[Unit], seen: Container[str], look: Callable[[str], None]
) -> Iterator[None]:
    """Inside, the units of which two earlier ones are alike seem to have no state, except those on the paths `seen`.

    `look` is called with the path of a unit whenever its state is looked at. Two stay visible, since often the first is
    called on inputs of the model, which need no gradient, and only the second as all the others are.
    """
    chosen = _to_hide(model, units, seen)
    kept = [(module, module._parameters, module._buffers) for _, module in chosen]
    try:
        for path, module in chosen:
            module.__dict__["_parameters"] = _Sealed(look, path)
            module.__dict__["_buffers"] = _Sealed(look, path)
        yield
    finally:
        for module, parameters, buffers in kept:
            module.__dict__["_parameters"], module.__dict__["_buffers"] = parameters, buffers


def _to_hide(model: nn.Module, units: Sequence[Unit], seen: Container[str]) -> list[tuple[str, nn.Module]]:
    """The modules that belong to units to hide and to nothing else in the model, each with the path of its unit."""
    alike = Counter[Hashable]()
    chosen = []
    for unit in units:
        alike[unit.group] += 1
        if alike[unit.group] > 2 and unit.path not in seen:
            chosen.append(unit)
    needed = {id(x) for x in modules_outside(model, {id(unit.module.__dict__) for unit in chosen})}
    inner = {id(x): (unit.path, x) for unit in chosen for x in unit.module.modules()}
    return [(path, module) for path, module in inner.values() if id(module) not in needed]


def _telling(read: Callable[..., Any]) -> Any:
    """A way to read a dict that tells of it first."""

    def method(sealed: _Sealed, *args: Any) -> Any:
        sealed.look(sealed.path)
        return read(sealed, *args)

    return method


class _Sealed(dict[str, Any]):
    """Seems empty to the exporter; tells when anyone looks into it."""

    def __init__(self, look: Callable[[str], None], path: str) -> None:
        super().__init__()
        self.look, self.path = look, path

    __contains__ = _telling(dict.__contains__)
    __getitem__ = _telling(dict.__getitem__)
    __iter__ = _telling(dict.__iter__)
    keys = _telling(dict.keys)
    values = _telling(dict.values)
    items = _telling(dict.items)
    get = _telling(dict.get)
