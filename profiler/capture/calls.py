"""Calls of blocks while a model is traced: when one is like another,
and what a repetition needs to know of the first."""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from profiler.capture.blocks import Unit, same_as
from profiler.capture.likeness import PLAIN
from profiler.memory.storages import storage_key


@dataclass(frozen=True, slots=True)
class FirstCall:
    """A call that was traced in full; its marks carry `index`."""

    index: int
    unit: Unit
    results: tuple[Tensor, ...]  # distinct tensors that it made
    leaves: tuple[tuple[str, Any], ...]  # of what it returned: ("result", i), ("input", i) or ("value", x)
    structure: pytree.TreeSpec


@dataclass(frozen=True, slots=True)
class Repetition:
    """A call that was not traced."""

    first: FirstCall
    unit: Unit


def tensors_of(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors among the leaves of a call's arguments."""
    return [x for x in leaves if isinstance(x, Tensor)]


def call_key(leaves: Sequence[Any], structure: pytree.TreeSpec) -> Hashable | None:
    """What must be equal in the arguments of two calls; None where that cannot be told, or no tensor is among them."""
    if not tensors_of(leaves) or not all(_is_comparable(x) for x in leaves):
        return None
    keys = tuple((same, _leaf_key(x)) for same, x in zip(_same_tensors(leaves), leaves, strict=True))
    return structure, keys, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def shares_container(output: object, arguments: Iterable[object]) -> bool:
    """Whether what a call returns, or has in what it returns, is a list or dict that it was given."""
    inner = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    given = {id(x) for x in arguments if isinstance(x, list | dict)}
    return any(id(x) in given for x in (output, *inner))


def _same_tensors(leaves: Sequence[Any]) -> tuple[int, ...]:
    return same_as([x if isinstance(x, Tensor) else place for place, x in enumerate(leaves)])


def _is_comparable(leaf: object) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.layout == torch.strided and all(type(x) is int for x in (*leaf.shape, *leaf.stride()))
    return type(leaf) in PLAIN or isinstance(leaf, types.FunctionType)


def _leaf_key(leaf: Any) -> Hashable:
    if not isinstance(leaf, Tensor):
        return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf  # 0.0 is not -0.0
    where = leaf.device, leaf.storage_offset(), type(leaf)
    return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad, where


def first_call(index: int, unit: Unit, inputs: Sequence[Tensor], output: object) -> FirstCall | None:
    """What a repetition needs to know of a call, or None where it cannot be repeated with certainty."""
    leaves, structure = pytree.tree_flatten(output)
    given = {id(x): place for place, x in enumerate(inputs)}
    made: dict[int, Tensor] = {}
    described: list[tuple[str, Any]] = []
    for leaf in leaves:
        if not _is_comparable(leaf):
            return None
        if not isinstance(leaf, Tensor):
            described.append(("value", leaf))
        elif id(leaf) in given:
            described.append(("input", given[id(leaf)]))
        else:
            made.setdefault(id(leaf), leaf)
            described.append(("result", list(made).index(id(leaf))))
    results = tuple(made.values())
    if not results or any(not _is_fresh(x, inputs) for x in results):
        return None
    return FirstCall(index, unit, results, tuple(described), structure)


def _is_fresh(result: Tensor, inputs: Sequence[Tensor]) -> bool:
    """A tensor of its own, not a view into an input, nor a parameter or part of a larger tensor."""
    storages = {storage_key(x) for x in inputs}
    is_part = isinstance(result, nn.Parameter) or result.storage_offset() != 0
    return not is_part and storage_key(result) not in storages
