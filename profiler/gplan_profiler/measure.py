"""Measure a model file: time and memory of every layer at each micro-batch size, the optimizer's step and the link.

Gradients accumulate into existing buffers, as for all micro-batches of a step but the first, which is measured
separately. Parameters, gradients, buffers and the random state are left unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from typing import Literal

import torch

from gplan.core import Device, EngineCost, Granularity, Link, Profile
from gplan.core.errors import ModelError, UsageError
from gplan.core.profile import SAMPLING_BUDGET_S
from gplan.core.progress import Progress, no_progress, part
from gplan.core.units import bytes_text, counted, now_text, seconds_text
from gplan_profiler.capture.chain import model_state_restored, routing_notes
from gplan_profiler.capture.module_attributes import attributes_restored
from gplan_profiler.host.host_info import (
    core_shares,
    cuda_problem,
    device_share,
    gpu_memory,
    gpu_state,
    max_neighbours,
    processor,
    software_versions,
    unused_gpu_notes,
    usable_cores,
)
from gplan_profiler.host.host_load import HostMeter
from gplan_profiler.host.links import ASSUMED_GPU_LINK, is_measurable, measure_link
from gplan_profiler.memory.chain_profile import layers_with_weights, values_of
from gplan_profiler.model.compiled import uncompiled
from gplan_profiler.model.data import LossFacts, call_model, check_microbatch_sizes, find_loss_reduction, sample_batches
from gplan_profiler.model.error_location import is_out_of_memory
from gplan_profiler.model.load import ModelFile
from gplan_profiler.timing.bench import run_naming_errors
from gplan_profiler.timing.clock import Clock, CpuClock, CudaClock
from gplan_profiler.timing.layer_timing import NUM_ROUTED_BATCHES, MeasuredSize, Setup, measure_size
from gplan_profiler.timing.optimizer_step import MICROBATCHES, StepSampler
from gplan_profiler.torch_compat import torch_notes

_SHARE_OF_LAYERS, _SHARE_OF_STEP = 0.75, 0.15  # of the progress of a profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options of a measurement; raises UsageError for options that this host cannot satisfy."""

    microbatch_sizes: tuple[int, ...] = (4,)
    device: str = "cpu"  # or "cuda", "cuda:1"
    num_threads: int = 1
    contention: int | None = None  # number of neighbour processes; None: as many as there may be
    link: Link | None = None  # None: measured
    granularity: Granularity = "auto"
    budget_s: float = SAMPLING_BUDGET_S  # longest sampling per micro-batch size

    def __post_init__(self) -> None:
        check_microbatch_sizes(self.microbatch_sizes)
        cores = len(usable_cores())
        if not 1 <= self.num_threads <= cores:
            possible = "1 is possible" if cores == 1 else f"1 to {cores} are possible"
            raise UsageError(
                f"{self.num_threads} threads were requested; this process may use {counted(cores, 'core')}: {possible}"
            )
        if not self.budget_s > 0:
            raise UsageError(f"the time to sample is {self.budget_s:g} s; expected more than 0")
        if self.device != "cpu":
            match = re.fullmatch(r"cuda(?::([0-9]+))?", self.device)
            if match is None:
                raise UsageError(f"--device {self.device}: expected auto, cpu, cuda, cuda:1 or meta")
            if (problem := cuda_problem()) is not None:
                raise UsageError(f"--device {self.device}: {problem}; or use --device cpu")
            if int(match[1] or 0) >= (count := torch.cuda.device_count()):
                raise UsageError(
                    f"--device {self.device}: this host has {counted(count, 'CUDA device')}, numbered from 0"
                )
        if self.contention and self.device_kind != "cpu":
            raise UsageError(
                f"--contention {self.contention} with --device {self.device}: contention is measured on CPU cores "
                "only; expected 0, or --device cpu"
            )
        most = max_neighbours(self.num_threads)
        if self.contention is not None and not 0 <= self.contention <= most:
            raise UsageError(
                f"--contention {self.contention}: beside a device of {counted(self.num_threads, 'thread')} this host has cores "
                f"for {most} more; expected {f'0 to {most}' if most else '0, or fewer threads'}"
            )

    @property
    def device_kind(self) -> Literal["cpu", "cuda"]:
        """The kind of the device, without its index."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def num_neighbours(self) -> int:
        """The number of processes that compute beside the measured one."""
        if self.contention is not None:
            return self.contention
        return max_neighbours(self.num_threads) if self.device_kind == "cpu" else 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the profile must know about these options."""
        found = unused_gpu_notes() if self.device_kind == "cpu" else ()
        if self.link is None and not is_measurable(self.device_kind):
            rate, latency = bytes_text(ASSUMED_GPU_LINK.bytes_per_s), seconds_text(ASSUMED_GPU_LINK.latency_s)
            found = (
                f"this host has one GPU: its link to others is assumed, {rate}/s and {latency}; state it with --link",
            )
        if self.num_threads == 1 or not self.num_neighbours:
            return found
        return (
            *found,
            f"contention was measured beside processes of one thread, not of {self.num_threads}: it may be too low",
        )


@uncompiled()
def measure_profile(
    file: ModelFile,
    options: ProfileOptions,
    *,
    progress: Progress = no_progress,
    measure_engine: Callable[[], EngineCost] | None = None,
    clock: Clock | None = None,
) -> Profile:
    """Measure every layer of the model on this host by `clock` (by default that of the device), and last the engine.

    Raises ModelError for a model that cannot be captured, run or trained as the file describes it.
    """
    clock = clock or (CpuClock() if options.device == "cpu" else CudaClock())
    shares = tuple(core_shares(1 + options.num_neighbours, num_threads=options.num_threads)[1:])
    model = file.model
    with (
        device_share(options.num_threads),
        _on_device(file, options.device),
        model_state_restored(model),
        attributes_restored(model),
    ):
        if file.is_lazy:  # it cannot be run here
            loss = LossFacts(reduction=file.loss_reduction or "mean")
        else:
            progress("running the model and its loss", 0.0)
            loss = find_loss_reduction(file, options.microbatch_sizes[0], device=options.device)
        host = HostMeter(device=options.device)
        steps = StepSampler(
            file, clock, device=options.device, shares=shares, work_beside=_training_pass(file, options)
        )

        @cache  # once, although each bench calls it
        def sample_updates_first() -> None:
            steps.sample(lambda text, _: progress(text, 0.0))

        setup = Setup(
            clock=clock,
            device=options.device,
            budget_s=options.budget_s,
            granularity=options.granularity,
            shares=shares,
            before_timing=sample_updates_first,
            between_samples=host.read_if_due,
        )
        measured, too_large = _measure_sizes(
            file, options, setup, lambda text, share: progress(text, _SHARE_OF_LAYERS * share)
        )
        steps.sample(lambda text, share: progress(f"{text}, again", _SHARE_OF_LAYERS + _SHARE_OF_STEP * share))
        load = host.load()
    link = options.link or ASSUMED_GPU_LINK
    if options.link is None and is_measurable(options.device_kind):
        progress("measuring the link between two processes", 0.9)
        link = measure_link(device_kind=options.device_kind)
    engine = None
    if measure_engine is not None:
        progress("measuring the engine between two processes", 0.95)
        engine = measure_engine()
    device, device_notes = _device(options)
    first, values = measured[0], values_of(measured)
    chain = first.chain
    step, updates_s = steps.update()
    layers, shared = layers_with_weights(measured, updates_s=updates_s)
    if file.is_lazy:
        how_routed = "it was measured with random values"
    elif file.has("batches"):
        how_routed = f"it is the median over up to {NUM_ROUTED_BATCHES} batches, and its spread includes theirs"
    else:
        how_routed = "it was measured with the example inputs"
    return Profile(
        model=file.identity(chain),
        device=device,
        layers=layers,
        shared_weights=shared,
        loss=tuple(x.loss for x in measured) if file.has_loss else (),
        loss_reduction=first.loss_reduction or loss.reduction,
        step=step,
        link=link,
        engine=engine,
        overhead_s=sum(x.overhead_s for x in measured) / len(measured),
        whole_model=tuple(x.whole for x in measured if x.whole is not None),
        created=now_text(),
        versions=(*software_versions(), *(gpu_state() if options.device_kind == "cuda" else ())),
        num_neighbours=options.num_neighbours,
        notes=tuple(
            dict.fromkeys(
                (
                    *torch_notes(),
                    *file.notes,
                    *options.notes,
                    *device_notes,
                    *loss.notes,
                    *(x for y in measured for x in y.notes),
                    *steps.notes,
                    *too_large,
                )
            )
        ),
        plan_notes=(*file.notes_on_missing, *routing_notes(chain, how=how_routed), *loss.plan_notes),
        granularity=options.granularity,
        values=values,
        precision=file.precision,
        host_load=load,
    )


def _measure_sizes(
    file: ModelFile, options: ProfileOptions, setup: Setup, progress: Progress
) -> tuple[list[MeasuredSize], tuple[str, ...]]:
    """The sizes that fit in memory, and a note on those that do not."""
    measured: list[MeasuredSize] = []
    count = len(options.microbatch_sizes)
    for index, size in enumerate(options.microbatch_sizes):
        try:
            divided = measured[0].chain.divided if measured else None
            measured.append(measure_size(file, size, setup, divided, part(progress, index, count)))
        except ModelError as error:
            if not measured or not is_out_of_memory(error):
                raise
            return measured, (f"micro-batch sizes from {size} up were left out: {error}",)
    return measured, ()


def _training_pass(file: ModelFile, options: ProfileOptions) -> Callable[[], object] | None:
    """Forward and backward of the next of some micro-batches; None without weights in memory or without a loss."""
    if file.is_lazy or not file.has_loss:
        return None
    found = sample_batches(file, options.microbatch_sizes[0], device=options.device)
    batches = cycle(list(islice(found, MICROBATCHES)))

    def train_once() -> None:
        inputs, target = next(batches)
        loss = file.loss(call_model(file, inputs), target)
        if loss.requires_grad:
            run_naming_errors("the model", "backward", loss.backward)

    return train_once


@contextmanager
def _on_device(file: ModelFile, device: str) -> Iterator[None]:
    """Inside, the model is on the device."""
    if device == "cpu" or file.is_lazy:
        yield
        return
    before = next((x.device for x in file.model.parameters()), torch.device("cpu"))
    file.model.to(device)
    try:
        with torch.cuda.device(device):
            yield
    finally:
        file.model.to(before)


def _device(options: ProfileOptions) -> tuple[Device, tuple[str, ...]]:
    """The device, with the memory that torch's allocator can have of it, and notes on it."""
    if options.device == "cpu":
        return Device(name=processor(), kind="cpu", num_threads=options.num_threads), ()
    name, (memory_bytes, notes) = torch.cuda.get_device_name(options.device), gpu_memory(options.device)
    return Device(name=name, kind="cuda", num_threads=options.num_threads, memory_bytes=memory_bytes), notes
