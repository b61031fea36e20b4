"""One stage as a module: its segments run in order and are recomputed in the backward pass where the plan says so.

A stage is one segment that is recomputed as a whole or not at all. With recompute "selected" each layer named in the
plan is a segment that always recomputes, and the layers between keep their stash. A recomputed forward
(`gplan_profiler/backward/rematerialize.py`) keeps only its inputs; the second run draws the same random numbers and finds the
buffers that it writes to as the first run did. The module holds the stage's parameters; what it runs is set for every
pass, as another batch size, evaluation and autocast each need their own capture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from gplan.core import RecomputeMode, is_recomputed
from gplan.runtime.random_streams import RandomStreams
from gplan_profiler.backward.rematerialize import recomputed
from gplan_profiler.capture.chain import Chain, Tensors
from gplan_profiler.capture.inplace import aliased_arguments, written_arguments
from gplan_profiler.host.heartbeat import Heartbeat
from gplan_profiler.memory.allocations import storage_key
from gplan_profiler.torch_compat import OpOverload

if TYPE_CHECKING:
    from gplan.runtime.sharded_replicas import ShardedStage

MakeLayers = Callable[[int, int], nn.Module]
"""(first, end) -> the layers [first, end) as a module from boundary tensors to boundary tensors."""


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """What a stage needs when one of its layers begins."""

    name: str
    number: int  # index in the plan's order; for a layer that is not in the plan, that of the layer before it
    key: int | None  # seed key; None if the layer draws no random numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePass:
    """What a stage runs in one pass."""

    segments: tuple[nn.Module, ...]
    layers: tuple[LayerInfo, ...]  # all layers of the capture, in its order
    num_microbatches: int
    recompute: RecomputeMode
    written: frozenset[int] = frozenset()  # `storage_key` of the buffers that later micro-batches may write to
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # wraps each forward, but not its recompute
    observe: Callable[[int, Tensors], None] | None = None  # called with each segment's number and outputs


class StageModule(nn.Module):
    """The parameters of a stage; `microbatch` is that of the next forward or backward."""

    def __init__(
        self, index: int, parameters: Iterable[nn.Parameter], random_streams: RandomStreams, heartbeat: Heartbeat
    ) -> None:
        super().__init__()
        self.index = index
        self.held = nn.ParameterList(parameters)
        self.shards: ShardedStage | None = None  # where the replicas divide the parameters
        self.microbatch = 0
        self.layer: str | None = None  # the layer under way, if known
        self._random_streams, self._heartbeat = random_streams, heartbeat
        self._work: StagePass | None = None

    def enter_action(self, microbatch: int) -> None:
        """A forward or backward of a micro-batch begins."""
        # Bypasses nn.Module.__setattr__, which takes longer than everything else here.
        vars(self).update(microbatch=microbatch, layer=None)

    def begin(self, work: StagePass) -> None:
        """Run this work in the following forwards."""
        self._work, self.layer = work, None

    def forward(self, *tensors: Tensor) -> Tensors:
        """Boundary tensors in, boundary tensors out."""
        work = self._work
        assert work is not None
        again = is_recomputed(self.microbatch, num_microbatches=work.num_microbatches, recompute=work.recompute)
        with work.around():
            for number, segment in enumerate(work.segments):
                tensors = (
                    segment.recomputed(*tensors)
                    if again and isinstance(segment, RecomputeSegment)
                    else segment(*tensors)
                )
                if work.observe is not None:
                    work.observe(number, tensors)
        vars(self)["layer"] = None
        if work.written:  # later stages and the backward need the present values
            tensors = tuple(x.clone() if storage_key(x) in work.written else x for x in tensors)
        return tensors

    def enter_layer(self, layer: int) -> None:
        """A layer begins, in a forward or a recompute."""
        assert self._work is not None
        note = self._work.layers[layer]
        vars(self)["layer"] = note.name
        self._heartbeat.enter_layer(note.number)
        if note.key is not None:
            self._random_streams.seed(note.key, self.microbatch)


class ParameterGroup(nn.Module):
    """The parameters of a layer that replicas divide and gather together; FSDP2's hooks are around `forward`."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)

    def forward(self, run: Callable[..., Tensors], *tensors: Tensor) -> Tensors:
        """Run a layer, or the next group around it, while the parameters are gathered."""
        return run(*tensors)

    def free(self) -> None:
        """Keep only this replica's parts."""
        assert isinstance(self, FSDPModule)
        self.reshard()

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters are whole now."""
        return not any(isinstance(x, DTensor) for x in self.held)


class GatheredLayers(nn.Module):
    """Layers that run in order, each while the groups of its parameters are gathered."""

    def __init__(self, layers: Sequence[nn.Module], groups: Sequence[Sequence[ParameterGroup]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._groups = tuple(map(tuple, groups))  # modules of the stage

    def forward(self, *tensors: Tensor) -> Tensors:
        """Boundary tensors in, boundary tensors out.

        A recompute begins in the backward of the last layer, which is gathered by then: it is freed until it runs again.
        """
        last = {group: layer for layer, groups in enumerate(self._groups) for group in groups if group.is_gathered}
        for group in last:
            if group not in self._groups[0]:
                group.free()
        for index, (layer, groups) in enumerate(zip(self.layers, self._groups, strict=True)):
            run: Callable[..., Tensors] = layer
            for group in groups:
                run = partial(group, run)
            waiting = [group for group in groups if not group.is_gathered and last.get(group) != index]
            tensors = run(*tensors)
            for group in waiting:  # torch frees them after a forward, but not after its recompute
                group.free()
        return tensors


def make_segments(
    chain: Chain, layers: range, *, recompute: RecomputeMode, selected: Collection[str], make_layers: MakeLayers
) -> tuple[nn.Module, ...]:
    """Return the layers of a stage as modules that run in order; the layers in `selected` are recomputed one by one."""
    if recompute != "selected":
        return (RecomputeSegment(chain, layers.start, layers.stop, make_layers(layers.start, layers.stop)),)
    segments: list[nn.Module] = []
    for is_selected, run in groupby(layers, key=lambda layer: chain.names[layer] in selected):
        places = list(run)
        if is_selected:
            segments += [RecomputeSegment(chain, x, x + 1, make_layers(x, x + 1)) for x in places]
        else:
            segments.append(make_layers(places[0], places[-1] + 1))
    return tuple(segments)


class RecomputeSegment(nn.Module):
    """Layers [first, end) that can be recomputed; values that only pass through them are left out of the recompute."""

    def __init__(self, chain: Chain, first: int, end: int, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        inputs = [route.consumers for route in chain.routes(first)]
        self._reads = [any(first <= layer < end for layer in consumers) for consumers in inputs]
        self._passes = [any(layer >= end for layer in consumers) for consumers in inputs]
        self._makes = [route.producer is not None and first <= route.producer for route in chain.routes(end)]

    def forward(self, *tensors: Tensor) -> Tensors:
        """Boundary tensors in, boundary tensors out; keeps everything that the backward needs."""
        outputs: Tensors = self.layers(*tensors)
        return outputs

    def recomputed(self, *tensors: Tensor) -> Tensors:
        """The same, but the forward runs again during the backward."""
        read = tuple(x for x, is_read in zip(tensors, self._reads, strict=True) if is_read)
        made = iter(recomputed(self._run, read, written=self._written))
        passing = (x for x, is_passing in zip(tensors, self._passes, strict=True) if is_passing)
        return tuple(next(made if is_made else passing) for is_made in self._makes)

    def _run(self, *read: Tensor) -> Tensors:
        """Return what the layers make of their inputs; an empty tensor stands for a value that only passes through."""
        given = iter(read)
        tensors = [next(given) if is_read else Tensor() for is_read in self._reads]
        return tuple(x for x, is_made in zip(self.layers(*tensors), self._makes, strict=True) if is_made)

    @cached_property
    def _written(self) -> list[Tensor]:
        return written_buffers(self.layers)


def written_buffers(module: nn.Module) -> list[Tensor]:
    """Return the buffers that a forward may write to; of a graph, those that no operator schema rules out."""
    if isinstance(module, RecomputeSegment):
        return written_buffers(module.layers)
    if isinstance(module, GatheredLayers):
        return [x for layer in module.layers for x in written_buffers(layer)]
    if not isinstance(module, GraphModule):
        return list(module.buffers())
    names = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    name_of = {x: str(x.target) for x in module.graph.find_nodes(op="get_attr") if x.target in names}
    found: dict[str, None] = {}
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload):
            arguments = zip(node.args, node.target._schema.arguments, strict=False)
            # schemas of norms do not say that they write to their averages
            averages = [
                x for x, described in arguments if described.name.startswith("running_") and isinstance(x, Node)
            ]
            written = [*written_arguments(node), *averages]
        else:
            written = [] if node.op == "output" else node.all_input_nodes
        found.update((name_of[x], None) for x in written if x in name_of)
        viewed = [x for x in aliased_arguments(node) if x in name_of]
        if viewed:
            name_of[node] = name_of[viewed[0]]
    return [module.get_buffer(name) for name in found]
