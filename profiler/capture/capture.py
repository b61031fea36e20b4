"""A model and its inputs to a chain of layers: an nn.Sequential is cut between its children, all else is exported."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, get_args

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from gplan.core import Granularity
from gplan.core.errors import ModelError, UsageError
from profiler.capture.chain import AtLayer, Chain, Route, Tensors, TensorSpec
from profiler.capture.grouping import Group, merged, non_tensor_spans, operation_groups, operations_of, unit_groups
from profiler.capture.inplace import rewrite_in_place, written_state
from profiler.capture.measured_layers import gradient_flags, layer_form, value_specs
from profiler.capture.running_norms import RunningNorm, cumulative_momentum_one, graph_calls, running_norms
from profiler.capture.sequence import SequentialChain
from profiler.capture.trace import Trace, trace
from profiler.capture.wiring import may_draw


def capture(model: nn.Module, inputs: object, *, granularity: Granularity = "layer", training: bool = True) -> Chain:
    """The layers of `model`, put in training or evaluation mode, for inputs of one micro-batch.

    A model that is in training mode already stays as it is: its author may have put parts in evaluation mode.
    `inputs` is what the model is called with: a tensor, a tuple (several arguments) or a dict (by name). The chain
    holds for inputs of exactly these shapes. With granularity "op" a layer is one operation of an exported model, with
    what costs nothing beside it; an nn.Sequential is exported for that too. Raises ModelError, with the author's line,
    where capture is impossible, UsageError for another granularity.
    """
    if granularity not in get_args(Granularity):
        raise UsageError(
            f"granularity {granularity!r} is not known; expected one of {', '.join(get_args(Granularity))}"
        )
    if model.training != training:
        model.train(training)
    is_sequence = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    if is_sequence and granularity == "layer":
        return SequentialChain(model, inputs)  # type: ignore[arg-type]
    try:
        return exported(model, inputs, granularity=granularity)
    except ModelError as error:
        if not is_sequence:
            raise
        raise ModelError(
            f"{error}. Layers that are operations come from an exported model alone: without --granularity op this "
            "nn.Sequential is cut between its children as it is"
        ) from error


# MERGED profiler/capture/capture.py
# What crosses between the layers of a traced model, and in which orders these can run.


def alive_at(traced: Trace, groups: Sequence[Group]) -> list[tuple[Node, ...]]:
    """For each of the L+1 boundaries the values made before it and read after it, in the order of the trace."""
    num_layers = len(groups)
    place = _places(groups)
    alive: list[list[Node]] = [[] for _ in range(num_layers + 1)]
    for node in traced.graph.nodes:
        if node in traced.held or node.op in ("output", "get_attr") or _is_constant_input(node):
            continue
        first = place[node] + 1 if node in place else 0
        last = max([0 if node.op == "placeholder" else -1, *(place.get(x, num_layers) for x in node.users)])
        for boundary in range(first, last + 1):
            alive[boundary].append(node)
    return [tuple(nodes) for nodes in alive]


def _is_constant_input(node: Node) -> bool:
    """None, a number or the like, whose value is in the trace wherever it was used."""
    return node.op == "placeholder" and not isinstance(node.meta.get("val"), Tensor)


def routes_of(groups: Sequence[Group], boundaries: Iterable[Iterable[Node]]) -> dict[Node, Route]:
    """Which layer makes each value that crosses, and which ones read it."""
    place, num_layers = _places(groups), len(groups)
    crossing = dict.fromkeys(node for nodes in boundaries for node in nodes)
    return {node: _route(node, place, num_layers) for node in crossing}


def _route(node: Node, place: Mapping[Node, int], num_layers: int) -> Route:
    producer = place.get(node)
    readers = {place.get(user, num_layers) for user in node.users} - {producer}
    return Route(producer, tuple(sorted(x for x in readers if x is not None)))


def _places(groups: Sequence[Group]) -> dict[Node, int]:
    return {node: i for i, group in enumerate(groups) for node in group.nodes}


def check_order(names: Sequence[str], order: Sequence[int], pairs: Iterable[tuple[int, int]]) -> None:
    """Raise ModelError unless `order` names every layer once, the first of each pair before the second.

    A pair's second may be L, the model's output.
    """
    num_layers = len(names)
    if sorted(order) != list(range(num_layers)):
        raise ModelError(
            f"the order {_shortened(order)} is none of the {num_layers} layers of this model; expected each of "
            f"0 to {num_layers - 1} once"
        )
    place = {layer: i for i, layer in enumerate([*order, num_layers])}
    for before, after in pairs:
        if place[before] > place[after]:
            raise ModelError(
                f"layer {names[after]} cannot run before {names[before]}, whose results or buffers it needs; expected an "
                "order in which every layer comes after what it needs"
            )


def _shortened(order: Sequence[int]) -> str:
    shown = [str(x) for x in order[:8]]
    return ", ".join([*shown, "..."] if len(order) > len(shown) else shown)


# MERGED profiler/capture/capture.py
# Capture by torch.export: any model that traces, cut between the layers its author wrote or between operations.
#
# The model is exported at the micro-batch shape (strict=False, training mode), its in-place operations are made safe, and
# every operation is given to a layer. A boundary is the set of values made before it and read after it, so skips and
# masks travel from stage to stage. Parameters stay the model's own objects.


def exported(model: nn.Module, inputs: object, *, granularity: Granularity = "layer") -> ExportedChain:
    """The layers of a model in training mode, by a trace of it.

    Raises ModelError, with the author's line, for what cannot be traced.
    """
    with cumulative_momentum_one(model):
        traced = trace(model, inputs)
    inseparable: list[Collection[Node]] = [*rewrite_in_place(traced.graph, traced.held)]
    operations = operations_of(traced.graph, model)
    inseparable += non_tensor_spans(operations)
    if granularity == "layer":
        groups = unit_groups(traced.graph, model)
    else:
        groups = operation_groups(traced, model)
        inseparable += [x.users for x in written_state(operations, traced.held) if x.users != x.writers]
    return ExportedChain(model, traced, merged(traced.graph, groups, inseparable))


class ExportedChain(Chain):
    """Layers made of the operations of an exported program."""

    def __init__(self, model: nn.Module, traced: Trace, groups: Sequence[Group], *, digest: str | None = None) -> None:
        super().__init__(model, [group.name for group in groups], [group.kind for group in groups])
        self.num_repetitions = traced.num_repetitions
        self._trace = traced
        self._groups = tuple(groups)
        self._digest = digest
        self._boundaries = alive_at(traced, self._groups)
        self._routes = routes_of(self._groups, self._boundaries)
        self._outputs = traced.outputs

    def digest(self) -> str:
        """As captured, whatever the order."""
        return self._digest or super().digest()

    def stage(self, first: int, end: int, *, at_layer: AtLayer | None = None) -> nn.Module:
        """Layers [first, end) as a GraphModule that keeps the parameters' own names."""
        graph, copies, held = Graph(), dict[Node, Node](), self._trace.held
        for node in self._boundaries[first]:
            copies[node] = graph.placeholder(node.name)
        attributes: dict[str, Any] = {}

        def copy_of(node: Node) -> Node:
            if node not in copies:
                name = held[node].name if node in held else str(node.target)
                attributes[name] = held[node].tensor if node in held else self._trace.attribute(name)
                copies[node] = graph.get_attr(name)
            return copies[node]

        for layer, group in enumerate(self._groups[first:end], first):
            if at_layer is not None:
                graph.call_function(_named(at_layer), (layer,))
            for node in group.nodes:
                copies[node] = graph.node_copy(node, copy_of)
        outputs = [copy_of(node) for node in self._boundaries[end]]
        graph.output(tuple(graph.call_method("contiguous", (x,)) for x in outputs))
        module = GraphModule(attributes, graph, class_name=f"Layers{first}to{end}")
        module.train()
        return _with_plain_paths(module)

    def draws(self, layer: int) -> bool:
        """By what torch says of its operations; those it does not know may."""
        return any(may_draw(node) for node in self._groups[layer].nodes)

    def specs(self, boundary: int) -> tuple[TensorSpec, ...]:
        """What the tensors of a boundary are like, by the trace."""
        return value_specs(self._boundaries[boundary], self._flags[boundary])

    def routes(self, boundary: int) -> tuple[Route, ...]:
        """By the trace: the operations that make a value and read it, and the layers that these belong to."""
        return tuple(self._routes[node] for node in self._boundaries[boundary])

    @cached_property
    def pinned(self) -> tuple[tuple[int, int], ...]:
        """Layers that use the same buffer, where one of the two writes into it."""
        place = {node: i for i, group in enumerate(self._groups) for node in group.nodes}
        touched = written_state((node for group in self._groups for node in group.nodes), self._trace.held)
        pairs = {
            (min(pair), max(pair))
            for buffer in touched
            for x in buffer.writers
            for y in buffer.users
            if (pair := (place[x], place[y]))[0] != pair[1]
        }
        return tuple(sorted(pairs))

    def reordered(self, order: Sequence[int]) -> ExportedChain:
        """By the values that layers pass to each other, and by the buffers that they write into."""
        reads = [
            (route.producer, consumer)
            for route in self._routes.values()
            if route.producer is not None
            for consumer in route.consumers
        ]
        check_order(self.names, order, [*reads, *self.pinned])
        groups = [self._groups[layer] for layer in order]
        return ExportedChain(self.model, self._trace, groups, digest=self.digest())

    def structure(self, layer: int) -> Hashable:
        """Equal for layers that run the same operations, wired alike, on values and weights of the same specs."""
        return self._forms[layer], self._flags[layer], self._flags[layer + 1]

    def state(self, layer: int) -> dict[str, Tensor]:
        """The parameters and buffers that a layer uses, by their names in the model."""
        held = self._trace.held
        used = dict.fromkeys(x for node in self._groups[layer].nodes for x in node.all_input_nodes)
        return {held[x].name: held[x].tensor for x in used if x in held and not held[x].is_constant}

    def norms(self, first: int, end: int) -> tuple[RunningNorm, ...]:
        """By the calls in the graph, those in no_grad and autocast blocks among them."""
        held = {node: x.tensor for node, x in self._trace.held.items()}
        nodes = (node for group in self._groups[first:end] for node in group.nodes)
        return running_norms(self.model, graph_calls(nodes, held))

    def model_output(self, tensors: Tensors) -> Any:
        """The outputs in the model's own structure, such as a transformers ModelOutput."""
        values = dict(zip(self._boundaries[-1], tensors, strict=True))
        leaves = [values.get(x, x) if isinstance(x, Node) else x for x in self._outputs]
        return pytree.tree_unflatten(leaves, self._trace.structure)

    @cached_property
    def _forms(self) -> tuple[Hashable, ...]:
        """The form of every layer; equal forms are one object, so that comparing them takes no time."""
        known: dict[Hashable, Hashable] = {}
        forms = []
        for layer, group in enumerate(self._groups):
            before, after = self._boundaries[layer], self._boundaries[layer + 1]
            form = layer_form(group.nodes, before, after, self._trace.held, self._trace.attribute)
            forms.append(known.setdefault(form, form))
        return tuple(forms)

    @cached_property
    def _flags(self) -> tuple[tuple[bool, ...], ...]:
        """For every boundary which of its tensors need a gradient."""
        known: dict[tuple[int, tuple[bool, ...]], tuple[bool, ...]] = {}
        flags = [tuple(bool(node.meta["val"].requires_grad) for node in self._boundaries[0])]
        for layer, group in enumerate(self._groups):
            key = id(self._forms[layer]), flags[-1]
            if key not in known:
                before, after = self._boundaries[layer], self._boundaries[layer + 1]
                held, attribute = self._trace.held, self._trace.attribute
                known[key] = gradient_flags(group.nodes, before, flags[-1], after, held, attribute)
            flags.append(known[key])
        return tuple(flags)


def _with_plain_paths(module: GraphModule) -> GraphModule:
    """The same module, whose submodules its code finds as plain attributes, past the slow way of nn.Module.

    They stay what they are; tensors do not (`.to()`, loading, real weights for a while), and are looked up as ever.
    """
    for part in module.modules():
        vars(part).update(part._modules)
    return module


def _named(at_layer: AtLayer) -> AtLayer:
    """A function that generated code can call by a name; a bound method has none."""

    def enter_layer(layer: int) -> None:
        at_layer(layer)

    return enter_layer
