"""One stage as a module: its pieces one after the other, recomputed in the backward pass where the plan says so.

A stage is one piece that recomputes as a whole or not at all; with recompute "selected" each layer that the plan names
is a piece of its own that always recomputes, and the layers between two of them keep their stash. Recompute is torch's
non-reentrant checkpoint: the forward keeps only what the piece reads, the random state is replayed, and the buffers that
a forward updates (batch norm's statistics) are not updated a second time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gplan.nouns import RecomputeMode, Stage
from gplan.simulator import is_recomputed
from profiler.capture.chain import Chain, Tensors


def stage_module(chain: Chain, stage: Stage, *, num_microbatches: int, recompute: RecomputeMode) -> StageModule:
    """The layers of a stage of a plan; those of the chain lie in the plan's order."""
    if recompute == "selected":
        pieces = _selected_pieces(chain, range(stage.first_layer, stage.end_layer), stage.recompute_layers)
    else:
        pieces = [Recomputable(chain, stage.first_layer, stage.end_layer)]
    return StageModule(pieces, num_microbatches=num_microbatches, recompute=recompute)


def _selected_pieces(chain: Chain, layers: range, selected: Collection[str]) -> list[nn.Module]:
    """Each selected layer by itself, and each run of the others as one module."""
    pieces: list[nn.Module] = []
    for is_selected, run in groupby(layers, key=lambda layer: chain.names[layer] in selected):
        places = list(run)
        if is_selected:
            pieces += [Recomputable(chain, layer, layer + 1) for layer in places]
        else:
            pieces.append(chain.stage(places[0], places[-1] + 1))
    return pieces


class StageModule(nn.Module):
    """The pieces of a stage; `microbatch` says which micro-batch the next forward belongs to."""

    def __init__(self, pieces: Sequence[nn.Module], *, num_microbatches: int, recompute: RecomputeMode) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces)
        self.microbatch = 0
        self._num_microbatches = num_microbatches
        self._recompute = recompute

    def forward(self, *tensors: Tensor) -> Tensors:
        """Boundary tensors in, boundary tensors out."""
        again = is_recomputed(self.microbatch, num_microbatches=self._num_microbatches, recompute=self._recompute)
        for piece in self.pieces:
            tensors = piece.recomputed(*tensors) if again and isinstance(piece, Recomputable) else piece(*tensors)
        return tensors


class Recomputable(nn.Module):
    """Layers [first, end), which can keep their inputs alone; what only passes them by is none of these."""

    _CHECKPOINT: ClassVar[dict[str, Any]] = {"use_reentrant": False, "preserve_rng_state": True}

    def __init__(self, chain: Chain, first: int, end: int) -> None:
        super().__init__()
        self.layers = chain.stage(first, end)
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
        read = [x for x, is_read in zip(tensors, self._reads, strict=True) if is_read]
        made = iter(checkpoint(self._run, *read, **self._CHECKPOINT, context_fn=self._contexts))
        passing = (x for x, is_passing in zip(tensors, self._passes, strict=True) if is_passing)
        return tuple(next(made if is_made else passing) for is_made in self._makes)

    def _run(self, *read: Tensor) -> Tensors:
        """What the layers make of what they read; an empty tensor stands for what passes them by."""
        given = iter(read)
        tensors = [next(given) if is_read else Tensor() for is_read in self._reads]
        return tuple(x for x, is_made in zip(self.layers(*tensors), self._makes, strict=True) if is_made)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _kept_buffers(self.layers)


@contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    """Buffers are afterwards what they were; written past autograd, which may have saved them."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, kept in before:
            buffer.data.copy_(kept)
