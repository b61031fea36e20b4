"""Calls that stay one operation of a trace: of custom autograd functions, and of modules that cannot be traced.

torch.export traces into the forward of a torch.autograd.Function and drops its backward. Here a call becomes the
operator `gplan::function` during the trace, and a CustomFunction afterwards. Under no_grad, and in torch.vmap
where no argument wants a gradient, it is traced like other code. Exception: torch's reentrant checkpoint is traced
through, because the plan decides what is recomputed.

The control flow of a looped mixture of experts depends on the values of tensors: on which experts tokens were routed to.
A plain run records what every call of such a module returns. During the trace a call returns tensors of the same specs,
and in a stage the module itself is called, with the stage's own parameters and buffers. Tensors that a call leaves in
attributes, such as an auxiliary loss, are results too. Left out: modules that read parameters of other modules, and those
with moving averages of norms, which have to be seen in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.utils.checkpoint import CheckpointFunction

from gplan.core.errors import ModelError
from gplan_profiler.capture.authored_layers import OF_EVERY_MODULE, module_key, named_state
from gplan_profiler.capture.known_values import give_values
from gplan_profiler.capture.value_forms import Form
from gplan_profiler.memory.allocations import storage_key, tensors_in
from gplan_profiler.torch_compat import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    function_calls_replaced,
    is_wrapped,
    module_calls_replaced,
    pytree,
    running_tracer,
    untraced,
)

torch.library.define("gplan::function", "(Tensor(a!)[] tensors, int index) -> Tensor[]")
_FUNCTION = torch.ops.gplan.function.default


@dataclass(frozen=True)
class CustomFunction:
    """A call that stays one operation, of a custom autograd function or of another callable, from tensors to tensors."""

    function: type[torch.autograd.Function] | Callable[..., Any]
    arguments: Form
    writes: tuple[int, ...]  # indices of the tensors that it writes into
    shares: tuple[int, ...]  # indices of the tensors that share memory with a result
    copies: tuple[int, ...] = ()  # indices of the tensors that are copied before the call

    @property
    def __name__(self) -> str:
        """The name in generated code."""
        return str(self.function.__name__)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The returned tensors, each once."""
        given = [x.clone() if place in self.copies else x for place, x in enumerate(tensors)]
        args, kwargs = self.arguments.value(given)
        output = getattr(self.function, "apply", self.function)(*args, **kwargs)
        return Form.of_leaves(*pytree.tree_flatten(output))[1]

    def on_copies(self) -> CustomFunction:
        """The same call on copies of the arguments that it writes into."""
        shares = tuple(place for place in self.shares if place not in self.writes)
        return replace(self, writes=(), shares=shares, copies=self.writes)


def custom_functions(found: list[CustomFunction], model: nn.Module) -> AbstractContextManager[None]:
    """Inside, calls of custom functions by the model are traced as operators and appended to `found`."""

    def apply(plain: Callable[..., Any], function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        tracer = running_tracer()
        if tracer is None or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        arguments, tensors = Form.of_leaves(*pytree.tree_flatten((args, kwargs)))
        if any(map(is_wrapped, tensors)):  # inside a transform such as torch.vmap
            takes_context = function.setup_context is torch.autograd.Function.setup_context
            can_be_traced = not takes_context and not any(x.requires_grad for x in tensors)
            return (function.forward if can_be_traced else plain)(*args, **kwargs)
        if function is CheckpointFunction:  # its first arguments: the function, and whether it keeps random numbers
            with torch.set_grad_enabled(any(isinstance(x, Tensor) and x.requires_grad for x in args)):
                return args[0](*args[2:])
        before = [x._version for x in tensors]
        with untraced(), _Reads(tensors, lambda x: isinstance(x, FakeTensor)) as reads:
            output = plain(*args, **kwargs)
        if reads.has_others:
            raise ModelError(
                f"the custom autograd function {function.__name__} reads a tensor of the model that is not among its arguments; "
                "expected every parameter, buffer and activation that it uses to be an argument of apply(...), so that the "
                "stage that runs it has them"
            )
        writes = tuple(place for place, x in enumerate(tensors) if x._version != before[place])
        made = Form.of_leaves(*pytree.tree_flatten(output))[1]
        memory = {storage_key(x) for x in made}
        shares = tuple(place for place, x in enumerate(tensors) if storage_key(x) in memory)
        _add_to_graph(CustomFunction(function, arguments, writes, shares), tensors, made, tracer, found)
        return output

    return function_calls_replaced(apply, model.modules())


def put_custom_functions(module: GraphModule, found: list[CustomFunction]) -> None:
    """Replace the operators in a traced graph by the custom functions in `found`."""
    for node in calls_in(module, _FUNCTION):
        tensors, index = node.args
        node.target, node.args = found[index], tuple(tensors)  # type: ignore[index, arg-type]


def calls_in(module: GraphModule, operator: OpOverload) -> Iterator[Node]:
    """The calls of an operator in the graph of a module and in its inner graphs, which are recompiled afterwards."""
    for body in [x for x in module.modules() if isinstance(x, GraphModule)]:
        calls = body.graph.find_nodes(op="call_function", target=operator)
        yield from calls
        if calls and body is not module:  # only the graph of the module itself is used
            body.recompile()


def _add_to_graph(
    call: CustomFunction, tensors: Sequence[Tensor], made: Sequence[Tensor], tracer: Any, found: list[CustomFunction]
) -> None:
    """Add a call on some tensors of a trace, which made others, as one operation to the graph and to `found`."""
    proxies = [tracer.unwrap_proxy(x) for x in tensors]
    node = tracer.create_proxy("call_function", _FUNCTION, (proxies, len(found)), {})
    found.append(call)
    track_tensor_tree(list(made), node, constant=None, tracer=tracer)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects operations that read tensors for which `is_foreign` is true, and are no results of operations inside."""

    def __init__(self, given: Sequence[Tensor], is_foreign: Callable[[Tensor], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_others, self._is_foreign = False, is_foreign
        self._known = {storage_key(x): x for x in given}  # kept, so that no other storage gets the same key

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = (x for x in tensors_in((args, kwargs)) if self._is_foreign(x))
        self.has_others |= any(storage_key(x) not in self._known for x in read)
        output = function(*args, **(kwargs or {}))
        self._known.update({storage_key(x): x for x in tensors_in(output)})
        return output


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
    paths = {id(x.__dict__): path for path, x in model.named_modules() if type(x) in classes}
    running: list[str] = []

    def call(plain: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(module.__dict__))
        if path is None or running:
            return plain(module, *args, **kwargs)
        running.append(path)
        try:
            output, record = _recorded(model, path, plain, args, kwargs)
        finally:
            running.clear()
        found.setdefault(path, []).append(record)
        return output

    with module_calls_replaced(call):
        run()
    return found


def _recorded(
    model: nn.Module, path: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ModuleRecord]:
    module = model.get_submodule(path)
    who = f"layer {path} ({type(module).__name__})"
    if any(isinstance(x, nn.Module) and getattr(x, "running_mean", None) is not None for x in module.modules()):
        raise ModelError(f"{who} has a norm with moving averages, which must be part of a traced graph")
    state = named_state(module)
    _, tensors = _flat(state, args, kwargs)
    before, writes_before = _plain_tensors(module), [x._version for x in tensors]
    others = {storage_key(x) for x in (*model.parameters(), *model.buffers())} - {*map(storage_key, state.values())}
    with _Reads((), lambda x: storage_key(x) in others) as reads:
        output = run(module, *args, **kwargs)
    if reads.has_others or any(named_state(module).get(name) is not x for name, x in state.items()):
        raise ModelError(f"{who} reads parameters of other modules, or assigns a new tensor to one of its own")
    after = _plain_tensors(module)
    attributes = tuple(key for key, tensor in after.items() if before.get(key) is not tensor)
    made = output, [after[key] for key in attributes]
    form, results = Form.of_leaves(*pytree.tree_flatten(_in_memory_of_its_own(made, tensors)))
    call = ModuleCall(module_key(module), tuple(state), attributes, module)
    writes = tuple(i for i, x in enumerate(tensors) if x._version != writes_before[i])
    like = tuple(fresh(x, requires_grad=x.requires_grad, device=torch.device("meta")) for x in results)
    return output, ModuleRecord(call, form, like, writes)


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


def opaque_modules(
    model: nn.Module, recorded: ModuleRecords, found: list[CustomFunction]
) -> AbstractContextManager[None]:
    """Inside, the recorded calls of a trace of the model are single operations, which are appended to `found`."""
    paths = {id(model.get_submodule(path).__dict__): path for path in recorded}
    calls = {path: iter(x) for path, x in recorded.items()}

    def call(plain: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path, tracer = paths.get(id(module.__dict__)), running_tracer()
        if path is None or tracer is None:
            return plain(module, *args, **kwargs)
        record = next(calls[path])
        arguments, tensors = _flat(named_state(module), args, kwargs)
        with untraced():
            made = [fresh(x, requires_grad=x.requires_grad, device=tensors[0].device) for x in record.results]
        function = CustomFunction(record.call, arguments, record.writes, ())
        give_values(made, function, tensors)
        _add_to_graph(function, tensors, made, tracer, found)
        output, attributes = record.form.value(made)
        for (inner, name), value in zip(record.call.attributes, attributes, strict=True):
            setattr(module.get_submodule(inner), name, value)
        return output

    return module_calls_replaced(call)


def fresh(value: Any, *, requires_grad: bool, device: torch.device | None = None) -> Any:
    """A tensor like another one, for a trace; not a leaf, so that operations may write into it."""
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    differentiable = value.dtype.is_floating_point or value.dtype.is_complex
    return made.requires_grad_().clone() if requires_grad and differentiable else made
