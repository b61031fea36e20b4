"""Trace repeated blocks of a model only once.

A unit (profiler/capture/authored_layers.py) that is like an earlier one and is called alike becomes one call of the
operator `gplan::repeat`, with results shaped like those of the first call. Two calls of `gplan::mark` enclose the
operations of every first call, which profiler/capture/expand.py copies afterwards. The state of units expected to
repeat is hidden, because the cost of an export grows with every parameter. An attempt fails if the model reads hidden
state or a call may not be a repetition; `refused` and `revealed` then configure the next attempt.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all
from torch.utils import _pytree as pytree

from profiler.capture.authored_layers import (
    OF_EVERY_MODULE,
    PLAIN,
    attributes_restored,
    module_key,
    replaced,
    unit_paths,
)
from profiler.capture.autograd_functions import CustomFunction, custom_functions
from profiler.capture.value_forms import without_objects
from profiler.memory.allocations import storage_key


@dataclass(frozen=True, slots=True)
class Unit:
    """A block of which there are several alike; `group` is equal for these."""

    path: str
    module: nn.Module
    group: tuple[Hashable, Hashable]  # keys of the module and of its tensors
    own: tuple[tuple[str, Tensor], ...]  # parameters, buffers and tensor attributes by local name, in a fixed order

    @property
    def num_attributes(self) -> int:
        """The number of own tensors that are neither parameters nor buffers."""
        registered = {id(x) for x in (*self.module.parameters(), *self.module.buffers())}
        return sum(id(tensor) not in registered for _, tensor in self.own)


def repeated_units(model: nn.Module) -> list[Unit]:
    """The units of a model that occur several times, in the model's order."""
    if any(
        hooks for name, hooks in vars(hooks_of_all).items() if name.startswith("_global") and name.endswith("_hooks")
    ):
        return []
    modules = [(path, model.get_submodule(path)) for path in dict.fromkeys(unit_paths(model).values())]
    times = Counter(id(module) for _, module in modules)
    groups: dict[tuple[Hashable, Hashable], list[Unit]] = {}
    for path, module in modules:
        if times[id(module)] == 1 and not any(_has_hooks(x) for x in module.modules()):
            own = tuple(_own_tensors(module, ""))
            group = module_key(module), _tensors_key([tensor for _, tensor in own])
            groups.setdefault(group, []).append(Unit(path, module, group, own))
    return [unit for units in groups.values() if len(units) > 1 for unit in units]


def _has_hooks(module: nn.Module) -> bool:
    hooks = (value for name, value in module.__dict__.items() if name.endswith("_hooks") and "state_dict" not in name)
    return any(hooks)


def _own_tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module and its submodules, in the same order for modules that are alike."""
    attributes = {name: value for name, value in module.__dict__.items() if name not in OF_EVERY_MODULE}
    for values in (module._parameters, module._buffers, dict(sorted(attributes.items()))):
        for name, value in values.items():
            yield from ((prefix + name, x) for x in _tensors_in(value))
    for name, child in module._modules.items():
        if child is not None:
            yield from _own_tensors(child, f"{prefix}{name}.")


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for x in inner:
        yield from _tensors_in(x)


def modules_outside(module: nn.Module, hidden: Container[int]) -> Iterator[nn.Module]:
    """The module and its submodules outside hidden units; `hidden` are ids of __dict__."""
    yield module
    for child in module._modules.values():
        if child is not None and id(child.__dict__) not in hidden:
            yield from modules_outside(child, hidden)


def _tensors_key(tensors: Sequence[Tensor]) -> Hashable:
    """A key of which tensors are identical, and of their devices and classes."""
    return same_as(tensors), tuple((x.device, type(x)) for x in tensors)


def same_as(values: Sequence[object]) -> tuple[int, ...]:
    """For each value, the index of the first value that is the same object."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(value), place) for place, value in enumerate(values))


@dataclass(frozen=True, slots=True)
class FirstCall:
    """A call that was traced in full, between two marks with `index`."""

    index: int
    unit: Unit
    results: tuple[Tensor, ...]  # distinct tensors that it created
    leaves: tuple[tuple[str, Any], ...]  # of its output: ("result", i), ("input", i) or ("value", x)
    structure: pytree.TreeSpec


@dataclass(frozen=True, slots=True)
class Repetition:
    """A call that repeats a first call and was not traced."""

    first: FirstCall
    unit: Unit


def tensors_of(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors among the leaves of a call's arguments."""
    return [x for x in leaves if isinstance(x, Tensor)]


def call_key(leaves: Sequence[Any], structure: pytree.TreeSpec) -> Hashable | None:
    """A key that is equal for calls with equal arguments; None without tensors or with arguments of unknown equality."""
    if not tensors_of(leaves) or not all(_is_comparable(x) for x in leaves):
        return None
    keys = tuple((same, _leaf_key(x)) for same, x in zip(_same_tensors(leaves), leaves, strict=True))
    return structure, keys, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def shares_container(output: object, arguments: Iterable[object]) -> bool:
    """Whether the output, or an entry of it, is a list or dict among the arguments."""
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
        return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf  # 0.0 differs from -0.0
    where = leaf.device, leaf.storage_offset(), type(leaf)
    return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad, where


def first_call(index: int, unit: Unit, inputs: Sequence[Tensor], output: object) -> FirstCall | None:
    """The record of a first call, or None if it cannot be repeated with certainty."""
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
    """Whether a result is neither a view of an input, nor a parameter, nor part of a larger tensor."""
    storages = {storage_key(x) for x in inputs}
    is_part = isinstance(result, nn.Parameter) or result.storage_offset() != 0
    return not is_part and storage_key(result) not in storages


@contextmanager
def hidden_state(
    model: nn.Module, units: Sequence[Unit], seen: Container[str], look: Callable[[str], None]
) -> Iterator[None]:
    """Inside, units after the second of their group seem to have no state, except those on the paths `seen`.

    `look` is called with the path of a unit whenever its state is read. Two units stay visible, because the first is
    often called on inputs of the model, which require no gradient, and only the second like all others.
    """
    chosen = _to_hide(model, units, seen)
    with ExitStack() as stack:
        for path, module in chosen:
            sealed = _Sealed(look, path)
            stack.enter_context(replaced(module, _parameters=sealed, _buffers=sealed))
        yield


def _to_hide(model: nn.Module, units: Sequence[Unit], seen: Container[str]) -> list[tuple[str, nn.Module]]:
    """The modules that belong only to units to hide, each with the path of its unit."""
    alike = Counter[Hashable]()
    chosen = []
    for unit in units:
        alike[unit.group] += 1
        if alike[unit.group] > 2 and unit.path not in seen:
            chosen.append(unit)
    needed = {id(x) for x in modules_outside(model, {id(unit.module.__dict__) for unit in chosen})}
    inner = {id(x): (unit.path, x) for unit in chosen for x in unit.module.modules()}
    return [(path, module) for path, module in inner.values() if id(module) not in needed]


def _reported(read: Callable[..., Any]) -> Any:
    """A method of dict that first calls `look`."""

    def method(sealed: _Sealed, *args: Any) -> Any:
        sealed.look(sealed.path)
        return read(sealed, *args)

    return method


class _Sealed(dict[str, Any]):
    """An empty dict that reports every read."""

    def __init__(self, look: Callable[[str], None], path: str) -> None:
        super().__init__()
        self.look, self.path = look, path

    __contains__ = _reported(dict.__contains__)
    __getitem__ = _reported(dict.__getitem__)
    __iter__ = _reported(dict.__iter__)
    keys = _reported(dict.keys)
    values = _reported(dict.values)
    items = _reported(dict.items)
    get = _reported(dict.get)


class UncertainRepeatError(Exception):
    """A block may not be a repetition of another one and must be traced in full."""


torch.library.define("gplan::mark", "(Tensor[] tensors, int index) -> ()")
torch.library.define("gplan::repeat", "(Tensor[] inputs, Tensor[] like, int index) -> Tensor[]")


def _mark(tensors: Sequence[Tensor], index: int) -> None:
    """No operation; only its position in the graph matters."""


def _repeat(inputs: Sequence[Tensor], like: Sequence[Tensor], index: int) -> list[Tensor]:
    """Tensors shaped like those of the first call."""
    return [torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device) for x in like]


def _no_gradient(ctx: object, *gradients: object) -> None:
    """A repetition has no gradient during the trace."""
    raise UncertainRepeatError("a repeated block is differentiated while the model is traced")


torch.library.register_fake("gplan::mark", _mark)
torch.library.register_fake("gplan::repeat", _repeat)
torch.library.register_autograd("gplan::repeat", _no_gradient)


class RepeatRecorder:
    """Records the calls of `units` during one attempt to export `model`; units on the paths `seen` stay visible."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], seen: Container[str]) -> None:
        self.firsts: dict[Hashable, FirstCall] = {}
        self.repetitions: list[Repetition] = []
        self.refused = set[Hashable]()  # groups to trace in full the next time
        self.revealed = set[str]()  # units to leave visible the next time
        self.reassigned: tuple[str, ...] = ()  # weights that the forward replaced by new tensors
        self.failed = False
        self.functions: list[CustomFunction] = []  # called, in their order
        self.left_out: tuple[str, ...] = ()  # classes of objects in the output that no stage can pass on
        self.units = units
        self._model, self._seen = model, seen
        self._by_dict = {id(unit.module.__dict__): unit for unit in units}
        self._called = set[str]()
        self.running: Unit | None = None  # whose first call is being traced
        self._inside = False  # the model's forward is running
        self._around: AbstractContextManager[object] = nullcontext()

    @contextmanager
    def recording(self, around: AbstractContextManager[object]) -> Iterator[None]:
        """Inside, an export is recorded; the model's forward runs inside `around`. The model is restored at the end."""
        plain = nn.Module._call_impl

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(plain, module, args, kwargs)

        self._around = around
        hidden = hidden_state(self._model, self.units, self._seen, self.look)
        with attributes_restored(self._model), hidden, replaced(nn.Module, _call_impl=call):
            yield

    def refuse(self, group: Hashable) -> UncertainRepeatError:
        """The error to raise if the blocks of a group must be traced in full."""
        self.refused.add(group)
        self.failed = True
        return UncertainRepeatError()

    def look(self, path: str) -> None:
        """Fail the attempt, because the state of a hidden unit is read."""
        if not self._inside:
            return
        self.failed = True
        if self.running is not None and self.running.path == path:
            self.revealed.add(path)
        raise UncertainRepeatError(f"the state of {path} is read")

    def _call(self, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module.__dict__ is self._model.__dict__ and not self._inside:
            return self._whole(lambda: plain(module, *args, **kwargs))
        unit = self._by_dict.get(id(module.__dict__))
        if unit is None or self.running is not None:
            return plain(module, *args, **kwargs)
        if unit.path in self._called:
            raise self.refuse(unit.group)
        self._called.add(unit.path)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        arguments = call_key(leaves, structure)
        if arguments is None:
            raise self.refuse(unit.group)
        key = unit.group, arguments
        if key in self.firsts:
            return self._repeated(self.firsts[key], unit, leaves)
        output = self._traced(unit, lambda: plain(module, *args, **kwargs), leaves, key)
        after, structure_after = pytree.tree_flatten((args, kwargs))
        is_kept = structure_after == structure and all(x is y for x, y in zip(after, leaves, strict=True))
        if not is_kept or shares_container(output, (*args, *kwargs.values())):
            raise self.refuse(unit.group)
        return output

    def _whole(self, call: Callable[[], Any]) -> Any:
        """The call of the model itself."""
        before = _weights(self._model)
        self._inside = True
        try:
            with self._around, custom_functions(self.functions):
                output = call()
        finally:
            self._inside = False
        after = _weights(self._model)
        self.reassigned = tuple(name for name, tensor in before.items() if after.get(name) is not tensor)
        output, self.left_out = without_objects(output)
        return output

    def _traced(self, unit: Unit, call: Callable[[], Any], leaves: Sequence[Any], key: Hashable) -> Any:
        index = len(self.firsts)
        inputs = tensors_of(leaves)
        torch.ops.gplan.mark(inputs, index)
        self.running = unit
        try:
            output = call()
        finally:
            self.running = None
        first = first_call(index, unit, inputs, output)
        if first is None or module_key(unit.module) != unit.group[0]:
            raise self.refuse(unit.group)
        torch.ops.gplan.mark(list(first.results), index)
        self.firsts[key] = first
        return output

    def _repeated(self, first: FirstCall, unit: Unit, leaves: Sequence[Any]) -> Any:
        inputs = tensors_of(leaves)
        results = torch.ops.gplan.repeat(inputs, list(first.results), len(self.repetitions))
        if [x.requires_grad for x in results] != [x.requires_grad for x in first.results]:
            raise self.refuse(unit.group)
        self.repetitions.append(Repetition(first, unit))
        sources = {"result": results, "input": inputs}
        values = [sources[kind][x] if kind in sources else x for kind, x in first.leaves]
        return pytree.tree_unflatten(values, first.structure)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, and the buffers of submodules; torch.export tracks the model's own buffers itself."""
    buffers = {name: x for name, x in model.named_buffers(remove_duplicate=False) if "." in name}
    return {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
