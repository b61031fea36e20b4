"""A model file to a Profile: every layer's time and memory at each micro-batch size, the optimizer's step, the link.

Gradients accumulate into buffers that exist, as for all micro-batches of a step but the first. Parameters, gradients,
buffers and the random state are left as they were.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import torch
from torch import Tensor, nn

from gplan.errors import ModelError, UsageError
from gplan.nouns import (
    Device,
    Layer,
    LayerCost,
    Link,
    LossReduction,
    ModelId,
    Profile,
    SharedWeight,
    StepCost,
    Timing,
    WholeModel,
)
from profiler.bytes import now_ns, storage_bytes, traced_allocations
from profiler.capture import capture
from profiler.chain import Chain, Tensors, call_arguments, flat_tensors, untouched
from profiler.clock import Samples, Stopwatch
from profiler.links import measure_link
from profiler.load import ModelFile, describe
from profiler.memory_pass import allocate_gradients, measure_bytes
from profiler.processes import core_shares
from profiler.rounds import Rounds

_OPTIMIZER_STEPS = 10
_OPTIMIZER_WARMUP = 2

Progress = Callable[[str, float], None]
"""Called with what is being done and the share that is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How to measure."""

    microbatch_sizes: tuple[int, ...] = (4,)
    num_threads: int = 1
    link: Link | None = None  # None: measured
    budget_s: float = 10.0  # longest sampling per micro-batch size

    def __post_init__(self) -> None:
        sizes = self.microbatch_sizes
        if not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
            raise UsageError(f"micro-batch sizes are {sizes}; expected rising numbers of at least 1, such as 1,2,4")
        cores = os.cpu_count() or 1
        if not 1 <= self.num_threads <= cores:
            raise UsageError(
                f"asked for {self.num_threads} threads; this host has {cores} cores: 1 to {cores} are possible"
            )
        if not self.budget_s > 0:
            raise UsageError(f"the time to sample is {self.budget_s:g} s; expected more than 0")


def measure_profile(
    file: ModelFile, options: ProfileOptions, *, progress: Progress = lambda _text, _share: None
) -> Profile:
    """Measure every layer of the model on this host's CPU.

    Raises ModelError for a model that cannot be captured, run or trained as the file describes it.
    """
    with device_share(options.num_threads), untouched(file.model):
        sizes = options.microbatch_sizes
        file.model.train()
        reduction = find_loss_reduction(file, sizes[0])
        measured = []
        for index, size in enumerate(sizes):
            measured.append(_measure_size(file, size, options, _part(progress, index, len(sizes))))
        step = _measure_step(file)
    progress("measuring the link between two processes", 1.0)
    link = options.link or measure_link()
    chain = measured[0].chain
    layers, shared = _layers(chain, [x.layers for x in measured])
    return Profile(
        model=ModelId(name=file.name, settings=file.settings, digest=chain.digest(), in_memory=file.in_memory),
        device=Device(name=_processor(), kind="cpu", num_threads=options.num_threads),
        layers=layers,
        shared_weights=shared,
        loss=tuple(x.loss for x in measured) if file.gives_loss else (),
        loss_reduction=reduction,
        step=step,
        link=link,
        overhead_s=sum(x.overhead_s for x in measured) / len(measured),
        whole=tuple(x.whole for x in measured),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=software_versions(),
    )


def software_versions() -> tuple[tuple[str, str], ...]:
    """The versions that a measurement depends on."""
    return (
        ("torch", str(torch.__version__)),
        ("python", platform.python_version()),
        ("system", f"{platform.system()} {platform.machine()}"),
    )


def sample_batch(file: ModelFile, batch_size: int) -> tuple[Any, Any]:
    """Inputs and target for one micro-batch; the target is None where the file gives no batches."""
    if file.has("batches"):
        inputs, target = next(file.batches(batch_size))
        check_batch(inputs, batch_size, what=f"the inputs that batches({batch_size}) of {file.name} gives")
        check_target(target, batch_size, what=f"the targets that batches({batch_size}) of {file.name} gives")
        return inputs, target
    inputs = file.example_inputs(batch_size)
    check_batch(inputs, batch_size, what=f"the inputs that example_inputs({batch_size}) of {file.name} gives")
    return inputs, None


def check_batch(value: Any, batch_size: int, *, what: str) -> Tensors:
    """The tensors of a batch, checked to have `batch_size` rows each."""
    tensors = flat_tensors(value, what=what)
    check_target(tensors, batch_size, what=what)
    return tensors


def check_target(value: Any, batch_size: int, *, what: str) -> None:
    """A target may be anything, None included; each tensor in it has `batch_size` rows."""
    for tensor in torch.utils._pytree.tree_leaves(value):
        if isinstance(tensor, Tensor) and (tensor.dim() == 0 or tensor.shape[0] != batch_size):
            raise ModelError(
                f"{what} have shape {tuple(tensor.shape)}; expected {batch_size} samples in dimension 0 (of a data set "
                "that does not divide, leave out the last, short batch)"
            )


def find_loss_reduction(file: ModelFile, batch_size: int) -> LossReduction:
    """Whether the loss is a mean or a sum over the samples, found by evaluating a batch and its two parts.

    Raises ModelError for a model that does not accept its inputs and for a loss that is neither, such as a mean over
    tokens that are not padding: its micro-batches would add up to something else.
    """
    batch_size = max(2, batch_size)
    inputs, target = sample_batch(file, batch_size)
    file.model.eval()
    try:
        with torch.no_grad():
            output = _call_model(file, inputs)
            if not file.gives_loss:
                return "mean"
            whole = float(file.loss(output, target))
            parts = [float(file.loss(_call_model(file, x), y)) for x, y in _two_parts(inputs, target, batch_size)]
    finally:
        file.model.train()
    if not all(map(math.isfinite, (whole, *parts))):
        raise ModelError(
            f"the loss of {file.name} is {whole:.6g} for {batch_size} samples before any training, and {parts[0]:.6g} and "
            f"{parts[1]:.6g} for their two halves; expected finite numbers: look at the model, the loss and the data"
        )
    share = (batch_size // 2) / batch_size
    mean, total = share * parts[0] + (1 - share) * parts[1], sum(parts)
    for combined, reduction in ((mean, "mean"), (total, "sum")):
        if abs(combined - whole) <= 1e-3 * abs(whole) + 1e-6:
            return cast(LossReduction, reduction)
    raise ModelError(
        f"the loss of {file.name} is {whole:.6g} for {batch_size} samples, and {parts[0]:.6g} and {parts[1]:.6g} for the "
        f"first and the second half of them; expected {mean:.6g} (a mean over the samples) or {total:.6g} (a sum), so that "
        "micro-batches add up to the batch; weight every sample alike"
    )


def _two_parts(inputs: Any, target: Any, batch_size: int) -> list[tuple[Any, Any]]:
    """The first half of a batch, and the rest."""

    def rows(value: Any, part: slice) -> Any:
        return torch.utils._pytree.tree_map(lambda x: x[part] if isinstance(x, Tensor) else x, value)

    cuts = (slice(0, batch_size // 2), slice(batch_size // 2, batch_size))
    return [(rows(inputs, cut), rows(target, cut)) for cut in cuts]


def _call_model(file: ModelFile, inputs: Any) -> Any:
    args, kwargs = call_arguments(inputs)
    try:
        return file.model(*args, **kwargs)
    except Exception as error:
        shapes = ", ".join(
            f"{tuple(x.shape)} {x.dtype}".replace("torch.", "") for x in flat_tensors(inputs, what="inputs")
        )
        raise ModelError(f"the model does not accept its inputs, {shapes}: {describe(error)}") from error


@contextmanager
def device_share(num_threads: int) -> Iterator[None]:
    """One device's share of the host: that many threads, pinned to as many cores."""
    before = torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    torch.set_num_threads(num_threads)
    try:
        if cores is not None:
            os.sched_setaffinity(0, core_shares(1, num_threads=num_threads)[0])
        yield
    finally:
        torch.set_num_threads(before)
        if cores is not None:
            os.sched_setaffinity(0, cores)


def _part(progress: Progress, index: int, count: int) -> Progress:
    return lambda text, share: progress(text, (index + share) / count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """One micro-batch size: the captured layers, what each costs, and the whole model."""

    chain: Chain
    layers: list[LayerCost]
    loss: LayerCost
    whole: WholeModel
    overhead_s: float


def _measure_size(file: ModelFile, size: int, options: ProfileOptions, progress: Progress) -> _Measured:
    progress(f"micro-batch size {size}: capturing the layers", 0.0)
    inputs, target = sample_batch(file, size)
    chain = capture(file.model, inputs)
    rounds = Rounds(file, chain, inputs, target)
    allocate_gradients(file.model)
    rounds.sample(
        options.budget_s,
        lambda index, share: progress(f"micro-batch size {size}: {len(chain)} layers, round {index}", share),
    )
    sizes = measure_bytes(rounds.layers, rounds.tensors, rounds.boundary_loss)
    *layers, loss = rounds.layer_costs(size, sizes)
    return _Measured(chain=chain, layers=layers, loss=loss, whole=rounds.whole(size), overhead_s=rounds.overhead_s())


def _measure_step(file: ModelFile) -> StepCost:
    """zero_grad and the optimizer's step, on copies of the parameters."""
    copies = [
        nn.Parameter(parameter.detach().clone()) for parameter in file.model.parameters() if parameter.requires_grad
    ]
    if not file.has("optimizer") or not copies:
        nothing = Timing.exactly(0.0)
        return StepCost(optimizer=nothing, zero_grad=nothing, optimizer_name="none", state_bytes=0, workspace_bytes=0)
    optimizer = file.optimizer(copies)
    samples, zeroing = Samples(), Samples()
    for index in range(_OPTIMIZER_STEPS):
        for copy in copies:
            copy.grad = torch.full_like(copy, 1e-3)
        watch = Stopwatch()
        try:
            optimizer.step()
        except Exception as error:
            raise ModelError(
                f"the optimizer of {file.name} cannot take a step on its own: {describe(error)}"
            ) from error
        spent = watch.stop()
        watch = Stopwatch()
        optimizer.zero_grad()
        if index >= _OPTIMIZER_WARMUP:
            samples.add(*spent)
            zeroing.add(*watch.stop())
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    with traced_allocations() as trace:
        optimizer.step()
        end_ns = now_ns()
    return StepCost(
        optimizer=samples.timing(),
        zero_grad=zeroing.timing(),
        optimizer_name=type(optimizer).__name__,
        state_bytes=optimizer_state_bytes(optimizer),
        workspace_bytes=max(0, trace.peak_bytes(0, end_ns)),
    )


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the distinct storages of an optimizer's state."""
    states = optimizer.state.values()
    return storage_bytes([x for state in states for x in state.values() if isinstance(x, Tensor)])


def _layers(chain: Chain, costs: Sequence[Sequence[LayerCost]]) -> tuple[tuple[Layer, ...], tuple[SharedWeight, ...]]:
    """The layers with their weights; a parameter that several layers use is listed apart."""
    users: dict[nn.Parameter, list[int]] = {}
    held: list[tuple[list[nn.Parameter], list[Tensor]]] = []
    for index in range(len(chain)):
        stage = chain.stage(index, index + 1)
        held.append((list(stage.parameters()), list(stage.buffers())))
        for parameter in held[-1][0]:
            users.setdefault(parameter, []).append(index)
    layers = []
    for index, (parameters, buffers) in enumerate(held):
        own = [x for x in parameters if len(users[x]) == 1]
        layers.append(
            Layer(
                name=chain.names[index],
                kind=chain.kinds[index],
                num_parameters=sum(x.numel() for x in own),
                weight_bytes=storage_bytes([*own, *buffers]),
                gradient_bytes=sum(x.nbytes for x in own if x.requires_grad),
                costs=tuple(per_size[index] for per_size in costs),
            )
        )
    names = {parameter: name for name, parameter in chain.model.named_parameters()}
    shared = [
        SharedWeight(
            name=names[x],
            layers=tuple(found),
            num_parameters=x.numel(),
            weight_bytes=x.nbytes,
            gradient_bytes=x.nbytes if x.requires_grad else 0,
        )
        for x, found in users.items()
        if len(found) > 1
    ]
    return tuple(layers), tuple(shared)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
