"""What layers do and keep, without doing it: work and memory from a forward and a backward on fake tensors.

Fake tensors have shapes and no memory. Modes around them count operations (profiler/analytic/work.py) and follow
storages (profiler/memory/allocations.py). Operations are those that torch runs on a CPU: fused attention is one of them,
except with dropout inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gplan.core import Work
from gplan.core.errors import ModelError
from profiler.analytic.work import Operation, WorkCounter, product_dtype, total_work
from profiler.capture.chain import Tensors
from profiler.memory.allocations import StorageRecorder, storage_key
from profiler.memory.layer_memory import (
    LayerBytes,
    Passage,
    SplitPassage,
    layer_bytes,
    pass_in_halves,
    pass_through,
    pending_bytes,
)
from profiler.model.error_location import describe
from profiler.model.lazy_build import fake_mode_of

# Fake tensors in the place of real ones, so that layers run without computing and without being changed.
#
# A fake tensor has a shape, a dtype and a storage with a lifetime, and no memory. Layers whose parameters are fake
# already get new ones too: their gradients and buffers are then nobody else's.


def mode_of(layers: Sequence[nn.Module]) -> FakeTensorMode:
    """The mode of the fake tensors that some layers hold, or a new one."""
    modes = (mode for layer in layers if (mode := fake_mode_of(layer)) is not None)
    return next(modes, None) or FakeTensorMode(allow_non_fake_inputs=True)


class StandInMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands on fake tensors for real ones, such as targets and constants: the modes around it see one storage."""

    supports_higher_order_operators = True

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.lift_fresh.default:  # a new constant, whose value may be asked for
            args, kwargs = pytree.tree_map(self._faked, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _faked(self, value: object) -> object:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        return self._mode.from_tensor(value, static_shapes=True)


class StandIns:
    """Fake stand-ins for tensors, the same one for the same tensor; those of parameters have gradients of zeros."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._found: dict[int, tuple[Tensor, Tensor]] = {}  # by identity; the tensor itself is kept alive beside it

    def of(self, tensor: Tensor) -> Tensor:
        """The stand-in of a tensor, a leaf of a new graph."""
        if id(tensor) not in self._found:
            fake = self._mode.from_tensor(tensor, static_shapes=True).detach().requires_grad_(tensor.requires_grad)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                fake.grad = torch.zeros_like(fake)
            self._found[id(tensor)] = tensor, fake
        return self._found[id(tensor)][1]

    def call(self, layer: nn.Module) -> Callable[..., Tensors]:
        """The layer with stand-ins for its parameters and buffers."""
        held = [
            *layer.named_parameters(remove_duplicate=False),
            *layer.named_buffers(remove_duplicate=False),
        ]
        state = {name: self.of(tensor) for name, tensor in held}
        return lambda *tensors: functional_call(layer, state, tensors, tie_weights=False)


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


_Run: TypeAlias = Callable[[Sequence[Callable[..., Tensors]], StandIns, Tensors, StorageRecorder], Followed]
"""Runs stand-ins of the layers, with those of other tensors and the inputs at hand, by the recorder's clock."""


def analyse(
    layers: Sequence[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor]
) -> tuple[LayerAnalysis, ...]:
    """One entry for each layer and a last one for the loss, from one forward and backward on fake tensors.

    The layers are left as they are; their parameters may be real or fake. Raises ModelError for a layer or a loss that
    decides by the values of tensors.
    """

    def run(
        calls: Sequence[Callable[..., Tensors]], _: StandIns, entering: Tensors, recorder: StorageRecorder
    ) -> Passage:
        return pass_through(calls, entering, loss, now=recorder.now, address_of=storage_key)

    passage, recorder, counter = _followed(layers, inputs, run)
    return _analyses(passage, layer_bytes(recorder.trace(), passage), counter)


def analyse_halves(
    layers: Sequence[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor]
) -> tuple[HalvesAnalysis, ...]:
    """As `analyse`, from one forward and a backward in two halves;
    raises ModelError for one that cannot be split too."""

    def run(
        calls: Sequence[Callable[..., Tensors]], found: StandIns, entering: Tensors, recorder: StorageRecorder
    ) -> SplitPassage:
        parameters = [tuple(map(found.of, layer.parameters())) for layer in layers]
        return pass_in_halves(calls, parameters, entering, loss, now=recorder.now)

    passage, recorder, counter = _followed(layers, inputs, run)
    pending = pending_bytes(recorder.trace(), passage)
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
) -> tuple[Followed, StorageRecorder, WorkCounter]:
    mode = mode_of(layers)
    stand_ins = StandIns(mode)
    try:
        with mode:
            calls = [stand_ins.call(layer) for layer in layers]
            entering = tuple(stand_ins.of(x) for x in inputs)
            with StorageRecorder() as recorder, WorkCounter(recorder.now) as counter, StandInMode(mode):
                return run(calls, stand_ins, entering, recorder), recorder, counter
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
