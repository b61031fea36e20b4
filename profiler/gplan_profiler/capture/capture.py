"""Capture a model as a chain of layers.

An nn.Sequential is cut between its children. Any other model is exported at the micro-batch shape (strict=False,
training mode), its in-place operations are made safe, and each operation is assigned to a layer. A boundary is the set
of values made before it and read after it, so skips and masks pass from stage to stage. Parameters stay the model's own
objects.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from gplan.core import Granularity
from gplan.core.errors import ModelError, UsageError
from gplan.core.precision import AS_MADE, Precision
from gplan.core.profile import JOINED, modules_by_operation
from gplan_profiler.capture.authored_layers import unit_paths
from gplan_profiler.capture.chain import AtLayer, Chain, Route, Tensors, TensorSpec, autocast
from gplan_profiler.capture.division import MOST_LAYERS
from gplan_profiler.capture.division import divided as modules_to_divide
from gplan_profiler.capture.equal_layers import gradient_flags, layer_form
from gplan_profiler.capture.grouping import (
    Group,
    groups_by_module,
    inseparable_operations,
    joined_by_unit,
    merged,
    operations_of,
    split_regions,
)
from gplan_profiler.capture.inplace import Touched, written_state
from gplan_profiler.capture.moving_averages import RunningNorm, cumulative_momentum_one, graph_calls, running_norms
from gplan_profiler.capture.operation_layers import depends_on_values, groups_by_operation
from gplan_profiler.capture.python_state import StateError, changed_state_refused
from gplan_profiler.capture.sequence import SequentialChain
from gplan_profiler.capture.state_readings import may_draw, repeat_state_readings, without_repeats
from gplan_profiler.capture.trace import Trace
from gplan_profiler.capture.tracing_ways import captured_in_steps, check_calls
from gplan_profiler.model.compiled import uncompiled
from gplan_profiler.torch_compat import autocast_replaced, pytree, replaced


def capture(
    model: nn.Module,
    inputs: object,
    *,
    granularity: Granularity = "layer",
    training: bool = True,
    traced: str | None = None,
    divided: tuple[str, ...] | None = None,
    precision: Precision = AS_MADE,
    loss: Callable[..., Any] | None = None,
) -> Chain:
    """The layers of `model`, put in training or evaluation mode, for inputs of one micro-batch.

    A model already in training mode is left as it is, because its author may have put parts in evaluation mode.
    `inputs` is a tensor, a tuple (several arguments) or a dict (by name); the chain is valid for these shapes only. With
    granularity "layer" a layer is one that the author wrote; with "auto" those that are too large are divided
    (gplan_profiler/capture/division.py); with "op" a layer is one main operation with the light ones around it. `traced`
    and `divided` are how a profile traced the model and what it divided; None: there is no profile yet. `precision` is
    that of the model, in whose autocast the layers run; `loss` is computed from its output. Raises ModelError, with the
    author's line, where capture is impossible, for a loss that reads state in Python which the forward changes, and for
    a model with an autocast of its own in another precision than that of its file; UsageError for another granularity.
    """
    if granularity not in get_args(Granularity):
        raise UsageError(
            f"granularity {granularity!r} is not known; expected one of {', '.join(get_args(Granularity))}"
        )
    if model.training != training:
        model.train(training)
    own = (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
    is_sequence = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward and not any(own)
    with uncompiled(), autocast(precision), _no_other_autocast(precision):
        chain: Chain | None = None
        if not is_sequence or granularity == "op" or _may_be_divided(model, granularity, divided):
            try:
                chain = exported(model, inputs, granularity=granularity, traced=traced, divided=divided, loss=loss)
            except StateError:
                raise
            except ModelError as error:
                if not is_sequence:
                    raise
                if granularity == "op":
                    raise ModelError(
                        f"{error}. Granularity op needs an exported model: without --granularity op this nn.Sequential is "
                        "cut between its children without export"
                    ) from error
        if chain is None or (is_sequence and granularity == "auto" and (chain.traced or not chain.divided)):
            with changed_state_refused(loss, model):
                chain = sequence = SequentialChain(model, inputs)  # type: ignore[arg-type]
            check_calls(model, inputs, sequence.readings, compared=traced is None)
    chain.precision = precision
    return chain


def _may_be_divided(model: nn.Module, granularity: Granularity, divided: tuple[str, ...] | None) -> bool:
    """Whether children of an nn.Sequential may be, or were, too large for a good cut."""
    if granularity == "layer" or divided is not None:
        return bool(divided)
    children = [*model.children()]
    has_parts = (sum(1 for x in child.modules() if x._parameters) > 1 for child in children)
    return len(children) <= MOST_LAYERS and any(has_parts)


def _no_other_autocast(precision: Precision) -> AbstractContextManager[None]:
    """Inside, code that enables autocast raises ModelError, as it would compute in another precision."""
    if precision == AS_MADE:
        return nullcontext()
    enter: Callable[[torch.autocast], Any] = torch.autocast.__enter__

    def refusing(self: torch.autocast) -> Any:
        if self._enabled:
            raise ModelError(
                f"the model enables torch.autocast itself, which clashes with precision {precision.name}: leave the precision "
                "out, or the model's own autocast"
            )
        return enter(self)

    return autocast_replaced(refusing)


def exported(
    model: nn.Module,
    inputs: object,
    *,
    granularity: Granularity = "layer",
    traced: str | None = None,
    divided: tuple[str, ...] | None = None,
    loss: Callable[..., Any] | None = None,
) -> Chain:
    """The layers of a model in training mode by torch.export; raises ModelError, with the author's line."""

    def cut(traced: Trace) -> ExportedChain:
        parts = divided or ()
        if granularity == "auto" and divided is None:
            parts = modules_to_divide(traced, model)
        units = unit_paths(model, parts)
        split_regions(traced.graph, traced.module, model, units, traced.state)
        copies = repeat_state_readings(traced.graph, traced.state)
        inseparable = inseparable_operations(traced.graph, traced.state, model)
        own = modules_by_operation(parts)
        if granularity == "op" or own:
            operations = operations_of(traced.graph, model)
            groups = groups_by_operation(traced, model)
            inseparable += [x.users for x in written_state(operations, traced.state) if x.users != x.writers]
            if granularity != "op":
                groups = joined_by_unit(groups, model, units, own)
        else:
            groups = groups_by_module(traced.graph, model, units)
        pairs = [(x, y) for x, y in pairwise(groups) if f"{JOINED}{y.name}".split("#")[0] in parts]
        inseparable += [{x.nodes[-1], y.nodes[0]} for x, y in pairs]
        groups = merged(traced.graph, groups, inseparable)
        chain = ExportedChain(model, traced, [replace(x, nodes=without_repeats(x.nodes, copies)) for x in groups])
        chain.divided = parts
        return chain

    with cumulative_momentum_one(model), without_generation_cache(model):
        return captured_in_steps(model, inputs, cut, traced=traced, loss=loss)


@contextmanager
def without_generation_cache(model: nn.Module) -> Iterator[None]:
    """Inside, models of transformers keep no cache of keys and values, which serves generation and not training."""
    configs = {id(x): x for module in model.modules() if (x := vars(module).get("config")) is not None}
    with ExitStack() as stack:
        for config in configs.values():
            if getattr(config, "__dict__", {}).get("use_cache") is True:
                stack.enter_context(replaced(config, use_cache=False))
        yield


class ExportedChain(Chain):
    """A chain whose layers are operations of an exported program."""

    def __init__(self, model: nn.Module, traced: Trace, groups: Sequence[Group], *, digest: str | None = None) -> None:
        super().__init__(model, [group.name for group in groups], [group.kind for group in groups])
        self._trace, self.assigned = traced, traced.assigned
        self._groups = tuple(groups)
        self._digest = digest
        self._place = place = {node: i for i, group in enumerate(groups) for node in group.nodes}
        self._boundaries: list[list[Node]] = [[] for _ in range(len(groups) + 1)]  # made before each and read after it
        self._routes: dict[Node, Route] = {}  # of the values that cross a boundary
        for node in traced.graph.nodes:
            is_input = node.op == "placeholder"  # one that is no tensor is a constant of the trace
            if node in traced.state or node.op in ("output", "get_attr"):
                continue
            if is_input and not isinstance(node.meta.get("val"), Tensor):
                continue
            producer, readers = place.get(node), {place.get(x, len(groups)) for x in node.users}
            first, last = 0 if producer is None else producer + 1, max([0 if is_input else -1, *readers])
            for boundary in range(first, last + 1):
                self._boundaries[boundary].append(node)
                self._routes[node] = Route(producer, tuple(sorted(readers - {producer})))

    def digest(self) -> str:
        """The digest as captured, independent of the order."""
        return self._digest or super().digest()

    def _stage(self, first: int, end: int, at_layer: AtLayer | None, sends: bool) -> nn.Module:
        """Layers [first, end) as a GraphModule that keeps the parameters' own names."""
        graph, copies, state = Graph(), dict[Node, Node](), self._trace.state
        for node in self._boundaries[first]:
            copies[node] = graph.placeholder(node.name)
        attributes: dict[str, Any] = {}

        def copy_of(node: Node) -> Node:
            if node not in copies:
                name = state[node].name if node in state else str(node.target)
                attributes[name] = state[node].tensor if node in state else self._trace.attribute(name)
                copies[node] = graph.get_attr(name)
            return copies[node]

        def enter_layer(layer: int) -> None:  # generated code needs a name, which a bound method has not
            assert at_layer is not None
            at_layer(layer)

        for layer, group in enumerate(self._groups[first:end], first):
            if at_layer is not None:
                graph.call_function(enter_layer, (layer,))
            for node in group.nodes:
                copies[node] = graph.node_copy(node, copy_of)
        outputs = [copy_of(node) for node in self._boundaries[end]]
        graph.output(tuple(graph.call_method("contiguous", (x,)) if sends else x for x in outputs))
        module = GraphModule(attributes, graph, class_name=f"Layers{first}to{end}")
        module.train()
        # Submodules as plain attributes avoid the slow lookup of nn.Module; tensors stay, because `.to()`, loading and
        # materialisation replace them.
        for part in module.modules():
            vars(part).update(part._modules)
        return module

    def draws(self, layer: int) -> bool:
        """By torch's tags; operations outside torch may draw."""
        return any(may_draw(node) for node in self._groups[layer].nodes)

    def is_routed(self, layer: int) -> bool:
        """By its operations: grouped products, sizes that depend on data, and modules that are called as they are."""
        return any(depends_on_values(node) for node in self._groups[layer].nodes)

    def specs(self, boundary: int) -> tuple[TensorSpec, ...]:
        """The specs of a boundary's tensors, by the trace."""
        values = zip(self._boundaries[boundary], self._flags[boundary], strict=True)
        return tuple(replace(TensorSpec.of(node.meta["val"]), requires_grad=flag) for node, flag in values)

    def routes(self, boundary: int) -> tuple[Route, ...]:
        """The routes of a boundary's tensors, by the trace."""
        return tuple(self._routes[node] for node in self._boundaries[boundary])

    @cached_property
    def _touched(self) -> tuple[Touched, ...]:
        return written_state(self._place, self._trace.state)

    @property
    def written(self) -> tuple[Tensor, ...]:
        """Those that an operation writes into, by its schema."""
        return tuple(self._trace.state[x.value].tensor for x in self._touched)

    @cached_property
    def pinned(self) -> tuple[tuple[int, int], ...]:
        """Pairs of layers that use the same buffer and one of which writes into it."""
        pairs = {
            (min(pair), max(pair))
            for buffer in self._touched
            for x in buffer.writers
            for y in buffer.users
            if (pair := (self._place[x], self._place[y]))[0] != pair[1]
        }
        return tuple(sorted(pairs))

    def reordered(self, order: Sequence[int]) -> ExportedChain:
        """The chain in another order, checked by the values that layers pass and the buffers that they write."""
        reads = [
            (route.producer, consumer)
            for route in self._routes.values()
            if route.producer is not None
            for consumer in route.consumers
        ]
        num_layers = len(self)
        if sorted(order) != list(range(num_layers)):
            shown = ", ".join([*map(str, order[:8]), *["..."] * (len(order) > 8)])
            raise ModelError(
                f"the order {shown} is not an order of the {num_layers} layers of this model; expected each of "
                f"0 to {num_layers - 1} once"
            )
        place = {layer: i for i, layer in enumerate([*order, num_layers])}  # the last is the model's output
        for before, after in (*reads, *self.pinned):
            if place[before] > place[after]:
                raise ModelError(
                    f"layer {self.names[after]} cannot run before {self.names[before]}, whose results or buffers it needs; expected "
                    "an order in which every layer comes after what it needs"
                )
        groups = [self._groups[layer] for layer in order]
        found = ExportedChain(self.model, self._trace, groups, digest=self.digest())
        found.precision = self.precision
        return found

    def structure(self, layer: int) -> Hashable:
        """Equal for layers with the same operations and connections on values and weights of the same specs."""
        return self._forms[layer], self._flags[layer], self._flags[layer + 1]

    def state(self, layer: int) -> dict[str, Tensor]:
        """The parameters and buffers that a layer uses, by their names in the model."""
        state = self._trace.state
        used = dict.fromkeys(x for node in self._groups[layer].nodes for x in node.all_input_nodes)
        return {state[x].name: state[x].tensor for x in used if x in state and not state[x].is_constant}

    def norms(self, first: int, end: int) -> tuple[RunningNorm, ...]:
        """By the calls in the graph, including those in no_grad and autocast blocks."""
        state = {node: x.tensor for node, x in self._trace.state.items()}
        nodes = (node for group in self._groups[first:end] for node in group.nodes)
        return running_norms(self.model, graph_calls(nodes, state))

    def model_output(self, tensors: Tensors) -> Any:
        """The outputs in the model's structure, such as a transformers ModelOutput."""
        values = dict(zip(self._boundaries[-1], tensors, strict=True))
        leaves = [values.get(x, x) if isinstance(x, Node) else x for x in self._trace.outputs]
        return pytree.tree_unflatten(leaves, self._trace.structure)

    def _surroundings(self, layer: int) -> tuple[Trace, Sequence[Node], Sequence[Node], Sequence[Node]]:
        """The trace, the operations of a layer, and the values before and after it."""
        return self._trace, self._groups[layer].nodes, self._boundaries[layer], self._boundaries[layer + 1]

    @cached_property
    def _forms(self) -> tuple[Hashable, ...]:
        """The form of every layer; equal forms are one object, so that comparisons are fast."""
        known: dict[Hashable, Hashable] = {}
        forms = (layer_form(*self._surroundings(layer)) for layer in range(len(self)))
        return tuple(known.setdefault(form, form) for form in forms)

    @cached_property
    def _flags(self) -> tuple[tuple[bool, ...], ...]:
        """For every boundary, which of its tensors require a gradient."""
        known: dict[tuple[int, tuple[bool, ...]], tuple[bool, ...]] = {}
        flags = [tuple(bool(node.meta["val"].requires_grad) for node in self._boundaries[0])]
        for layer in range(len(self)):
            key = id(self._forms[layer]), flags[-1]
            if key not in known:
                known[key] = gradient_flags(*self._surroundings(layer), flags[-1])
            flags.append(known[key])
        return tuple(flags)
