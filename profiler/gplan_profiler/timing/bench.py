"""A bench: a chain of layers to be measured, with data to run them on, and its first untimed run.

A bench holds the layers of a captured model that must be measured (gplan_profiler/capture/equal_layers.py), all in memory.
For a model larger than memory it holds one layer. The untimed run finds layers that fail and names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gplan.core import Granularity
from gplan.core.errors import ModelError, RunError
from gplan_profiler.backward.rematerialize import without_checkpointing
from gplan_profiler.backward.split_backward import first_half
from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import (
    Chain,
    NotFinite,
    Tensors,
    TensorSpec,
    detached,
    flat_tensors,
    roots_with_gradients,
    wants_gradient,
)
from gplan_profiler.capture.equal_layers import sources
from gplan_profiler.capture.module_attributes import unreadable
from gplan_profiler.capture.sequence import SequentialChain
from gplan_profiler.memory.allocations import tensors_in
from gplan_profiler.model.error_location import describe, is_out_of_memory
from gplan_profiler.model.load import ModelFile
from gplan_profiler.timing.clock import Clock

_WHOLE_AT_MOST = 4  # the whole model is run only where it has at most so many times the layers that are measured


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Layers in a row; the samples of layers with the same key are pooled."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    stage: nn.Module  # all of them as one module
    inputs: Tensors
    loss: Callable[[Tensors], Tensor]
    whole: Callable[[], Tensor] | None = None  # the loss of the author's own model, where it is run
    # what the author's model checkpointed in the last call of `whole`, left out there
    checkpoints: Sequence[object] = ()
    # of the inputs of each layer within its stage; none: as the layer before makes them
    specs: tuple[tuple[TensorSpec, ...], ...] = ()
    others: tuple[Bench, ...] = ()  # the same layers with other batches, where their time depends on routing

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters of the layers, each once."""
        return tuple(dict.fromkeys(x for layer in self.layers for x in layer.parameters()))

    def forward(self, run: Callable[[int, Tensors], Tensors]) -> tuple[list[LayerPass], Tensors]:
        """Run the layers, each as a graph of its own, by `run(place, inputs)`; also the last outputs, as new leaves."""
        leaves, passed = detached(self.inputs), []
        for place in range(len(self.layers)):
            if self.specs and place:  # after a layer that may not be the one before it in the model
                leaves = tuple(spec.laid_out(x) for spec, x in zip(self.specs[place], leaves, strict=True))
            outputs = run(place, leaves)
            passed.append((leaves, outputs))
            leaves = detached(outputs)
        return passed, leaves


LayerPass = tuple[Tensors, Tensors]
"""The inputs of a layer, as leaves of its graph, and its outputs."""


def backward(
    passed: Sequence[LayerPass], leaves: Tensors, run: Callable[[int, list[Tensor], list[Tensor]], object]
) -> None:
    """Run the layers' backwards, from the last one on, by `run(place, roots, gradients)`; `leaves` have gradients."""
    for place, (inputs, outputs) in reversed(list(enumerate(passed))):
        roots, gradients = roots_with_gradients(outputs, leaves)
        if roots:
            run(place, roots, gradients)
        leaves = inputs


def run_passes(bench: Bench, run: Callable[[int, str, Callable[[], Any]], Any]) -> None:
    """All layers forward, the loss, all layers backward, each by `run(place, direction, work)`; the loss has place L."""
    passed, leaves = bench.forward(lambda place, x: run(place, "forward", partial(bench.layers[place], *x)))
    loss: Tensor = run(len(bench.layers), "forward", partial(bench.loss, leaves))
    if loss.requires_grad:
        run(len(bench.layers), "backward", loss.backward)
        backward(passed, leaves, lambda place, *roots: run(place, "backward", partial(torch.autograd.backward, *roots)))


class Composed(nn.Module):
    """Stages one after the other, as one module."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self._parts = tuple(parts)
        for index, part in enumerate(dict.fromkeys(parts)):
            self.add_module(str(index), part)

    def forward(self, *tensors: Tensor) -> Tensors:
        for part in self._parts:
            tensors = part(*tensors)
        return tensors


def layers_to_measure(chain: Chain) -> tuple[tuple[int, ...], dict[int, str]]:
    """For every layer the layer measured for it; and for each measured layer its key, by the first of its structure."""
    structures = [chain.structure(layer) for layer in range(len(chain))]
    found = sources(structures)
    first: dict[object, int] = {}
    return found, {x: str(first.setdefault(structures[x], x)) for x in sorted(set(found))}


def capture_of_file(
    file: ModelFile, inputs: Any, *, granularity: Granularity, divided: tuple[str, ...] | None
) -> Chain:
    """The layers of a model file for a micro-batch's inputs, as `capture` makes them for a profile."""
    return capture(
        file.model,
        inputs,
        granularity=granularity,
        divided=divided,
        precision=file.precision,
        loss=file.functions.get("loss"),
    )


def bench_of_chain(
    file: ModelFile,
    chain: Chain,
    keys: dict[int, str],
    inputs: Any,
    target: Any,
    others: Iterable[tuple[Any, Any]] = (),
    *,
    sends: bool = True,
) -> Bench:
    """The bench of a model in memory; `keys` are those of the layers to be measured, `others` more batches.

    Unless each layer `sends`, it gives the strides that it has within a stage.
    """
    kept = tuple(keys)
    layers = {layer: chain.stage(layer, layer + 1, sends=sends) for layer in kept}

    checkpoints: list[object] = []

    def whole() -> Tensor:
        if isinstance(chain, SequentialChain):  # its layers are the author's modules, which may checkpoint
            return _loss(file, file.forward(inputs), target)
        with without_checkpointing() as found:  # as in its layers
            loss = _loss(file, file.forward(inputs), target)
        checkpoints[:] = found
        return loss

    return Bench(
        names=tuple(chain.names[layer] for layer in kept),
        keys=tuple(keys.values()),
        layers=tuple(layers.values()),
        stage=Composed([chain.stage(first, end) for first, end in _segments(kept)]),
        inputs=flat_tensors(inputs, what="the inputs"),
        loss=_loss_of_chain(file, chain, target),
        whole=whole if len(chain) <= _WHOLE_AT_MOST * len(kept) else None,
        checkpoints=checkpoints,
        specs=tuple(chain.specs(layer) for layer in kept),
        others=tuple(bench_of_chain(file, chain, keys, *batch, sends=sends) for batch in others),
    )


def bench_of_layer(name: str, key: str, layer: nn.Module, inputs: Tensors) -> Bench:
    """One layer, with the sum of its outputs as the loss."""
    return Bench(names=(name,), keys=(key,), layers=(layer,), stage=layer, inputs=inputs, loss=sum_of_outputs)


def bench_of_loss(file: ModelFile, chain: Chain, outputs: Tensors, target: Any) -> Bench:
    """A bench without layers: only the loss of the model's outputs."""
    loss = _loss_of_chain(file, chain, target)
    return Bench(names=(), keys=(), layers=(), stage=Composed([]), inputs=outputs, loss=loss)


def sum_of_outputs(output: Any) -> Tensor:
    """The loss of a model without one: the sum of all outputs that require a gradient."""
    tensors = [x for x in tensors_in(output) if x.requires_grad]
    return torch.stack([x.sum() for x in tensors]).sum() if tensors else torch.zeros(())


def _loss_of_chain(file: ModelFile, chain: Chain, target: Any) -> Callable[[Tensors], Tensor]:
    """The loss of the outputs of a chain's last layer."""

    def loss(outputs: Tensors) -> Tensor:
        with unreadable(chain.assigned):
            return _loss(file, chain.model_output(outputs), target)

    return loss


def _loss(file: ModelFile, output: Any, target: Any) -> Tensor:
    return file.loss(output, target) if file.has_loss else sum_of_outputs(output)


def _segments(kept: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive layers as (first, end).

    >>> _segments([0, 1, 2, 7, 8])
    [(0, 3), (7, 9)]
    """
    starts = [kept[0], *(b for a, b in pairwise(kept) if b != a + 1)]
    ends = [*(a + 1 for a, b in pairwise(kept) if b != a + 1), kept[-1] + 1]
    return list(zip(starts, ends, strict=True))


Result = TypeVar("Result")


def rehearse(bench: Bench) -> tuple[str, ...]:
    """Run each layer forward and backward once; returns a note where the loss is not finite.

    Raises ModelError, naming the layer, for one that fails, changes its own parameters, or runs out of memory; RunError
    where the device failed.
    """
    not_finite = NotFinite()

    def run(place: int, direction: str, work: Callable[[], Any]) -> Any:
        is_loss = place == len(bench.names)
        name = "the loss" if is_loss else f"layer {bench.names[place]}"
        if direction == "backward":
            return run_naming_errors(name, direction, work)
        parameters = {} if is_loss else dict(bench.layers[place].named_parameters())
        versions = {key: (x._version, x.data_ptr()) for key, x in parameters.items()}
        made = run_naming_errors(name, direction, work)
        if changed := [key for key, x in parameters.items() if versions[key] != (x._version, x.data_ptr())]:
            raise ModelError(
                f"{name} changes its own parameter {changed[0]} in its forward pass; expected parameters to change in the "
                "optimizer's step only: make it a buffer (register_buffer), or update it outside forward"
            )
        not_finite.after(place, [(made, True)] if is_loss else [(x, x.requires_grad) for x in made])
        return made

    run_passes(bench, run)
    if not_finite.first is None:
        return ()
    name = [*bench.names, "(loss)"][not_finite.first]
    return (f"layer {name} returns values that are not finite: check its weights, its inputs and its dtype",)


def waiting_passes(bench: Bench, clock: Clock) -> set[str]:
    """The passes in which the host waits for the device, such as "0/forward", by the key of the layer."""
    found = set[str]()

    def run(place: int, direction: str, work: Callable[[], Any]) -> Any:
        result, waits = clock.waited(work)
        if waits and place < len(bench.keys):
            found.add(f"{bench.keys[place]}/{direction}")
        return result

    run_passes(bench, run)
    return found


def split_backward_obstacle(bench: Bench) -> str:
    """The reason why a layer's backward cannot be split, such as reentrant checkpoint; "" if all can."""
    passed, _ = bench.forward(lambda place, leaves: bench.layers[place](*leaves))
    for name, (leaves, outputs) in reversed(list(zip(bench.names, passed, strict=True))):
        roots = [x for x in outputs if x.requires_grad]
        if roots and wants_gradient(leaves):
            try:
                _, rest = first_half(roots, [torch.zeros_like(x) for x in roots], leaves)
                rest.run()
            except Exception as error:
                return f"layer {name}: {describe(error)}"
    return ""


def run_naming_errors(name: str, direction: str, work: Callable[[], Result]) -> Result:
    """The result of `work`; its errors name the layer."""
    try:
        return work()
    except torch.AcceleratorError as error:
        raise RunError(
            f"{name}: the device failed in the {direction} pass: {describe(error)}; see that it is still there (nvidia-smi), "
            "then run again"
        ) from error
    except ModelError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise ModelError(
                f"{name} runs out of memory in its {direction} pass; profile smaller micro-batches (--microbatch-size), or "
                "on a device with more memory"
            ) from error
        remedy = (
            "; outputs are bfloat16 with this --precision: compute the loss in float32, as in loss(output.float(), ...)"
        )
        is_of_precision = name == "the loss" and "BFloat16" in str(error)
        raise ModelError(
            f"{name} fails in its {direction} pass: {describe(error)}{remedy * is_of_precision}"
        ) from error
