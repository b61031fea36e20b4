"""Trace a model into one graph of operations, by torch.export(strict=False) in training mode.

Constants keep their values during the trace (gplan_profiler/capture/known_values.py), and modules may be single operations of
it (gplan_profiler/capture/opaque_calls.py); gplan_profiler/capture/tracing_ways.py chooses. Errors name the user's line.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode

from gplan.core.errors import ModelError
from gplan_profiler.capture.authored_layers import caches_empty, named_state
from gplan_profiler.capture.chain import call_arguments, model_state_restored
from gplan_profiler.capture.inplace import writers
from gplan_profiler.capture.known_values import known_constants, state_of_batch
from gplan_profiler.capture.module_attributes import (
    AssignedAttribute,
    assigned_since,
    attributes_of,
    attributes_restored,
)
from gplan_profiler.capture.opaque_calls import (
    CustomFunction,
    ModuleRecords,
    calls_in,
    custom_functions,
    opaque_modules,
    put_custom_functions,
)
from gplan_profiler.capture.python_state import readings_of_changes
from gplan_profiler.capture.value_forms import stage_output
from gplan_profiler.model.compiled import uncompiled
from gplan_profiler.model.error_location import OWN_GRADIENTS, author_line, first_line, own_gradients_text
from gplan_profiler.torch_compat import (
    OpOverload,
    gradient_calls_replaced,
    module_calls_replaced,
    module_moves_replaced,
    nested_traces_allowed,
    parse_to,
    pytree,
    real_values_kept,
    scripts_as_python,
    seen_as_plain_run,
    without_stack_traces,
)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of a model's state: a parameter, a buffer, or a constant found by the trace."""

    name: str
    tensor: Tensor
    is_constant: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """The operations of a model and its state tensors."""

    graph: Graph  # the operations in their order; placeholders are inputs and state
    state: dict[Node, StateTensor]  # what the placeholders of state stand for
    module: GraphModule  # holds the bodies of no_grad blocks and their like
    structure: pytree.TreeSpec  # of what the model returns
    left_out: Mapping[int, str]  # what no stage can return, by place among the leaves of the model's output
    assigned: tuple[AssignedAttribute, ...]  # that the forward sets on modules, which stages do not
    readings: Mapping[str, str]  # by path of state in Python that the forward changed: where it reads that

    @property
    def outputs(self) -> list[Any]:
        """The leaves of the model's output: nodes, and values that are not tensors."""
        output: Any = next(iter(reversed(self.graph.nodes)))
        return list(output.args[0])

    def attribute(self, name: str) -> Any:
        """The object that a get_attr node names."""
        found: Any = self.module
        for part in name.split("."):
            found = getattr(found, part)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to trace a model."""

    as_run: bool = True  # libraries take the path of a plain run, not that for torch.export
    recorded: ModuleRecords = field(default_factory=dict)  # of modules whose calls are single operations
    follows_batch: bool = False  # control flow that depends on values is that of the batch at hand

    def __str__(self) -> str:
        """The end of "the model was traced ..."."""
        words = ["as it is run" if self.as_run else "as libraries run it for torch.export"]
        kinds = sorted({call.call.__name__ for calls in self.recorded.values() for call in calls})
        words += [f"with every {', '.join(kinds)} called as it is"] if kinds else []
        words += ["along the path of one batch"] if self.follows_batch else []
        return ", ".join(words)


def trace(model: nn.Module, inputs: object, way: Way) -> Trace:
    """Trace a model called with `inputs`.

    Raises ModelError, with the author's line, for a model that cannot be traced or that writes into parameters.
    """
    args, kwargs = call_arguments(inputs)
    run = _ModelRun(model)
    try:
        with caches_empty(model):
            found = _traced(run, args, kwargs, way)
    except Exception as error:
        raise _untraceable(model, args, kwargs, error) from error
    if run.reassigned:
        raise ModelError(reassigned(model, run.reassigned[0]))
    _check_outputs(model, found)
    parameters = [node for node, x in found.state.items() if isinstance(x.tensor, nn.Parameter)]
    for node, parameter in writers(found.graph.nodes, parameters):  # only the optimizer may change them
        raise ModelError(parameter_changed(module_path(node), found.state[parameter].name))
    return found


class _ModelRun:
    """What the forward of a model does in an export."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.functions: list[CustomFunction] = []  # called, in their order
        self.reassigned: tuple[str, ...] = ()  # weights that it replaced by new tensors
        self.left_out: Mapping[int, str] = {}  # of the output; see Trace
        self.assigned: tuple[AssignedAttribute, ...] = ()
        self.readings: Mapping[str, str] = {}  # of state in Python that it changed, by path
        self._is_running = False

    @contextmanager
    def recorded(self, around: Sequence[AbstractContextManager[object]]) -> Iterator[None]:
        """Inside, an export is recorded; the forward runs inside `around`. The model is restored at the end."""

        def call(plain: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module.__dict__ is not self.model.__dict__ or self._is_running:
                return plain(module, *args, **kwargs)
            before, attributes = _weights(self.model), attributes_of(self.model)
            self._is_running = True
            try:
                with ExitStack() as stack:
                    for x in (*around, custom_functions(self.functions, self.model)):
                        stack.enter_context(x)
                    self.readings = stack.enter_context(readings_of_changes(self.model))
                    output = plain(module, *args, **kwargs)
            finally:
                self._is_running = False
            after = _weights(self.model)
            self.assigned = assigned_since(attributes)
            self.reassigned = tuple(name for name, tensor in before.items() if after.get(name) is not tensor)
            output, self.left_out = stage_output(output)
            return output

        with attributes_restored(self.model), module_calls_replaced(call):
            yield


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, and the buffers of submodules; torch.export tracks the model's own buffers itself."""
    buffers = {name: x for name, x in model.named_buffers(remove_duplicate=False) if "." in name}
    return {**dict(model.named_parameters(remove_duplicate=False)), **buffers}


def _traced(run: _ModelRun, args: tuple[Any, ...], kwargs: dict[str, Any], way: Way) -> Trace:
    model = run.model
    own = named_state(model)
    inside: list[AbstractContextManager[object]] = [known_constants(), _GradientWorkRefused()]
    if way.follows_batch:
        inside.insert(0, state_of_batch(model, own))
    with ExitStack() as stack:
        if way.follows_batch:
            stack.enter_context(real_values_kept())
            stack.enter_context(torch.random.fork_rng())  # the random numbers that the values draw are given back
        stack.enter_context(opaque_modules(model, way.recorded, run.functions))
        stack.enter_context(run.recorded(inside))
        stack.enter_context(_without_torch_messages())
        if way.as_run:  # libraries otherwise choose code for all shapes, such as a mask that these shapes do not need
            stack.enter_context(seen_as_plain_run())
        stack.enter_context(_without_needless_moves())
        stack.enter_context(scripts_as_python())
        stack.enter_context(without_stack_traces())  # slower than the trace itself
        stack.enter_context(uncompiled())
        stack.enter_context(nested_traces_allowed())
        stack.enter_context(model_state_restored(model))  # gradients of another dtype cannot become fake tensors
        program = torch.export.export(model, args, kwargs, strict=False)
    module = program.graph_module
    for node in calls_in(module, torch.ops.aten._assert_tensor_metadata.default):  # of dtype and device, at every `.to`
        node.graph.erase_node(node)
    _name_dtypes(module)
    put_custom_functions(module, run.functions)
    graph, copies = Graph(owning_module=module), dict[Node, Node]()  # the users of the exported graph can be incomplete
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    canonical = {id(tensor): name for name, tensor in own.items()}  # of tied tensors the last name
    signature, state = program.graph_signature, dict[Node, StateTensor]()
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names |= signature.inputs_to_lifted_tensor_constants
    for node in module.graph.nodes:
        if node.op == "placeholder" and (name := names.get(node.name)) is not None:
            tensor = own[name] if name in own else program.constants[name]
            state[copies[node]] = StateTensor(canonical.get(id(tensor), name), tensor, name not in own)
    structure = program.call_spec.out_spec  # a slow property
    return Trace(graph, state, module, structure, run.left_out, run.assigned, run.readings)


def _name_dtypes(module: GraphModule) -> None:
    """Replace casts to the dtype of another tensor by casts to that dtype, as they need no values of that tensor."""
    for operator in (torch.ops.aten.type_as.default, torch.ops.aten.to.other):
        for node in calls_in(module, operator):
            source, other, *options = node.args
            if source.meta["val"].device == other.meta["val"].device:  # type: ignore[union-attr]
                node.target = torch.ops.aten.to.dtype
                node.args = (source, other.meta["val"].dtype, *options)  # type: ignore[union-attr]


def _without_needless_moves() -> AbstractContextManager[None]:
    """Inside, `.to` of a module that is there already does nothing; otherwise it replaces all parameters of a trace."""
    plain = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, memory_format = parse_to(*args, **kwargs)
        tensors = [*module.parameters(), *module.buffers()]
        is_there = all(
            device in (None, x.device) and (dtype in (None, x.dtype) or not x.is_floating_point()) for x in tensors
        )
        return module if is_there and memory_format is None else plain(module, *args, **kwargs)

    return module_moves_replaced(to)


@contextmanager
def _without_torch_messages() -> Iterator[None]:
    """Suppress the graphs and warnings that a failing export prints, and the one on attributes, which are restored."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The tensor attribute.* assigned during export")
            yield
    finally:
        logging.disable(before)


def _check_outputs(model: nn.Module, found: Trace) -> None:
    leaves = found.outputs
    if not any(isinstance(x, Node) for x in leaves):
        others = [f"{type(x).__name__} ({x!r:.40})" for i, x in enumerate(leaves) if i not in found.left_out]
        kinds = ", ".join(dict.fromkeys([*found.left_out.values(), *others])) or "nothing"
        raise ModelError(
            f"{type(model).__name__} returns {kinds}; expected at least one tensor whose size does not depend on data: "
            "return what the loss needs"
        )
    returned = [found.state[x].name for x in leaves if isinstance(x, Node) and x in found.state]
    if returned:
        raise ModelError(
            f"{type(model).__name__} returns its own parameters or buffers ({', '.join(sorted(returned))}); expected "
            "computed tensors only: leave them out, or return a tensor computed from them"
        )


def module_path(node: Node) -> str:
    """The path of the innermost module that an operation was traced in."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def operation_name(node: Node) -> str:
    """The name of an operation, such as "layer_norm"; in-place variants have the same name. A no_grad block: "no_grad"."""
    if isinstance(node.target, OpOverload):
        return str(node.target._schema.name).rpartition("::")[2].strip("_")
    name = getattr(node.target, "__name__", str(node.target))
    return "no_grad" if name == "wrap_with_set_grad_enabled" else name


class UntraceableError(ModelError):
    """A model cannot be traced in one way; another way may work."""


_USES_OF_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
_PLAIN = (RuntimeError, TypeError, ValueError, IndexError, KeyError)
_OF_TRACING = ("data-dependent", "data dependent", "fake", "symbolic", "proxy", "export", "trace", "subclass", "symint")
_DATA_OF_A_TENSOR = "fake tensor in the exported program constant"  # the message of torch.export for `.data`


def parameter_changed(path: str, parameter: str) -> str:
    """The message for a module at `path` that writes into a parameter."""
    return (
        f"{_who(path)} writes into the parameter {parameter} in its forward; expected a forward "
        "that leaves parameters as they are, since it runs once for every micro-batch: compute a new tensor from the "
        "parameter and use that, keep it as a buffer, or change the parameter after the optimizer's step"
    )


def _untraceable(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> ModelError:
    """The error for a model that torch.export rejects with `error`."""
    if isinstance(error, ModelError):
        return error
    where = author_line(error)
    if isinstance(error, _GradientWorkError):
        return ModelError(
            f"the forward of {type(model).__name__} {error} ({where}), which stages would not do, as they are traced operations: "
            "write a torch.autograd.Function, whose backward gets the gradient, or do it in the training script"
        )
    if _DATA_OF_A_TENSOR in str(error):
        for name, is_changed in _parameters_whose_data_is_used(model, args, kwargs):
            path = name.rpartition(".")[0]
            if is_changed:
                return ModelError(parameter_changed(path, name))
            return ModelError(
                f"{_who(path)} reads `.data` of the parameter {name} in its forward, which a trace "
                "cannot follow; expected .detach(), which has the same values"
            )
    if (text := own_gradients_text(error)) is not None:
        return ModelError(f"{type(model).__name__} cannot be captured: {text}")
    if _takes_gradients(model, args, kwargs):
        return ModelError(f"{type(model).__name__} cannot be captured: {OWN_GRADIENTS}")
    reason = first_line(error) or type(error).__name__
    text = str(error).lower()
    is_of_tracing = any(word in text for word in _OF_TRACING)
    if type(error) in _PLAIN and not is_of_tracing:  # fails on these inputs without export too
        return UntraceableError(f"{type(model).__name__} fails: {where or 'in the model'}: {reason}")
    return UntraceableError(
        f"{type(model).__name__} cannot be captured by torch.export: {where or 'in the model'}: {reason}. "
        "If the control flow of that line depends on the values of a tensor (an `if`, a loop, .item()), use torch.where "
        "or torch.cond, or define the model as an nn.Sequential or a list of stages, which is cut between its children "
        "without tracing"
    )


def _takes_gradients(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the forward of a model calls torch.autograd itself."""
    found = list[str]()

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        found.append("called")
        raise UntraceableError("the forward computes gradients")

    try:
        with model_state_restored(model), gradient_calls_replaced(refuse), _without_torch_messages():
            model(*args, **kwargs)
    except Exception:  # of a model that fails without export too, or on fake weights
        pass
    return bool(found)


class _GradientWorkError(Exception):
    """A forward works on gradients, which a trace leaves out."""


_HOOK = "registers a hook on the gradient of a tensor"
_GRADIENT_WORK: Mapping[Any, tuple[str, type[Tensor]]] = {  # what it is, and the tensors whose work is refused
    Tensor.register_hook: (_HOOK, Tensor),
    Tensor.register_post_accumulate_grad_hook: (_HOOK, Tensor),
    Tensor.grad.__get__: ("reads the gradient of a parameter", nn.Parameter),  # type: ignore[union-attr]
}


class _GradientWorkRefused(TorchFunctionMode):
    """Raises _GradientWorkError where a forward registers hooks on tensors, or reads gradients of parameters."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        work, kind = _GRADIENT_WORK.get(function, ("", Tensor))
        if work and isinstance(args[0], kind):
            raise _GradientWorkError(work)
        return function(*args, **(kwargs or {}))


class _DataUses(TorchFunctionMode):
    """Collects the ids of tensors whose `.data` is read or assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _USES_OF_DATA:
            self.found.append(id(args[0]))
        return function(*args, **(kwargs or {}))


def _parameters_whose_data_is_used(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, bool]]:
    """The names of these parameters, and whether forward changes them; found by running it on copies."""
    copies: dict[str, Tensor] = {name: nn.Parameter(x.detach().clone()) for name, x in model.named_parameters()}
    uses = _DataUses()
    try:
        with model_state_restored(model), uses, _without_torch_messages():
            torch.func.functional_call(model, copies, args, kwargs)
    except Exception:  # a model that fails without export too is described by the exporter's error
        return []
    used = [name for name, x in copies.items() if id(x) in uses.found]
    return [(name, not torch.equal(copies[name], model.get_parameter(name))) for name in used]


def reassigned(model: nn.Module, name: str) -> str:
    """The message for a forward that replaces the parameter or buffer `name` by a new tensor."""
    path, _, last = name.rpartition(".")
    if name in dict(model.named_parameters(remove_duplicate=False)):
        return parameter_changed(path, name)
    return (
        f"{_who(path)} assigns a new tensor to the buffer {name} in its forward, which a trace cannot keep; expected a "
        f"buffer that is written in place: self.{last}.copy_(...)"
    )


def _who(path: str) -> str:
    return f"layer {path}" if path else "the model itself"


_ALIGNED_BYTES = 16  # rows of the result of torch._grouped_mm begin at multiples of this


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor like the result: one group for each expert, which is a range of rows, of columns, or of the inner size.

    A CPU multiplies float32, bfloat16 and float16, but torch's own fake kernel refuses all but bfloat16 (torch 2.13), so
    that no mixture of experts could be traced as it runs. Shapes are those of torch.nn.functional.grouped_mm.
    """
    if a.dim() == 3 and b.dim() == 3:
        size = [a.shape[0], a.shape[1], b.shape[2]]
    elif a.dim() == b.dim():
        assert offs is not None, "two matrices are multiplied in groups that end at offs"
        size = [offs.shape[0], a.shape[0], b.shape[1]]
    else:
        size = [a.shape[-2], b.shape[-1]]
    made = a.new_empty(size, dtype=out_dtype or a.dtype)
    per_row = _ALIGNED_BYTES // made.element_size()
    row = (size[-1] + per_row - 1) // per_row * per_row
    return made if row == size[-1] else made.new_empty_strided(size, [size[-2] * row, row, 1][-len(size) :])


torch.library.register_fake("aten::_grouped_mm", _grouped_mm, allow_override=True)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Tensors like the losses of the samples, and like the backward's workspace, whose last size depends on the targets.

    torch has no fake kernel for lengths that are tensors.
    """
    num_steps, num_samples = log_probs.shape[:2]
    return log_probs.new_empty([num_samples]), log_probs.new_empty([num_samples, num_steps, 1])


torch.library.register_fake("aten::_ctc_loss.Tensor", _ctc_loss, allow_override=True)
