"""What layers do and keep, without doing it: work and memory from a forward and a backward on fake tensors.

Fake tensors have shapes and no memory. Modes around them count operations (profiler/analytic/work.py) and follow
storages (profiler/memory/ledger.py). Operations are those that torch runs on a CPU: fused attention is one of them,
except with dropout inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from torch import Tensor, nn

from gplan.errors import ModelError
from gplan.nouns import Work
from profiler.analytic.stand_ins import StandInMode, StandIns, mode_of
from profiler.analytic.work import Operation, WorkCounter, product_dtype, total_work
from profiler.capture.chain import Tensors
from profiler.memory.ledger import Ledger
from profiler.memory.passage import LayerBytes, Passage, layer_bytes, pass_through
from profiler.memory.split import SplitPassage, pass_in_halves, pending_bytes
from profiler.memory.storages import storage_key
from profiler.model.author import describe

Followed = TypeVar("Followed")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAnalysis:
    """What one layer, or the loss, does and keeps for one micro-batch."""

    forward_work: tuple[Work, ...]
    backward_work: tuple[Work, ...]
    memory: LayerBytes
    dtype: str  # of its products


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesAnalysis:
    """What the halves of one layer's backward do, or the loss's, and what is kept between them."""

    input_work: tuple[Work, ...] | None  # None: no gradient goes back through it, and the second half is all
    weight_work: tuple[Work, ...]
    pending_bytes: int


_Run: TypeAlias = Callable[[Sequence[Callable[..., Tensors]], StandIns, Tensors, Ledger], Followed]
"""Runs stand-ins of the layers, with those of other tensors and the inputs at hand, by the ledger's clock."""


def analyse(
    layers: Sequence[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor]
) -> tuple[LayerAnalysis, ...]:
    """One entry for each layer and a last one for the loss, from one forward and backward on fake tensors.

    The layers are left as they are; their parameters may be real or fake. Raises ModelError for a layer or a loss that
    decides by the values of tensors.
    """

    def run(calls: Sequence[Callable[..., Tensors]], _: StandIns, entering: Tensors, ledger: Ledger) -> Passage:
        return pass_through(calls, entering, loss, now=ledger.now, address_of=storage_key)

    passage, ledger, counter = _followed(layers, inputs, run)
    return _analyses(passage, layer_bytes(ledger.trace(), passage), counter)


def analyse_halves(
    layers: Sequence[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor]
) -> tuple[HalvesAnalysis, ...]:
    """As `analyse`, from one forward and a backward in two halves;
    raises ModelError for one that cannot be split too."""

    def run(
        calls: Sequence[Callable[..., Tensors]], found: StandIns, entering: Tensors, ledger: Ledger
    ) -> SplitPassage:
        parameters = [tuple(map(found.of, layer.parameters())) for layer in layers]
        return pass_in_halves(calls, parameters, entering, loss, now=ledger.now)

    passage, ledger, counter = _followed(layers, inputs, run)
    pending = pending_bytes(ledger.trace(), passage)
    work: list[list[Operation]] = [[] for _ in pending]
    for layer, window in passage.weights:
        work[layer] += counter.between(*window)
    return tuple(
        HalvesAnalysis(
            input_work=total_work(counter.between(*passage.inputs[i - passage.first])) if i >= passage.first else None,
            weight_work=total_work(work[i]),
            pending_bytes=pending[i],
        )
        for i in range(len(pending))
    )


def _followed(
    layers: Sequence[nn.Module], inputs: Tensors, run: _Run[Followed]
) -> tuple[Followed, Ledger, WorkCounter]:
    mode = mode_of(layers)
    stand_ins = StandIns(mode)
    try:
        with mode:
            calls = [stand_ins.call(layer) for layer in layers]
            entering = tuple(stand_ins.of(x) for x in inputs)
            with Ledger() as ledger, WorkCounter(ledger.now) as counter, StandInMode(mode):
                return run(calls, stand_ins, entering, ledger), ledger, counter
    except Exception as error:
        raise ModelError(
            f"the model cannot be followed on tensors without values: {describe(error)}; expected layers and a loss "
            "that do not decide by values (an `if`, a loop, .item()): measure this model where it can run"
        ) from error


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
