"""Compute a profile for hardware that is not present: work and memory by fake tensors, seconds by the roofline.

One layer of each kind is analysed on fake tensors. The optimizer runs on one fake parameter of each shape, dtype and set of attributes,
which assumes that it updates each parameter separately; for a GPU it uses "foreach" lists, torch's default there: few
launches, but the temporary tensors of all parameters at once. Compilers and device-specific kernels are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from gplan.core import Granularity, LayerCost, Link, Profile, StepCost, Timing, Work
from gplan.core.errors import ModelError
from gplan.core.progress import Progress, no_progress
from gplan.core.units import now_text, percent_text
from gplan_profiler.analytic.hardware import Hardware
from gplan_profiler.analytic.layer_work import LayerAnalysis, analyse_split
from gplan_profiler.analytic.roofline import (
    Operation,
    operations_seconds,
    roofline_seconds,
    total_work,
)
from gplan_profiler.analytic.work_counter import WorkCounter
from gplan_profiler.capture.chain import model_state_restored, routing_notes
from gplan_profiler.host.host_info import software_versions
from gplan_profiler.memory.allocations import StorageRecorder, gradient_bytes, optimizer_state_bytes
from gplan_profiler.memory.chain_profile import SizeCosts, layers_with_weights, values_of
from gplan_profiler.model.compiled import uncompiled
from gplan_profiler.model.data import check_microbatch_sizes, sample_batch
from gplan_profiler.model.error_location import describe
from gplan_profiler.model.load import ModelFile
from gplan_profiler.model.materialise import alike, with_attributes
from gplan_profiler.model.precision import MASTER_DTYPE, master_bytes, round_into
from gplan_profiler.timing.bench import bench_of_chain, capture_of_file, layers_to_measure
from gplan_profiler.torch_compat import FakeTensorMode

_NOT_COMPARED = (
    "how far the prediction may be off is not known: no run was compared with a profile computed from a model file"
)
_STAGE_LAUNCHES = 10  # a stage's call and the start of autograd's engine, in launches of an operation: assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """The hardware and micro-batch sizes of a computed profile."""

    hardware: Hardware
    microbatch_sizes: tuple[int, ...] = (4,)
    link: Link | None = None  # None: the hardware's
    granularity: Granularity = "auto"

    def __post_init__(self) -> None:
        check_microbatch_sizes(self.microbatch_sizes)


@uncompiled()
def computed_profile(file: ModelFile, options: ComputeOptions, *, progress: Progress = no_progress) -> Profile:
    """The profile of a model, with real or fake weights, on hardware that is not present.

    Raises ModelError for a model that cannot be captured or followed without values, UsageError for products in a dtype
    without a flop rate.
    """
    hardware, sizes = options.hardware, list[SizeCosts]()
    with model_state_restored(file.model):
        for index, size in enumerate(options.microbatch_sizes):
            progress(f"micro-batch size {size}: capturing and counting", index / len(options.microbatch_sizes))
            sizes.append(_computed_size(file, size, options, sizes[0].chain.divided if sizes else None))
        step = computed_step(file, hardware)
    first, values = sizes[0], values_of(sizes)
    layers, shared = layers_with_weights(sizes)
    return Profile(
        model=file.identity(first.chain),
        device=hardware.device(),
        layers=layers,
        shared_weights=shared,
        loss=tuple(x.loss for x in sizes) if file.has_loss else (),
        loss_reduction=file.loss_reduction or "mean",
        step=step,
        link=options.link or hardware.link,
        overhead_s=_STAGE_LAUNCHES * hardware.launch_s,
        whole_model=(),
        created=now_text(),
        versions=software_versions(),
        origin="computed",
        precision=file.precision,
        notes=(*file.notes, *first.chain.notes, *_notes(file, hardware)),
        plan_notes=(
            *file.notes_on_missing,
            *routing_notes(first.chain, how="it was computed from the shapes"),
            _NOT_COMPARED,
        ),
        granularity=options.granularity,
        values=values,
    )


def _computed_size(file: ModelFile, size: int, options: ComputeOptions, divided: tuple[str, ...] | None) -> SizeCosts:
    inputs, target = sample_batch(file, size)
    chain = capture_of_file(file, inputs, granularity=options.granularity, divided=divided)
    found, keys = layers_to_measure(chain)
    bench = bench_of_chain(file, chain, keys, inputs, target)
    *analyses, loss = analyse_split(bench.layers, bench.inputs, bench.loss)
    by_layer = dict(zip(keys, analyses, strict=True))
    costs = {layer: _cost(analysis, size, options.hardware) for layer, analysis in by_layer.items()}
    return SizeCosts(
        microbatch_size=size,
        chain=chain,
        sources=found,
        layers=tuple(costs[x] for x in found),
        loss=_cost(loss, size, options.hardware),
        memories=tuple(by_layer[x].memory for x in found),
    )


def _cost(analysis: LayerAnalysis, size: int, hardware: Hardware) -> LayerCost:
    def computed(operations: Sequence[Operation]) -> Timing:
        return Timing.exactly(operations_seconds(operations, hardware, dtype=analysis.dtype), origin="computed")

    backward = computed(analysis.backward)
    first_half = None if analysis.input_half is None else computed(analysis.input_half)
    second_half = None
    if analysis.weight_half is not None:
        second_half = computed(analysis.weight_half) if first_half else backward
    return LayerCost(
        microbatch_size=size,
        forward=computed(analysis.forward),
        last_recompute=computed(analysis.last_recompute),
        backward=backward,
        input_gradient=first_half,
        weight_gradient=second_half,
        forward_work=total_work(analysis.forward),
        backward_work=total_work(analysis.backward),
        **analysis.memory.fields(on_gpu=hardware.kind == "cuda"),
    )


def _notes(file: ModelFile, hardware: Hardware) -> tuple[str, ...]:
    shares = ", ".join(
        f"{kind} {percent_text(x.flops)} / {percent_text(x.bandwidth)}" for kind, x in hardware.efficiencies.items()
    )
    stated = dict(hardware.sources)["efficiency"]
    origin = "assumed" if stated == "not given" else stated
    notes = [
        f"computed for {hardware.name}, nothing was measured; figures: {dict(hardware.sources)['flops']}",
        f"shares of the peak flop rate / memory bandwidth that operations reach, {origin}: {shares}",
    ]
    if hardware.shapes.shares:
        notes.append(
            f"products take the shares of {len(hardware.shapes.shares)} shapes that {hardware.name} has, or lie between them"
        )
    if file.has_loss and file.loss_reduction is None:
        notes.append(
            'the loss is assumed to be a mean over the samples; otherwise state loss_reduction = "sum" in the model file'
        )
    return tuple(notes)


def computed_step(file: ModelFile, hardware: Hardware) -> StepCost:
    """zero_grad and the optimizer's step over all parameters that are trained.

    Raises ModelError for an optimizer that cannot take a step on its own, or that decides by values.
    """
    trained = [x for x in file.model.parameters() if x.requires_grad]
    if not file.has("optimizer") or not trained:
        return StepCost.none(origin="computed")
    as_list = hardware.kind == "cuda"
    steps = [(len(some), _step(file, some[0], as_list=as_list)) for some in alike(trained)]
    largest = max((step for _, step in steps), key=lambda step: step.gradient_bytes)
    masters = master_bytes(trained, file.precision)
    return StepCost(
        optimizer=_timing(hardware, [(count, step.work) for count, step in steps], as_list=as_list),
        zero_grad=_timing(hardware, [(count, step.zero_grad_work) for count, step in steps], as_list=as_list),
        optimizer_name=steps[0][1].name,
        state_bytes=sum(count * step.state_bytes for count, step in steps) + masters,
        workspace_bytes=max(0, masters - sum(map(gradient_bytes, trained)))
        + (sum(count * step.workspace_bytes for count, step in steps) if as_list else 0),
        largest_workspace=0.0 if as_list else largest.workspace_bytes / largest.gradient_bytes,
        master_bytes=masters,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The second step of an optimizer with one parameter; the first one creates its state."""

    name: str
    gradient_bytes: int
    state_bytes: int
    workspace_bytes: int
    work: tuple[Work, ...]
    zero_grad_work: tuple[Work, ...]


def _step(file: ModelFile, like: nn.Parameter, *, as_list: bool) -> _Step:
    with FakeTensorMode():
        rounded = [torch.empty(like.shape, dtype=like.dtype)] if file.precision.master_weights else []
        made = nn.Parameter(torch.empty(like.shape, dtype=MASTER_DTYPE if rounded else like.dtype))
        parameter = with_attributes(made, like)
        optimizer = file.optimizer([parameter])
        for group in optimizer.param_groups:
            if as_list and "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
        parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer.step()
            with StorageRecorder() as recorder, WorkCounter(recorder.now) as counter:
                optimizer.step()
                round_into(rounded, [parameter])
                end = recorder.now()
                optimizer.zero_grad()
        except Exception as error:
            raise ModelError(
                f"the optimizer of {file.name} cannot take a step on its own and without values: {describe(error)}"
            ) from error
        return _Step(
            name=type(optimizer).__name__,
            gradient_bytes=gradient_bytes(like),
            state_bytes=optimizer_state_bytes(optimizer),
            workspace_bytes=recorder.trace().peak_bytes(0, end),
            work=total_work(counter.between(0, end)),
            zero_grad_work=total_work(counter.between(end, recorder.now())),
        )


def _timing(hardware: Hardware, works: Sequence[tuple[int, tuple[Work, ...]]], *, as_list: bool) -> Timing:
    """Seconds for all parameters, by (count, work); as a list they share the launches of the first."""
    scaled = [
        replace(
            work,
            num_operations=work.num_operations * (index == 0 if as_list else count),
            num_flops=work.num_flops * count,
            num_bytes=work.num_bytes * count,
        )
        for index, (count, parts) in enumerate(works)
        for work in parts
    ]
    return Timing.exactly(roofline_seconds(scaled, hardware, dtype="float32"), origin="computed")
