"""What layers do and keep, without doing it: work and memory from one forward and backward on fake tensors.

Fake tensors have shapes and no memory. Modes around them count operations (profiler/analytic/work.py) and follow
storages (profiler/memory/ledger.py). Operations are those that torch runs on a CPU: fused attention is one of them,
except with dropout inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gplan.errors import ModelError
from gplan.nouns import Work
from profiler.analytic.stand_ins import StandInMode, StandIns, mode_of
from profiler.analytic.work import WorkCounter, product_dtype, total_work
from profiler.capture.chain import Tensors
from profiler.memory.ledger import Ledger
from profiler.memory.passage import LayerBytes, Passage, layer_bytes, pass_through
from profiler.memory.storages import storage_key
from profiler.model.author import describe


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAnalysis:
    """What one layer, or the loss, does and keeps for one micro-batch."""

    forward_work: tuple[Work, ...]
    backward_work: tuple[Work, ...]
    memory: LayerBytes
    dtype: str  # of its products


def analyse(
    layers: Sequence[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor]
) -> tuple[LayerAnalysis, ...]:
    """One entry for each layer and a last one for the loss, from one forward and backward on fake tensors.

    The layers are left as they are; their parameters may be real or fake. Raises ModelError for a layer or a loss that
    decides by the values of tensors.
    """
    mode = mode_of(layers)
    stand_ins = StandIns(mode)
    try:
        with mode:
            calls = [stand_ins.call(layer) for layer in layers]
            entering = tuple(stand_ins.of(x) for x in inputs)
            with Ledger() as ledger, WorkCounter(ledger.now) as counter, StandInMode(mode):
                passage = pass_through(calls, entering, loss, now=ledger.now, address_of=storage_key)
    except Exception as error:
        raise ModelError(
            f"the model cannot be followed on tensors without values: {describe(error)}; expected layers and a loss "
            "that do not decide by values (an `if`, a loop, .item()): measure this model where it can run"
        ) from error
    return _analyses(passage, layer_bytes(ledger.trace(), passage), counter)


def _analyses(passage: Passage, memories: Sequence[LayerBytes], counter: WorkCounter) -> tuple[LayerAnalysis, ...]:
    found = []
    for forward, backward, memory in zip(passage.forwards, passage.backwards, memories, strict=True):
        before, after = counter.between(*forward), counter.between(*backward)
        found.append(
            LayerAnalysis(
                forward_work=total_work(before),
                backward_work=total_work(after),
                memory=memory,
                dtype=product_dtype((*before, *after)),
            )
        )
    return tuple(found)
