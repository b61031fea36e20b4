"""Attributes of a model's modules as they were: a forward that is traced may leave fake tensors in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from profiler.capture.authored_layers import OF_EVERY_MODULE


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Afterwards all modules have the attributes that they had, with the same entries where those are lists or dicts.

    Parameters, buffers and submodules are not attributes in this sense.
    """
    before = [(module.__dict__, _snapshot(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, kept in before:
            for name in attributes.keys() - kept.keys() - OF_EVERY_MODULE:
                del attributes[name]
            for name, (value, entries) in kept.items():
                attributes[name] = value
                _refill(value, entries)


def _snapshot(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Every attribute, and a copy of its entries if it has any."""
    return {
        name: (value, value.copy() if type(value) in (list, dict, set) else None)
        for name, value in attributes.items()
        if name not in OF_EVERY_MODULE
    }


def _refill(value: Any, entries: Any) -> None:
    if isinstance(entries, list):
        value[:] = entries
    elif entries is not None:
        value.clear()
        value.update(entries)
