"""Work and memory of layers without computing them: one forward and backward on fake tensors.

Fake tensors have shapes, dtypes and storages, but no memory. Dispatch modes count operations (gplan_profiler/analytic/roofline.py)
and follow storages (gplan_profiler/memory/allocations.py). The operations are those that torch runs on a CPU; they include
fused attention, except with dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gplan.core.errors import ModelError
from gplan_profiler.analytic.roofline import Operation, product_dtype
from gplan_profiler.analytic.work_counter import WorkCounter
from gplan_profiler.capture.chain import Tensors
from gplan_profiler.memory.allocations import StorageRecorder, storage_key
from gplan_profiler.memory.layer_memory import (
    LayerBytes,
    TiedUse,
    halves_bytes,
    layer_bytes,
    pass_in_halves,
    pass_through,
    tied_by_layer,
    tied_uses,
    with_sums,
)
from gplan_profiler.model.error_location import describe
from gplan_profiler.model.lazy_build import fake_mode_of
from gplan_profiler.torch_compat import FakeTensor, FakeTensorMode, TorchDispatchMode, pytree


class StandInMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces real operands, such as targets and constants, by fake ones."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:

        def faked(value: Tensor) -> Tensor:
            return value if isinstance(value, FakeTensor) else self._mode.from_tensor(value, static_shapes=True)

        if func is not torch.ops.aten.lift_fresh.default:  # a new constant, whose value may be read
            args, kwargs = pytree.tree_map_only(Tensor, faked, (args, kwargs))
        return func(*args, **(kwargs or {}))


class StandIns:
    """Fake stand-ins for tensors, one for each tensor; those of parameters have gradients of zeros.

    Fake parameters get new stand-ins too, so that the layers keep their gradients and buffers.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._found: dict[int, tuple[Tensor, Tensor]] = {}  # by id; holds the tensor so that its id stays valid

    def of(self, tensor: Tensor) -> Tensor:
        """The stand-in of a tensor, a leaf of a new graph."""
        if id(tensor) not in self._found:
            gradient, tensor.grad = tensor.grad, None  # of another dtype it cannot become a fake one
            fake = self._mode.from_tensor(tensor, static_shapes=True).detach().requires_grad_(tensor.requires_grad)
            tensor.grad = gradient
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                fake.grad_dtype = tensor.grad_dtype
                fake.grad = torch.zeros_like(fake, dtype=tensor.grad_dtype)
            self._found[id(tensor)] = tensor, fake
        return self._found[id(tensor)][1]

    def call(self, layer: nn.Module, tied: Sequence[TiedUse] = ()) -> Callable[..., Tensors]:
        """The layer with stand-ins for its parameters and buffers, with others than before for those that are tied."""
        for use in tied:
            self._found.pop(id(use.parameter), None)
            use.watch(self.of(use.parameter))
        tensors = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
        state = {name: self.of(tensor) for name, tensor in tensors}
        return lambda *tensors: functional_call(layer, state, tensors, tie_weights=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAnalysis:
    """Operations and memory of one layer, or of the loss, for one micro-batch."""

    forward: tuple[Operation, ...]
    last_recompute: tuple[Operation, ...]  # of a recompute that ends with the layer, at the last tensor that is saved
    backward: tuple[Operation, ...]
    memory: LayerBytes
    dtype: str  # of its products
    input_half: tuple[Operation, ...] | None = None  # None: no input requires a gradient; the second half is the whole
    weight_half: tuple[Operation, ...] | None = None  # None: the backward was not split, or cannot be


@dataclass(frozen=True, slots=True)
class _Pass:
    """Layers and inputs on fake tensors, and what follows their operations."""

    calls: Sequence[Callable[..., Tensors]]
    parameters: Sequence[Tensors]  # of each layer
    inputs: Tensors
    recorder: StorageRecorder
    counter: WorkCounter


def analyse(
    layers: Sequence[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor]
) -> tuple[LayerAnalysis, ...]:
    """The analysis of each layer, and last of the loss; parameters may be real or fake and are left unchanged.

    Raises ModelError for a layer or a loss whose control flow depends on the values of tensors.
    """
    tied = tied_uses(layers)
    with _on_fake_tensors(layers, inputs, tied) as fake:
        passage = pass_through(fake.calls, fake.inputs, loss, now=fake.recorder.now, address_of=storage_key)
    found = []
    memories = with_sums(layer_bytes(fake.recorder.trace(), passage), tied)
    for forward, backward, last_save, memory in zip(
        passage.forwards, passage.backwards, passage.last_saves, memories, strict=True
    ):
        before, after = fake.counter.between(*forward), fake.counter.between(*backward)
        found.append(
            LayerAnalysis(
                forward=before,
                last_recompute=fake.counter.between(forward[0], last_save),
                backward=after,
                memory=memory,
                dtype=product_dtype((*before, *after)),
            )
        )
    return tuple(found)


def analyse_split(
    layers: Sequence[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor]
) -> tuple[LayerAnalysis, ...]:
    """As `analyse`, also of the backward in two halves; without these where it cannot be split."""
    whole = analyse(layers, inputs, loss)
    try:
        with _on_fake_tensors(layers, inputs) as fake:
            passage = pass_in_halves(fake.calls, fake.parameters, fake.inputs, loss, now=fake.recorder.now)
    except ModelError:
        return whole
    memories, between = halves_bytes(fake.recorder.trace(), passage), fake.counter.between
    work: list[list[Operation]] = [[] for _ in memories]
    for layer, window in passage.weights:
        work[layer] += between(*window)
    return tuple(
        replace(
            x,
            input_half=between(*passage.inputs[i - passage.first]) if i >= passage.first else None,
            weight_half=tuple(work[i]),
            memory=replace(x.memory, halves=memories[i]),
        )
        for i, x in enumerate(whole)
    )


@contextmanager
def _on_fake_tensors(layers: Sequence[nn.Module], inputs: Tensors, tied: Sequence[TiedUse] = ()) -> Iterator[_Pass]:
    """Inside, the layers run on fake tensors; raises ModelError where that fails.

    The layers of `tied` have parameters of their own.
    """
    mode = next(filter(None, map(fake_mode_of, layers)), None) or FakeTensorMode(allow_non_fake_inputs=True)
    stand_ins = StandIns(mode)
    try:
        with mode:
            calls = [stand_ins.call(*x) for x in zip(layers, tied_by_layer(layers, tied), strict=True)]
            parameters = [tuple(map(stand_ins.of, layer.parameters())) for layer in layers]
            entering = tuple(stand_ins.of(x) for x in inputs)
            with StorageRecorder() as recorder, WorkCounter(recorder.now) as counter, StandInMode(mode):
                yield _Pass(calls, parameters, entering, recorder, counter)
    except Exception as error:
        raise ModelError(
            f"the model cannot be followed on tensors without values: {describe(error)}; expected layers and a loss "
            "whose control flow does not depend on values (an `if`, a loop, .item()): measure this model where it can run"
        ) from error
