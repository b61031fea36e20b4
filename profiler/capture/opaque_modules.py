"""Modules that cannot be traced but can be called: each call is one operation of the trace.

The control flow of a looped mixture of experts depends on the values of tensors: on which experts tokens were routed to.
A plain run records what every call of such a module returns. During the trace a call returns tensors of the same specs,
and in a stage the module itself is called, with the stage's own parameters and buffers. Tensors that a call leaves in
attributes, such as an auxiliary loss, are results too. Left out: modules that read parameters of other modules, and those
with moving averages of norms, which have to be seen in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gplan.core.errors import ModelError
from profiler.capture.authored_layers import OF_EVERY_MODULE, module_key, named_state, replaced
from profiler.capture.autograd_functions import CustomFunction, add_to_graph, untraced
from profiler.capture.known_values import give_values
from profiler.capture.value_forms import Form
from profiler.memory.allocations import storage_key, tensors_in
from profiler.model.materialise import on_meta


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """Calls a module with given parameters and buffers; returns its output and the attributes that it sets."""

    key: Hashable  # equal for modules that are alike
    names: tuple[str, ...]  # of its parameters and buffers
    attributes: tuple[tuple[str, str], ...]  # path of the submodule and name
    module: nn.Module = field(compare=False)

    @property
    def __name__(self) -> str:
        """The name in generated code."""
        return type(self.module).__name__

    def __call__(self, state: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output, and the tensors of the attributes; each in memory of its own."""
        owners = [(self.module.get_submodule(path).__dict__, name) for path, name in self.attributes]
        before = [attributes.get(name) for attributes, name in owners]
        tensors = dict(zip(self.names, state, strict=True))
        output = functional_call(self.module, tensors, args, kwargs, tie_weights=False)
        made = output, [attributes[name] for attributes, name in owners]
        for (attributes, name), value in zip(owners, before, strict=True):
            attributes[name] = value  # the tensor holds the graph of this micro-batch
        return _in_memory_of_its_own(made, (state, args, kwargs))


def _in_memory_of_its_own(made: Any, given: Any) -> Any:
    taken = set(map(storage_key, tensors_in(given)))

    def separate(tensor: Tensor) -> Tensor:
        is_shared = storage_key(tensor) in taken
        taken.add(storage_key(tensor))
        return tensor.clone() if is_shared else tensor

    return pytree.tree_map_only(Tensor, separate, made)


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """What one call of a module did in a plain run."""

    call: ModuleCall
    form: Form  # of what the call returns
    results: tuple[Tensor, ...]  # on the meta device
    writes: tuple[int, ...]  # indices of the tensors that it writes into, among its state and arguments


ModuleRecords = Mapping[str, Sequence[ModuleRecord]]
"""The calls of modules in their order, by the path of the module."""


def recorded_calls(model: nn.Module, run: Callable[[], object], classes: Collection[type]) -> ModuleRecords:
    """The outermost calls of the modules of some classes while `run` calls the model.

    Raises ModelError for a module that cannot be one operation.
    """
    found: dict[str, list[ModuleRecord]] = {}
    paths = _paths(model, classes)
    running: list[str] = []

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(module.__dict__))
        if path is None or running:
            return plain(module, *args, **kwargs)
        running.append(path)
        try:
            output, recorded = _recorded(model, path, lambda: plain(module, *args, **kwargs), args, kwargs)
        finally:
            running.clear()
        found.setdefault(path, []).append(recorded)
        return output

    plain: Callable[..., Any] = nn.Module._call_impl
    with replaced(nn.Module, _call_impl=call):
        run()
    return found


def _paths(model: nn.Module, classes: Collection[type]) -> dict[int, str]:
    return {id(x.__dict__): path for path, x in model.named_modules() if type(x) in classes}


def _recorded(
    model: nn.Module, path: str, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ModuleRecord]:
    module = model.get_submodule(path)
    who = f"layer {path} ({type(module).__name__})"
    if any(isinstance(x, nn.Module) and getattr(x, "running_mean", None) is not None for x in module.modules()):
        raise ModelError(f"{who} has a norm with moving averages, which must be part of a traced graph")
    state = named_state(module)
    _, tensors = _flat(state, args, kwargs)
    before, writes_before = _plain_tensors(module), [x._version for x in tensors]
    others = {storage_key(x) for x in (*model.parameters(), *model.buffers())} - {*map(storage_key, state.values())}
    with _ParameterReads(others) as reads:
        output = run()
    if reads.has_foreign or any(named_state(module).get(name) is not x for name, x in state.items()):
        raise ModelError(f"{who} reads parameters of other modules, or assigns a new tensor to one of its own")
    after = _plain_tensors(module)
    attributes = tuple(key for key, tensor in after.items() if before.get(key) is not tensor)
    made = output, [after[key] for key in attributes]
    form, results = Form.of_leaves(*pytree.tree_flatten(_in_memory_of_its_own(made, tensors)))
    call = ModuleCall(module_key(module), tuple(state), attributes, module)
    writes = tuple(i for i, x in enumerate(tensors) if x._version != writes_before[i])
    return output, ModuleRecord(call, form, tuple(on_meta(x).requires_grad_(x.requires_grad) for x in results), writes)


def _plain_tensors(module: nn.Module) -> dict[tuple[str, str], Tensor]:
    """The tensors in attributes that are neither parameters nor buffers."""
    return {
        (path, name): value
        for path, inner in module.named_modules()
        for name, value in inner.__dict__.items()
        if isinstance(value, Tensor) and name not in OF_EVERY_MODULE
    }


def _flat(state: Mapping[str, Tensor], args: Any, kwargs: Any) -> tuple[Form, tuple[Tensor, ...]]:
    """The form and the tensors of a call's arguments: those of ModuleCall, which has none by name."""
    return Form.of_leaves(*pytree.tree_flatten((([*state.values()], args, kwargs), {})))


class _ParameterReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects operations that read one of some storages."""

    def __init__(self, storages: Collection[object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_foreign, self._storages = False, storages

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_foreign |= any(storage_key(x) in self._storages for x in tensors_in((args, kwargs)))
        return function(*args, **(kwargs or {}))


@contextmanager
def opaque_modules(model: nn.Module, recorded: ModuleRecords, found: list[CustomFunction]) -> Iterator[None]:
    """Inside, the recorded calls of a trace of the model are single operations, which are appended to `found`."""
    paths = {id(model.get_submodule(path).__dict__): path for path in recorded}
    calls = {path: iter(x) for path, x in recorded.items()}
    plain: Callable[..., Any] = nn.Module._call_impl

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(module.__dict__))
        mode = _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)  # type: ignore[no-untyped-call]
        if path is None or mode is None:
            return plain(module, *args, **kwargs)
        record = next(calls[path])
        arguments, tensors = _flat(named_state(module), args, kwargs)
        with untraced():
            made = [fresh(x, requires_grad=x.requires_grad, device=tensors[0].device) for x in record.results]
        function = CustomFunction(record.call, arguments, record.writes, ())
        give_values(made, function, tensors)
        add_to_graph(function, tensors, made, mode.tracer, found)
        output, attributes = record.form.value(made)
        for (inner, name), value in zip(record.call.attributes, attributes, strict=True):
            setattr(module.get_submodule(inner), name, value)
        return output

    with replaced(nn.Module, _call_impl=call):
        yield


def fresh(value: Any, *, requires_grad: bool, device: torch.device | None = None) -> Any:
    """A tensor like another one, for a trace; not a leaf, so that operations may write into it."""
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    differentiable = value.dtype.is_floating_point or value.dtype.is_complex
    return made.requires_grad_().clone() if requires_grad and differentiable else made
