"""A profile without a measurement: work and memory of every layer from fake tensors, seconds from a device's figures.

One forward and backward of the layers runs on tensors that have shapes and no memory, under modes that count operations
(profiler/work.py) and follow storages (profiler/ledger.py); profiler/roofline.py turns work into seconds. Only layers
that differ are run (profiler/repeats.py). Operations are those that torch runs on a CPU: fused attention is one of
them, except with dropout inside it. Compilers, and what a device's own kernels do otherwise, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gplan.errors import ModelError, UsageError
from gplan.nouns import Layer, LayerCost, Link, ModelId, Profile, Timing, Work
from gplan.units import percent_text
from profiler.analytic_step import computed_step
from profiler.author import describe
from profiler.bench import bench_of_chain, layer_keys
from profiler.capture import capture
from profiler.chain import Chain, Tensors, untouched
from profiler.data import sample_batch
from profiler.hardware import Hardware
from profiler.host import software_versions
from profiler.ledger import Ledger, storage_key
from profiler.load import ModelFile
from profiler.memory_pass import LayerBytes, Passage, layer_bytes, pass_through
from profiler.repeats import sources
from profiler.roofline import Calibration, roofline_seconds
from profiler.weights import layer_weights
from profiler.work import WorkCounter, product_dtype, total_work

_STAGE_LAUNCHES = 10  # a stage's call and the start of autograd's engine, in launches of an operation: assumed

Progress = Callable[[str, float], None]
"""Called with what is being done and the share that is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAnalysis:
    """What one layer, or the loss, does and keeps for one micro-batch."""

    forward_work: tuple[Work, ...]
    backward_work: tuple[Work, ...]
    size: LayerBytes
    dtype: str  # of its products


def analyse(
    layers: Sequence[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor]
) -> tuple[LayerAnalysis, ...]:
    """One entry for each layer and a last one for the loss, from one forward and backward on fake tensors.

    The layers are left as they are; their parameters may be real or fake. Raises ModelError for a layer or a loss that
    decides by the values of tensors.
    """
    mode = _fake_mode(layers)
    fakes = _Fakes(mode)
    try:
        with mode:
            calls = [fakes.call(layer) for layer in layers]
            entering = tuple(fakes.of(x) for x in inputs)
            with Ledger() as ledger, WorkCounter(ledger.now) as counter, _RealFaked(mode):
                passage = pass_through(calls, entering, loss, now=ledger.now, address_of=storage_key)
    except Exception as error:
        raise ModelError(
            f"the model cannot be followed on tensors without values: {describe(error)}; expected layers and a loss "
            "that do not decide by values (an `if`, a loop, .item()): measure this model where it can run"
        ) from error
    return _analyses(passage, layer_bytes(ledger.trace(), passage), counter)


def _analyses(passage: Passage, sizes: Sequence[LayerBytes], counter: WorkCounter) -> tuple[LayerAnalysis, ...]:
    found = []
    for forward, backward, size in zip(passage.forwards, passage.backwards, sizes, strict=True):
        before, after = counter.between(*forward), counter.between(*backward)
        found.append(
            LayerAnalysis(
                forward_work=total_work(before),
                backward_work=total_work(after),
                size=size,
                dtype=product_dtype((*before, *after)),
            )
        )
    return tuple(found)


def _fake_mode(layers: Sequence[nn.Module]) -> FakeTensorMode:
    """The mode of the fake tensors that the layers hold, or a new one."""
    held = (x for layer in layers for x in (*layer.parameters(), *layer.buffers()))
    return next((x.fake_mode for x in held if isinstance(x, FakeTensor)), FakeTensorMode(allow_non_fake_inputs=True))


class _RealFaked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands on fake tensors for real ones, such as targets and constants, so that the modes around it see one storage."""

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


class _Fakes:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """For what to compute."""

    hardware: Hardware
    microbatch_sizes: tuple[int, ...] = (4,)
    calibration: Calibration | None = None  # its hardware is used then
    link: Link | None = None  # None: the hardware's

    def __post_init__(self) -> None:
        sizes = self.microbatch_sizes
        if not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
            raise UsageError(f"micro-batch sizes are {sizes}; expected rising numbers of at least 1, such as 1,2,4")

    @property
    def figures(self) -> Hardware:
        """The hardware, calibrated where it was."""
        return self.calibration.hardware if self.calibration else self.hardware


def computed_profile(
    file: ModelFile, options: ComputeOptions, *, progress: Progress = lambda _text, _share: None
) -> Profile:
    """The profile of a model on hardware that is not at hand; its weights may be real or fake.

    Raises ModelError for a model that cannot be captured or followed without values, UsageError where it multiplies in
    a dtype that the hardware has no flop rate for.
    """
    hardware, sizes = options.figures, []
    with untouched(file.model):
        for index, size in enumerate(options.microbatch_sizes):
            progress(f"micro-batch size {size}: capturing and counting", index / len(options.microbatch_sizes))
            sizes.append(_computed_size(file, size, hardware))
        step = computed_step(file, hardware)
    chain = sizes[0].chain
    return Profile(
        model=ModelId(name=file.name, settings=file.settings, digest=chain.digest(), in_memory=file.in_memory),
        device=hardware.device(),
        layers=_layers(sizes),
        shared_weights=layer_weights(chain)[1],
        loss=tuple(x.loss for x in sizes) if file.gives_loss else (),
        loss_reduction=file.loss_reduction or "mean",
        step=step,
        link=options.link or hardware.link,
        overhead_s=_STAGE_LAUNCHES * hardware.launch_s,
        whole=(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=software_versions(),
        origin="computed",
        notes=(*file.notes, *_notes(file, options)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ComputedSize:
    """One micro-batch size: for each layer the one that was analysed for it, and all costs."""

    chain: Chain
    sources: tuple[int, ...]
    layers: tuple[LayerCost, ...]
    loss: LayerCost


def _computed_size(file: ModelFile, size: int, hardware: Hardware) -> _ComputedSize:
    inputs, target = sample_batch(file, size)
    chain = capture(file.model, inputs)
    structures = [chain.structure(layer) for layer in range(len(chain))]
    found = sources(structures)
    kept = sorted(set(found))
    bench = bench_of_chain(file, chain, layer_keys(structures, kept), inputs, target)
    *costs, loss = (_cost(x, size, hardware) for x in analyse(bench.layers, bench.inputs, bench.loss))
    by_layer = dict(zip(kept, costs, strict=True))
    return _ComputedSize(chain=chain, sources=found, layers=tuple(by_layer[x] for x in found), loss=loss)


def _cost(analysis: LayerAnalysis, size: int, hardware: Hardware) -> LayerCost:
    forward_s, backward_s = (
        roofline_seconds(work, hardware, dtype=analysis.dtype)
        for work in (analysis.forward_work, analysis.backward_work)
    )
    return LayerCost(
        microbatch_size=size,
        forward=Timing.exactly(forward_s, origin="computed"),
        backward=Timing.exactly(backward_s, origin="computed"),
        forward_work=analysis.forward_work,
        backward_work=analysis.backward_work,
        **asdict(analysis.size),
    )


def _layers(sizes: Sequence[_ComputedSize]) -> tuple[Layer, ...]:
    chain, (weights, _) = sizes[0].chain, layer_weights(sizes[0].chain)
    return tuple(
        Layer(
            name=chain.names[layer],
            kind=chain.kinds[layer],
            num_parameters=weights[layer].num_parameters,
            weight_bytes=weights[layer].weight_bytes,
            gradient_bytes=weights[layer].gradient_bytes,
            costs=tuple(size.layers[layer] for size in sizes),
            same_as=None if source == layer else source,
        )
        for layer, source in enumerate(sizes[0].sources)
    )


def _notes(file: ModelFile, options: ComputeOptions) -> tuple[str, ...]:
    hardware, fit = options.figures, options.calibration
    shares = ", ".join(f"{x.kind} {percent_text(x.flops)} / {percent_text(x.bandwidth)}" for x in hardware.efficiencies)
    origin = "assumed" if fit is None else f"calibrated by {fit.num_samples} timings of {fit.profile_name}"
    notes = [
        f"computed for {hardware.name}, nothing was measured; figures: {dict(hardware.sources)['flops']}",
        f"shares of the peak flop rate / memory bandwidth that operations reach, {origin}: {shares}",
    ]
    if fit is not None:
        notes.append(
            f"calibration brought the median error of a layer from {percent_text(fit.before.median_error)} to "
            f"{percent_text(fit.after.median_error)}, the worst from {percent_text(fit.before.worst_error)} to "
            f"{percent_text(fit.after.worst_error)}"
        )
    if file.gives_loss and file.loss_reduction is None:
        notes.append('the loss is taken for a mean over the samples; write loss_reduction = "sum" into the file if not')
    return tuple(notes)
