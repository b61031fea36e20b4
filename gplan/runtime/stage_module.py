"""One stage as a module: its pieces one after the other, recomputed in the backward pass where the plan says so.

A stage is one piece that recomputes as a whole or not at all; with recompute "selected" each layer that the plan names
is a piece of its own that always recomputes, and the layers between two of them keep their stash. A forward that is to
run again (`profiler/backward/rematerialize.py`) keeps only what the piece reads; in its second run each layer draws the
random numbers that it drew before (`gplan/runtime/random_streams.py`), and the buffers that it writes into are put back.

The module itself holds the stage's parameters and stays the same; what it runs is set for every pass, since a batch of
another size, evaluation and autocast each run a capture of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from gplan.core import RecomputeMode, is_recomputed
from gplan.runtime.heartbeat import Heartbeat
from gplan.runtime.random_streams import RandomStreams
from profiler.backward.rematerialize import recomputed
from profiler.capture.chain import AtLayer, Chain, Tensors
from profiler.capture.inplace import aliased_arguments, written_arguments


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """What there is to know of a layer when it begins."""

    name: str
    number: int  # in the plan's order; one that the plan does not have has the number of the layer before it
    key: int | None  # what stands for it in seeds; None: it draws no random numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePass:
    """What a stage runs in one pass."""

    pieces: tuple[nn.Module, ...]
    layers: tuple[LayerInfo, ...]  # all layers of the capture, in its order
    num_microbatches: int
    recompute: RecomputeMode
    written: frozenset[int] = frozenset()  # `memory_of` the buffers that later micro-batches may write into
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # the forward of a micro-batch, but no recompute


class StageModule(nn.Module):
    """The parameters of a stage; `microbatch` says which micro-batch the next forward or backward belongs to."""

    def __init__(
        self, index: int, parameters: Iterable[nn.Parameter], random_streams: RandomStreams, heartbeat: Heartbeat
    ) -> None:
        super().__init__()
        self.index = index
        self.held = nn.ParameterList(parameters)
        self.microbatch = 0
        self.layer: str | None = None  # that is under way, as far as it is known
        self._random_streams, self._heartbeat = random_streams, heartbeat
        self._work: StagePass | None = None

    def enter_action(self, microbatch: int) -> None:
        """Called when a forward or backward of a micro-batch begins."""
        # Past the way of nn.Module, which takes longer than all else here.
        vars(self).update(microbatch=microbatch, layer=None)

    def begin(self, work: StagePass) -> None:
        """From here on forwards run the pieces of this work."""
        self._work, self.layer = work, None

    def forward(self, *tensors: Tensor) -> Tensors:
        """Boundary tensors in, boundary tensors out."""
        work = self._work
        assert work is not None
        again = is_recomputed(self.microbatch, num_microbatches=work.num_microbatches, recompute=work.recompute)
        with work.around():
            for piece in work.pieces:
                tensors = (
                    piece.recomputed(*tensors) if again and isinstance(piece, RecomputeSegment) else piece(*tensors)
                )
        vars(self)["layer"] = None
        if work.written:  # whoever comes later is to get what is there now
            tensors = tuple(x.clone() if storage_id(x) in work.written else x for x in tensors)
        return tensors

    def enter_layer(self, layer: int) -> None:
        """Called when a layer begins, in a forward or a recompute."""
        assert self._work is not None
        note = self._work.layers[layer]
        vars(self)["layer"] = note.name
        self._heartbeat.enter_layer(note.number)
        if note.key is not None:
            self._random_streams.seed(note.key, self.microbatch)


def make_segments(
    chain: Chain, layers: range, *, recompute: RecomputeMode, selected: Collection[str], at_layer: AtLayer
) -> tuple[nn.Module, ...]:
    """The layers of a stage as modules that run one after the other; `selected` names those that recompute alone."""
    if recompute != "selected":
        return (RecomputeSegment(chain, layers.start, layers.stop, at_layer),)
    pieces: list[nn.Module] = []
    for is_selected, run in groupby(layers, key=lambda layer: chain.names[layer] in selected):
        places = list(run)
        if is_selected:
            pieces += [RecomputeSegment(chain, layer, layer + 1, at_layer) for layer in places]
        else:
            pieces.append(chain.stage(places[0], places[-1] + 1, at_layer=at_layer))
    return tuple(pieces)


class RecomputeSegment(nn.Module):
    """Layers [first, end), which can keep their inputs alone; what only passes them by is none of these."""

    def __init__(self, chain: Chain, first: int, end: int, at_layer: AtLayer) -> None:
        super().__init__()
        self.layers = chain.stage(first, end, at_layer=at_layer)
        inputs = [route.consumers for route in chain.routes(first)]
        self._reads = [any(first <= layer < end for layer in consumers) for consumers in inputs]
        self._passes = [any(layer >= end for layer in consumers) for consumers in inputs]
        self._makes = [route.producer is not None and first <= route.producer for route in chain.routes(end)]

    def forward(self, *tensors: Tensor) -> Tensors:
        """Boundary tensors in, boundary tensors out; everything is kept that the backward needs."""
        outputs: Tensors = self.layers(*tensors)
        return outputs

    def recomputed(self, *tensors: Tensor) -> Tensors:
        """The same, but the forward runs again in the backward."""
        read = tuple(x for x, is_read in zip(tensors, self._reads, strict=True) if is_read)
        made = iter(recomputed(self._run, read, again=self._buffers_kept))
        passing = (x for x, is_passing in zip(tensors, self._passes, strict=True) if is_passing)
        return tuple(next(made if is_made else passing) for is_made in self._makes)

    def _run(self, *read: Tensor) -> Tensors:
        """What the layers make of what they read; an empty tensor stands for what passes them by."""
        given = iter(read)
        tensors = [next(given) if is_read else Tensor() for is_read in self._reads]
        return tuple(x for x, is_made in zip(self.layers(*tensors), self._makes, strict=True) if is_made)

    @cached_property
    def _written(self) -> list[Tensor]:
        return written_buffers(self.layers)

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Buffers are afterwards what they were; written past autograd, which may have saved them."""
        before = [x.detach().clone() for x in self._written]
        try:
            yield
        finally:
            for buffer, kept in zip(self._written, before, strict=True):
                buffer.data.copy_(kept)


def storage_id(tensor: Tensor) -> int:
    """Equal for tensors that share memory."""
    found: int = tensor.untyped_storage()._cdata
    return found


def written_buffers(module: nn.Module) -> list[Tensor]:
    """The buffers that a forward may write into: of a graph those that some operator's schema does not rule out."""
    if not isinstance(module, GraphModule):
        return list(module.buffers())
    names = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    name_of = {x: str(x.target) for x in module.graph.find_nodes(op="get_attr") if x.target in names}
    found: dict[str, None] = {}
    for node in module.graph.nodes:
        found.update((name_of[x], None) for x in _possibly_written(node) if x in name_of)
        viewed = [x for x in aliased_arguments(node) if x in name_of]
        if viewed:
            name_of[node] = name_of[viewed[0]]
    return [module.get_buffer(name) for name in found]


def _possibly_written(node: Node) -> list[Node]:
    """The arguments that an operation may write into; norms do not say so of their moving averages, `running_...`."""
    if not isinstance(node.target, OpOverload):
        return [] if node.op == "output" else node.all_input_nodes
    arguments = zip(node.args, node.target._schema.arguments, strict=False)
    averages = [x for x, described in arguments if described.name.startswith("running_") and isinstance(x, Node)]
    return [*written_arguments(node), *averages]
