"""What each layer keeps and what it needs for a moment, from one forward and backward under the allocator's record.

The layers run as one graph, so that every storage is charged to the layer that produced it and is counted once. What is
still held when only the loss is left is the stash. A layer's workspace is the peak while it runs, above the stash of
the layers up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from profiler.bytes import AllocationTrace, now_ns, traced_allocations
from profiler.chain import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """The memory of one layer, or of the loss, for one micro-batch."""

    stash_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    output_bytes: int
    output_gradient_bytes: int
    output_unsaved_bytes: int


def measure_bytes(
    layers: Sequence[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor]
) -> tuple[LayerBytes, ...]:
    """One entry for each layer and a last one for the loss. Gradient buffers must already be allocated."""
    marks: list[int] = []
    outputs: list[list[tuple[int, int, bool]]] = []  # address, bytes, wants a gradient
    backward_starts: list[list[int]] = [[] for _ in range(len(layers) + 1)]
    with traced_allocations() as trace:
        tensors = inputs
        for layer, module in enumerate(layers):
            marks.append(now_ns())
            tensors = module(*tensors)
            outputs.append([(x.untyped_storage().data_ptr(), x.nbytes, x.requires_grad) for x in tensors])
            _note_backward(tensors, backward_starts[layer])
        marks.append(now_ns())
        value = loss(tensors)
        marks.append(now_ns())
        del tensors
        backward_starts[-1].append(now_ns())
        if value.requires_grad:
            value.backward()  # type: ignore[no-untyped-call]
        end_ns = now_ns()
    return _layer_bytes(trace, marks, outputs, _windows(backward_starts, end_ns))


def _note_backward(tensors: Tensors, starts: list[int]) -> None:
    """When the gradient of a layer's output arrives, the layer's own backward begins."""
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: starts.append(now_ns()))  # type: ignore[no-untyped-call]


def _windows(starts: Sequence[Sequence[int]], end_ns: int) -> list[tuple[int, int]]:
    """When the backward of each layer, and of the loss, ran; a window is empty where there was none."""
    windows: list[tuple[int, int]] = []
    for layer_starts in starts:  # the first layer's backward is the last to run
        start_ns = min(layer_starts, default=end_ns)
        windows.append((start_ns, end_ns))
        end_ns = start_ns
    return windows


def _layer_bytes(
    trace: AllocationTrace,
    marks: Sequence[int],
    outputs: Sequence[Sequence[tuple[int, int, bool]]],
    backwards: Sequence[tuple[int, int]],
) -> tuple[LayerBytes, ...]:
    forward_end = backwards[-1][0]
    kept = trace.alive(marks[0], marks[-1], forward_end)
    below, found = 0, []
    for layer, (start_ns, end_ns) in enumerate(pairwise(marks)):
        stash = sum(trace.alive(start_ns, end_ns, forward_end).values())
        below += stash
        crossing = outputs[layer] if layer < len(outputs) else []
        found.append(
            LayerBytes(
                stash_bytes=stash,
                forward_workspace_bytes=max(0, trace.peak_bytes(start_ns, end_ns) - below),
                backward_workspace_bytes=max(0, trace.peak_bytes(*backwards[layer]) - below),
                output_bytes=sum(size for _, size, _ in crossing),
                output_gradient_bytes=sum(size for _, size, wants in crossing if wants),
                output_unsaved_bytes=sum(size for address, size, _ in crossing if address not in kept),
            )
        )
    return tuple(found)


def allocate_gradients(model: nn.Module) -> None:
    """Give every trained parameter a gradient of zeros, as all micro-batches but the first find it."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
