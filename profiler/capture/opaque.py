"""Tracing a block once and its likes not at all: what happens while a model is exported.

A unit of the model (profiler/capture/layers.py) that is alike to one traced before it, and is called alike, becomes one
call of the operator `gplan::repeat`, whose results are shaped like those of the first call. Two calls of `gplan::mark`
enclose the operations of every first call; profiler/capture/expand.py copies them afterwards. The state of units that
are expected to repeat is hidden meanwhile, since the exporter's work grows with every parameter; code of the model that
looks at it all the same, and any doubt whether a call repeats another, ends the attempt: `refused` and `revealed` say
how to do better.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from profiler.capture.attributes import kept_attributes
from profiler.capture.blocks import Unit
from profiler.capture.calls import FirstCall, Repetition, call_key, first_call, shares_container, tensors_of
from profiler.capture.functions import CustomFunction, custom_functions
from profiler.capture.hidden import hidden_state
from profiler.capture.likeness import module_key


class Doubt(Exception):
    """A block is perhaps no repetition of another: it must be traced in full."""


torch.library.define("gplan::mark", "(Tensor[] tensors, int index) -> ()")
torch.library.define("gplan::repeat", "(Tensor[] inputs, Tensor[] like, int index) -> Tensor[]")


def _mark(tensors: Sequence[Tensor], index: int) -> None:
    """Nothing: only the place in the graph counts."""


def _repeat(inputs: Sequence[Tensor], like: Sequence[Tensor], index: int) -> list[Tensor]:
    """Tensors shaped like those of the first call."""
    return [torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device) for x in like]


def _no_gradient(ctx: object, *gradients: object) -> None:
    """A forward that differentiates through a repetition cannot have it."""
    raise Doubt("a repeated block is differentiated while the model is traced")


torch.library.register_fake("gplan::mark", _mark)
torch.library.register_fake("gplan::repeat", _repeat)
torch.library.register_autograd("gplan::repeat", _no_gradient)


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
        self.functions: list[CustomFunction] = []  # called, in their order
        self.units = units
        self._model, self._seen = model, seen
        self._by_dict = {id(unit.module.__dict__): unit for unit in units}
        self._called = set[str]()
        self._running: Unit | None = None
        self._inside = False  # the model's forward is running
        self._around: AbstractContextManager[object] = nullcontext()

    @property
    def is_of_use(self) -> bool:
        """Whether any block may repeat another."""
        return bool(self.units)

    @property
    def running(self) -> Unit | None:
        """The unit whose first call is being traced."""
        return self._running

    @contextmanager
    def recording(self, around: AbstractContextManager[object]) -> Iterator[None]:
        """The export to record runs inside; the model is as it was afterwards. Its forward runs inside `around`."""
        plain = nn.Module._call_impl

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(plain, module, args, kwargs)

        self._around = around
        with kept_attributes(self._model), hidden_state(self._model, self.units, self._seen, self.look):
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
        unit = self._by_dict.get(id(module.__dict__))
        if unit is None or self._running is not None:
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
        return output

    def _traced(self, unit: Unit, call: Callable[[], Any], leaves: Sequence[Any], key: Hashable) -> Any:
        index = len(self.firsts)
        inputs = tensors_of(leaves)
        torch.ops.gplan.mark(inputs, index)
        self._running = unit
        try:
            output = call()
        finally:
            self._running = None
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
    """All parameters, and the buffers of the modules inside; torch.export follows the model's own buffers itself."""
    buffers = {name: x for name, x in model.named_buffers(remove_duplicate=False) if "." in name}
    return {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
