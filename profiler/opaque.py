"""Tracing a block once and its likes not at all: what happens while a model is exported.

A unit of the model (profiler/layers.py) that is alike to one traced before it, and is called alike, becomes one call of
the operator `gplan::repeat`, whose results are shaped like those of the first call. Two calls of `gplan::mark` enclose
the operations of every first call; profiler/expand.py copies them afterwards. The state of units that are expected to
repeat is hidden meanwhile, since the exporter's work grows with every parameter; code of the model that looks at it all
the same, and any doubt whether a call repeats another, ends the attempt: `refused` and `revealed` say how to do better.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from profiler.blocks import Unit, modules_outside, same_as
from profiler.likeness import module_key

torch.library.define("gplan::mark", "(Tensor[] tensors, int index) -> ()")
torch.library.define("gplan::repeat", "(Tensor[] inputs, Tensor[] like, int index) -> Tensor[]")

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size)


def _mark(tensors: Sequence[Tensor], index: int) -> None:
    """Nothing: only the place in the graph counts."""


def _repeat(inputs: Sequence[Tensor], like: Sequence[Tensor], index: int) -> list[Tensor]:
    """Tensors shaped like those of the first call."""
    return [torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device) for x in like]


torch.library.register_fake("gplan::mark", _mark)
torch.library.register_fake("gplan::repeat", _repeat)


class Doubt(Exception):
    """A block is perhaps no repetition of another: it must be traced in full."""


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


class Recorder:
    """What was called during one attempt to export `model`.

    Calls of `units` are recorded and may be repetitions; those on the paths `seen` keep their state in sight.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], seen: Container[str]) -> None:
        self.firsts: dict[Hashable, FirstCall] = {}
        self.repetitions: list[Repetition] = []
        self.refused = set[Hashable]()  # groups to trace in full the next time
        self.revealed = set[str]()  # units to see the next time
        self.reassigned: tuple[str, ...] = ()  # weights in whose place the forward put new tensors
        self.failed = False
        self._model, self._seen = model, seen
        self._units = {id(unit.module.__dict__): unit for unit in units}
        self._called = set[str]()
        self._running: Unit | None = None
        self._inside = False  # the model's forward is running

    @property
    def is_of_use(self) -> bool:
        """Whether any block may repeat another."""
        return bool(self._units)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The export to record runs inside; the model is as it was afterwards."""
        plain = nn.Module._call_impl

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(plain, module, args, kwargs)

        with self._hidden():
            nn.Module._call_impl = call  # type: ignore[method-assign, assignment]
            try:
                yield
            finally:
                nn.Module._call_impl = plain  # type: ignore[method-assign]

    def refuse(self, group: Hashable) -> Doubt:
        """The error to raise where blocks of a group must be traced in full."""
        self.refused.add(group)
        self.failed = True
        return Doubt()

    def look(self, path: str) -> None:
        """The state of a hidden unit is looked at."""
        if not self._inside:
            return
        self.failed = True
        if self._running is not None and self._running.path == path:
            self.revealed.add(path)
        raise Doubt(f"the state of {path} is read")

    def _call(self, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module.__dict__ is self._model.__dict__ and not self._inside:
            return self._whole(lambda: plain(module, *args, **kwargs))
        unit = self._units.get(id(module.__dict__))
        if unit is None or self._running is not None:
            return plain(module, *args, **kwargs)
        if unit.path in self._called:
            raise self.refuse(unit.group)
        self._called.add(unit.path)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = (unit.group, structure, _leaf_keys(leaves), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
        if None in key[2] or not any(isinstance(x, Tensor) for x in leaves):
            raise self.refuse(unit.group)
        if key in self.firsts:
            return self._repeated(self.firsts[key], unit, leaves)
        self._running = unit
        try:
            output = self._traced(unit, lambda: plain(module, *args, **kwargs), leaves, key)
        finally:
            self._running = None
        after, _ = pytree.tree_flatten((args, kwargs))
        if len(after) != len(leaves) or any(x is not y for x, y in zip(after, leaves, strict=True)):
            raise self.refuse(unit.group)
        return output

    def _whole(self, call: Callable[[], Any]) -> Any:
        """The call of the model itself."""
        before = _weights(self._model)
        self._inside = True
        try:
            output = call()
        finally:
            self._inside = False
        after = _weights(self._model)
        self.reassigned = tuple(name for name, tensor in before.items() if after.get(name) is not tensor)
        return output

    def _traced(self, unit: Unit, call: Callable[[], Any], leaves: Sequence[Any], key: Hashable) -> Any:
        index = len(self.firsts)
        inputs = _tensors(leaves)
        torch.ops.gplan.mark(inputs, index)
        output = call()
        first = _first_call(index, unit, inputs, output)
        if first is None or module_key(unit.module) != unit.group[0]:
            raise self.refuse(unit.group)
        torch.ops.gplan.mark(list(first.results), index)
        self.firsts[key] = first
        return output

    def _repeated(self, first: FirstCall, unit: Unit, leaves: Sequence[Any]) -> Any:
        inputs = _tensors(leaves)
        results = torch.ops.gplan.repeat(inputs, list(first.results), len(self.repetitions))
        if [x.requires_grad for x in results] != [x.requires_grad for x in first.results]:
            raise self.refuse(unit.group)
        self.repetitions.append(Repetition(first, unit))
        sources = {"result": results, "input": inputs}
        values = [sources[kind][x] if kind in sources else x for kind, x in first.leaves]
        return pytree.tree_unflatten(values, first.structure)

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        hidden = self._to_hide()
        kept = [(module, module._parameters, module._buffers) for _, module in hidden]
        try:
            for path, module in hidden:
                module.__dict__["_parameters"] = _Sealed(self, path)
                module.__dict__["_buffers"] = _Sealed(self, path)
            yield
        finally:
            for module, parameters, buffers in kept:
                module.__dict__["_parameters"], module.__dict__["_buffers"] = parameters, buffers

    def _to_hide(self) -> list[tuple[str, nn.Module]]:
        """The modules that belong to units of which two earlier ones are alike, and to nothing else in the model.

        Often the first is called on inputs of the model, which need no gradient, and only the second as all the others.
        """
        alike = Counter[Hashable]()
        hidden: dict[int, Unit] = {}
        for key, unit in self._units.items():
            alike[unit.group] += 1
            if alike[unit.group] > 2 and unit.path not in self._seen:
                hidden[key] = unit
        needed = {id(x) for x in modules_outside(self._model, hidden)}
        inner = [(unit.path, module) for unit in hidden.values() for module in unit.module.modules()]
        return [
            (path, module) for path, module in {id(x): (p, x) for p, x in inner}.values() if id(module) not in needed
        ]


class _Sealed(dict[str, Any]):
    """Seems empty to the exporter; tells the recorder when the model's own code looks into it."""

    def __init__(self, recorder: Recorder, path: str) -> None:
        super().__init__()
        self._recorder, self._path = recorder, path

    def _tell(self) -> None:
        self._recorder.look(self._path)

    def __contains__(self, key: object) -> bool:
        self._tell()
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._tell()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        self._tell()
        return super().__iter__()

    def keys(self) -> Any:
        self._tell()
        return super().keys()

    def values(self) -> Any:
        self._tell()
        return super().values()

    def items(self) -> Any:
        self._tell()
        return super().items()

    def get(self, key: str, default: Any = None) -> Any:
        self._tell()
        return super().get(key, default)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, and the buffers of the modules inside; torch.export follows the model's own buffers itself."""
    buffers = {name: x for name, x in model.named_buffers(remove_duplicate=False) if "." in name}
    return {**dict(model.named_parameters(remove_duplicate=False)), **buffers}


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [x for x in leaves if isinstance(x, Tensor)]


def _leaf_keys(leaves: Sequence[Any]) -> tuple[Hashable, ...]:
    """What must be equal in the arguments of two calls; None for an argument that cannot be compared."""
    return tuple(
        (same, _leaf_key(x)) if _is_comparable(x) else None
        for same, x in zip(_same_tensors(leaves), leaves, strict=True)
    )


def _same_tensors(leaves: Sequence[Any]) -> tuple[int, ...]:
    return same_as([x if isinstance(x, Tensor) else place for place, x in enumerate(leaves)])


def _is_comparable(leaf: object) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.layout == torch.strided and all(type(x) is int for x in (*leaf.shape, *leaf.stride()))
    return type(leaf) in _PLAIN or isinstance(leaf, types.FunctionType)


def _leaf_key(leaf: Any) -> Hashable:
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf
    where = leaf.device, leaf.storage_offset(), type(leaf)
    return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad, where


def _first_call(index: int, unit: Unit, inputs: Sequence[Tensor], output: object) -> FirstCall | None:
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
    storages = {x.untyped_storage()._cdata for x in inputs}
    is_part = isinstance(result, nn.Parameter) or result.storage_offset() != 0
    return not is_part and result.untyped_storage()._cdata not in storages
