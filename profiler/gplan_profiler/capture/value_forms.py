"""The form of a value between two layers: its structure and constants, without its tensors.

A value is any structure registered with torch.utils._pytree. Its tensors are sent from stage to stage, each once. Its
constants are not sent: they are fixed at capture, and every later value is checked to have the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gplan.core.errors import ModelError
from gplan_profiler.capture.authored_layers import PLAIN
from gplan_profiler.torch_compat import pytree


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf that is not a tensor; compared by class and repr, so that True differs from 1.

    An object that is not plain equals only itself.
    """

    kind: type
    text: str
    value: Any = field(compare=False)

    @classmethod
    def of(cls, value: object) -> Constant:
        """The constant of a value."""
        return cls(type(value), repr(value) if isinstance(value, PLAIN) else f"object {id(value)}", value)


Leaf: TypeAlias = int | Constant
"""The index of a tensor among those that are sent, or a constant."""


@dataclass(frozen=True, slots=True)
class Form:
    """A structure with its constants, and for each other leaf the index of its tensor.

    >>> import torch
    >>> form, tensors = Form.of({"x": torch.ones(2), "mask": None}, what="the output")
    >>> form.value(tensors)
    {'x': tensor([1., 1.]), 'mask': None}
    """

    structure: pytree.TreeSpec
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, value: object, *, what: str) -> tuple[Form, tuple[Tensor, ...]]:
        """The form of a value and its tensors, each once.

        Raises ModelError for an object that is neither a tensor nor a constant, and for a value without tensors.
        """
        return cls.of_leaves(*checked_leaves(value, what=what))

    @classmethod
    def of_leaves(cls, leaves: Sequence[Any], structure: pytree.TreeSpec) -> tuple[Form, tuple[Tensor, ...]]:
        """The form of a flat value and its tensors, each once; all other leaves are constants."""
        tensors = {id(x): x for x in leaves if isinstance(x, Tensor)}
        place = {key: i for i, key in enumerate(tensors)}
        described = tuple(place[id(x)] if isinstance(x, Tensor) else Constant.of(x) for x in leaves)
        return cls(structure, described), tuple(tensors.values())

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """The value of this form with these tensors."""
        leaves = [tensors[leaf] if isinstance(leaf, int) else leaf.value for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)

    def tensors_of(self, value: object, *, what: str) -> tuple[Tensor, ...]:
        """The tensors of a value of this form; raises ModelError, beginning with `what`, for one of another form."""
        leaves, structure = checked_leaves(value, what=what)
        if structure != self.structure:
            raise _differs(what, f"is {_outline(structure)}", _outline(self.structure))
        tensors: dict[int, Tensor] = {}
        for number, (leaf, expected) in enumerate(zip(leaves, self.leaves, strict=True), start=1):
            where = f"as value {number} of {len(leaves)}"
            found = None if isinstance(leaf, Tensor) else Constant.of(leaf)
            if isinstance(expected, Constant) or found is not None:
                if found != expected:
                    raise _differs(what, f"has {_word(found)} {where}", _word(expected))
            elif tensors.setdefault(expected, leaf) is not leaf:
                first = 1 + self.leaves.index(expected)
                raise _differs(what, f"has another tensor {where} than as value {first}", "the same one twice")
        return tuple(tensors.values())


DATA_DEPENDENT = "tensors whose size depends on data"


def stage_output(value: object) -> tuple[Any, dict[int, str]]:
    """The output of a trace with None for each leaf that no stage can return, and what these leaves are, by index.

    Left out are objects that are neither tensors, constants nor containers, and tensors whose size depends on data.
    Dataclasses and subclasses of dict that torch.utils._pytree does not know become known containers.
    """
    leaves, structure = pytree.tree_flatten(value)
    known = Tensor, *PLAIN, torch.SymInt, torch.SymFloat, torch.SymBool
    unknown = {place: x for place, x in enumerate(leaves) if not isinstance(x, known)}
    containers = {type(x) for x in unknown.values() if is_dataclass(x) or isinstance(x, dict)}
    for kind in containers:
        if is_dataclass(kind):
            pytree.register_dataclass(kind)
            continue

        def made(values: Any, keys: Any, kind: Any = kind) -> Any:
            return kind(zip(keys, values, strict=True))

        pytree.register_pytree_node(kind, lambda x: ([*x.values()], [*x]), made)
    if containers:
        return stage_output(value)
    left_out = {place: f"objects of class {type(x).__module__}.{type(x).__qualname__}" for place, x in unknown.items()}
    for place, x in enumerate(leaves):
        if isinstance(x, Tensor) and not has_fixed_size(x):
            left_out[place] = DATA_DEPENDENT
    kept = [None if place in left_out else x for place, x in enumerate(leaves)]
    return pytree.tree_unflatten(kept, structure), left_out


def has_fixed_size(tensor: Tensor) -> bool:
    """Whether no dimension of a tensor of a trace depends on data."""
    return all(isinstance(x, int) for x in tensor.shape)


def checked_leaves(value: object, *, what: str) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves and the structure of a value, checked to be tensors, at least one, and constants."""
    leaves, structure = pytree.tree_flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise ModelError(
                f"{what} holds a {type(leaf).__name__} ({leaf!r:.60}); expected tensors and constants (None, bool, int, "
                "float, str, ...), alone or in tuples, lists, dicts or dataclasses registered with torch.utils._pytree"
            )
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        found = f" ({', '.join(map(repr, leaves))})" if leaves else ""
        raise ModelError(f"{what} holds no tensor{found:.60}; expected at least one")
    return leaves, structure


def _differs(what: str, found: str, expected: str) -> ModelError:
    return ModelError(
        f"{what} {found}; expected {expected}, as when the model was captured: only tensors are sent between stages, so "
        "all other values must be the same at every call; return changing values as tensors, or keep them in one layer"
    )


def _outline(structure: pytree.TreeSpec) -> str:
    """A structure with `...` for each of its leaves."""
    if structure.is_leaf():
        return "one value"
    keys = [f"{key}: " for key in structure.context] if structure.type is dict else [""] * structure.num_children
    inner = ["..." if x.is_leaf() else _outline(x) for x in structure.children()]
    children = ", ".join(key + text for key, text in zip(keys, inner, strict=True))
    return f"a {structure.type.__name__} of {structure.num_children} ({children:.80})"


def _word(leaf: Leaf | None) -> str:
    return leaf.text if isinstance(leaf, Constant) else "a tensor"
