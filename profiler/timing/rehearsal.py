"""A first run of the layers, one by one, before any is timed: what goes wrong is named by layer.

A backward that cannot be split (torch's reentrant checkpoint refuses it) is no error: the halves are not measured then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from gplan.core.errors import ModelError, RunError
from profiler.backward.split_backward import first_half
from profiler.capture.chain import Tensors, detached, roots_with_gradients, wants_gradient
from profiler.model.available_memory import is_out_of_memory
from profiler.model.error_location import describe
from profiler.timing.bench import Bench

Result = TypeVar("Result")


def rehearse(bench: Bench) -> tuple[str, ...]:
    """Run each layer forward and backward alone; returns notes on what is odd.

    Raises ModelError, naming the layer, for one that cannot be run alone, changes its own parameters, or needs more
    memory than there is; RunError where the device vanished.
    """
    tensors, notes, passed = bench.inputs, [], []
    for name, layer in zip((f"layer {x}" for x in bench.names), bench.layers, strict=True):
        leaves = detached(tensors)
        versions = {x: (x._version, x.data_ptr()) for x in layer.parameters()}
        tensors = named(name, "forward", partial(layer, *leaves))
        changed = [key for key, x in layer.named_parameters() if versions[x] != (x._version, x.data_ptr())]
        if changed:
            raise ModelError(
                f"{name} changes its own parameter {changed[0]} in its forward pass; expected parameters to change in the "
                "optimizer's step only: make it a buffer (register_buffer), or update it outside forward"
            )
        if not _is_finite(tensors):
            notes.append(f"{name} gives values that are not finite: look at its weights, its inputs and its dtype")
        passed.append((name, leaves, tensors))
    _rehearse_backward(bench, tensors, passed)
    return tuple(notes[:1])


def obstacle_to_halves(bench: Bench) -> str:
    """Why the backward cannot be split, with the layer; "" where it can."""
    tensors, passed = bench.inputs, []
    for name, layer in zip(bench.names, bench.layers, strict=True):
        leaves = detached(tensors)
        tensors = layer(*leaves)
        passed.append((name, leaves, tensors))
    for name, leaves, outputs in reversed(passed):
        roots = [x for x in outputs if x.requires_grad]
        if roots and wants_gradient(leaves):
            try:
                _, rest = first_half(roots, [torch.zeros_like(x) for x in roots], leaves)
                rest.run()
            except Exception as error:
                return f"layer {name}: {describe(error)}"
    return ""


def named(name: str, direction: str, work: Callable[[], Result]) -> Result:
    """What `work` returns; its errors name the layer."""
    try:
        return work()
    except torch.AcceleratorError as error:
        raise RunError(
            f"{name}: the device failed in the {direction} pass: {describe(error)}; see that it is still there (nvidia-smi) "
            "and run again: what was measured is kept"
        ) from error
    except ModelError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise ModelError(
                f"{name} runs out of memory in its {direction} pass; profile smaller micro-batches (--microbatch-size), or "
                "on a device with more memory"
            ) from error
        raise ModelError(f"{name} cannot be run alone, {direction}: {describe(error)}; mend it there") from error


def _rehearse_backward(bench: Bench, tensors: Tensors, passed: Sequence[tuple[str, Tensors, Tensors]]) -> None:
    leaves = detached(tensors)
    loss = named("the loss", "forward", lambda: bench.loss(leaves))
    if not loss.requires_grad:
        return
    named("the loss", "backward", loss.backward)
    for name, before, outputs in reversed(passed):
        roots, gradients = roots_with_gradients(outputs, leaves)
        if roots:
            named(name, "backward", partial(torch.autograd.backward, roots, gradients))
        leaves = before


def _is_finite(tensors: Tensors) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors if x.is_floating_point())
