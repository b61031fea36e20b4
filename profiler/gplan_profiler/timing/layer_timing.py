"""Measure a model at one micro-batch size: capture its layers, measure one of each kind, and copy its costs to the rest.

A model in memory is measured in rounds over all layers to be measured. A model without weights is measured one layer at
a time: its weights are created, measured and freed; memory is followed on fake tensors.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from gplan.core import Granularity, LayerCost, LossReduction, Timing, WholeModel
from gplan.core.errors import ModelError
from gplan.core.host_load import HostLoad, interruption_text
from gplan.core.progress import Progress, part
from gplan_profiler.analytic.layer_work import LayerAnalysis, analyse, analyse_split
from gplan_profiler.analytic.roofline import total_work
from gplan_profiler.backward.rematerialize import share_run_again
from gplan_profiler.capture.chain import Chain, Tensors, TensorSpec, flat_tensors, model_state_restored
from gplan_profiler.host.host_info import garbage_collector_frozen
from gplan_profiler.host.host_load import load_between, read_load
from gplan_profiler.memory.allocations import traced_allocations
from gplan_profiler.memory.chain_profile import SizeCosts
from gplan_profiler.memory.layer_memory import (
    LayerBytes,
    allocate_gradients,
    measure_bytes,
    measure_halves,
)
from gplan_profiler.model.data import call_model, find_reduction_of_outputs, sample_batch, sample_batches
from gplan_profiler.model.lazy_build import random_state_kept, seed_everything
from gplan_profiler.model.load import ModelFile
from gplan_profiler.model.materialise import materialised, real_like
from gplan_profiler.model.memory_budget import check_layer_fits
from gplan_profiler.timing.bench import (
    Bench,
    bench_of_chain,
    bench_of_layer,
    bench_of_loss,
    capture_of_file,
    layers_to_measure,
    rehearse,
    split_backward_obstacle,
    waiting_passes,
)
from gplan_profiler.timing.clock import Clock, Samples
from gplan_profiler.timing.neighbours import BESIDE_OTHERS, NEIGHBOUR_FAILED, neighbours, slow_down
from gplan_profiler.timing.rounds import NO_CORRECTIONS, Corrections, TimingRounds, corrections_of, net
from gplan_profiler.torch_compat import pytree

_SAME_LOSS = 1e-3  # share by which a loss may differ by the order of operations
_BATCHES_OF_LOSS_CHECK = 16  # a batch may have none of the tensors whose size depends on data
_SHARE_OF_ROUNDS = 0.9  # of the progress of one micro-batch size; the rest is for bytes and operations
_SHARE_RUNS = 3  # whose median is the share of a forward that is run again
NUM_ROUTED_BATCHES = 4  # on which the layers of a model with routed ones are measured
_CHECKPOINTING_LEFT_OUT = "the model checkpoints parts of itself: that is left out of its layers and of the whole model, and --recompute decides"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The clock, device and limits of a measurement."""

    clock: Clock
    device: str  # as torch names it
    budget_s: float
    granularity: Granularity
    shares: tuple[set[int], ...]  # the cores of each neighbour
    between_samples: Callable[[], object] = lambda: None
    before_timing: Callable[[], object] = lambda: None  # called for each bench between its untimed run and its samples


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSize(SizeCosts):
    """The measured costs at one micro-batch size."""

    whole: WholeModel | None
    overhead_s: float
    loss_reduction: LossReduction | None  # found from the outputs of a model that cannot be run
    notes: tuple[str, ...]


def measure_size(
    file: ModelFile, microbatch_size: int, setup: Setup, divided: tuple[str, ...] | None, progress: Progress
) -> MeasuredSize:
    """Measure times and memory at one micro-batch size; `divided` are the layers that another size divided."""
    progress(f"micro-batch size {microbatch_size}: capturing the layers", 0.0)
    inputs, target = sample_batch(file, microbatch_size, device=setup.device)
    chain = capture_of_file(file, inputs, granularity=setup.granularity, divided=divided)
    if chain.lacks_tensors and file.has_loss and not file.is_lazy:
        for batch in islice(sample_batches(file, microbatch_size, device=setup.device), _BATCHES_OF_LOSS_CHECK):
            _check_loss(file, chain, *batch)
    found, keys = layers_to_measure(chain)
    measure = _measure_alone if file.is_lazy else _measure_together
    return measure(_Subject(file, chain, microbatch_size, inputs, target, found, keys), setup, progress)


def _check_loss(file: ModelFile, chain: Chain, inputs: Any, target: Any) -> None:
    """Raise ModelError for a loss that uses what the layers leave out of the model's output."""

    def loss_of(output_of: Callable[[], Any], seed: int) -> float:
        with model_state_restored(file.model), random_state_kept(), torch.no_grad():
            seed_everything(seed)
            return float(file.loss(output_of(), target))

    def output_of_layers() -> Any:
        return chain.model_output(chain.stage(0, len(chain))(*flat_tensors(inputs, what="the inputs")))

    plain, other = (loss_of(lambda: call_model(file, inputs), seed) for seed in (0, 1))
    tolerance = max(_SAME_LOSS * abs(plain), 10.0 * abs(plain - other))  # random numbers may be drawn in another order
    try:
        is_same = abs(loss_of(output_of_layers, 0) - plain) <= tolerance
    except Exception:  # the author's loss may raise anything without them
        is_same = False
    if not is_same:
        raise ModelError(
            f"the loss of {file.name} uses tensors of the model's output whose size depends on data, which no stage can "
            "return; expected a loss of the other outputs: reduce these tensors inside the model, to their mean or to "
            "their part of the loss"
        )


@dataclass(frozen=True, slots=True)
class _Subject:
    """A captured model and a micro-batch for it."""

    file: ModelFile
    chain: Chain
    microbatch_size: int
    inputs: Any
    target: Any
    sources: tuple[int, ...]
    keys: dict[int, str]  # of the layers to be measured

    @property
    def tensors(self) -> Tensors:
        """The inputs, flat."""
        return flat_tensors(self.inputs, what="the inputs")


def _measure_together(subject: _Subject, setup: Setup, progress: Progress) -> MeasuredSize:
    others = _other_batches(subject, device=setup.device)
    data = subject.inputs, subject.target, others
    bench = bench_of_chain(subject.file, subject.chain, subject.keys, *data, sends=setup.device == "cpu")
    allocate_gradients(subject.file.model)
    what = f"micro-batch size {subject.microbatch_size}"
    sampled, notes = _sampled(bench, subject, setup, lambda text, share: progress(text, _SHARE_OF_ROUNDS * share))
    samples = sampled.samples
    progress(f"{what}: following the memory of the layers", _SHARE_OF_ROUNDS)
    memories = measure_bytes(bench.layers, bench.inputs, bench.loss, device=setup.device)
    if any(samples(f"{key}/input gradient").timing().num_samples for key in bench.keys):
        halves = measure_halves(bench.layers, bench.inputs, bench.loss, device=setup.device)
        memories = tuple(replace(x, halves=y) for x, y in zip(memories, halves, strict=True))
    progress(f"{what}: counting the operations", (1 + _SHARE_OF_ROUNDS) / 2)
    try:
        analyses: Sequence[LayerAnalysis | None] = analyse(bench.layers, bench.inputs, bench.loss)
    except ModelError:  # fake tensors have no values
        analyses = [None] * (1 + len(bench.layers))
        notes += ("operations are not counted, as control flow depends on the values of tensors",)
    found = _measured_size(subject, dict.fromkeys((*bench.keys, "loss"), sampled), memories, analyses, notes)
    if bench.whole is None:
        return found
    if setup.device != "cpu":
        torch.cuda.empty_cache()  # so that reserved memory is that of this pass
    with traced_allocations(setup.device) as trace:  # of one more forward and backward
        loss = bench.whole()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    whole = WholeModel(
        microbatch_size=subject.microbatch_size,
        forward=samples("whole/forward").mean_timing(),
        backward=samples("whole/backward").mean_timing(),
        allocated_bytes=max(0, trace.peak_bytes()),
        reserved_bytes=trace.peak_reserved_bytes,
    )
    if bench.checkpoints:
        found = replace(found, notes=(*found.notes, _CHECKPOINTING_LEFT_OUT))
    return replace(found, whole=whole)


def _other_batches(subject: _Subject, *, device: str) -> list[tuple[Any, Any]]:
    """More batches for layers whose time depends on routing, so that their spread includes that over batches."""
    file, size = subject.file, subject.microbatch_size
    if not file.has("batches") or not any(subject.chain.is_routed(layer) for layer in range(len(subject.chain))):
        return []
    drawn = islice(file.batches(size), 1, NUM_ROUTED_BATCHES)
    moved = [pytree.tree_map_only(Tensor, lambda x: x.to(device), batch) for batch in drawn]
    specs = TensorSpec.of_all(subject.tensors)
    return [x for x in moved if TensorSpec.of_all(flat_tensors(x[0], what="the inputs")) == specs]


def _measure_alone(subject: _Subject, setup: Setup, progress: Progress) -> MeasuredSize:
    chain, size = subject.chain, subject.microbatch_size
    stages = {layer: chain.stage(layer, layer + 1, sends=setup.device == "cpu") for layer in subject.keys}
    outputs = real_like(chain.specs(len(chain)), seed=0, device=setup.device)
    loss_bench = bench_of_loss(subject.file, chain, outputs, subject.target)
    analyses = analyse_split(list(stages.values()), subject.tensors, loss_bench.loss)
    of_loss, notes = _sampled(loss_bench, subject, setup, part(progress, 0, 1 + len(stages)))
    sampled = {"loss": of_loss}
    for place, (layer, stage) in enumerate(stages.items(), start=1):
        if (key := subject.keys[layer]) not in sampled:
            entering = real_like(chain.specs(layer), seed=0, device=setup.device) if layer else subject.tensors
            bench = bench_of_layer(chain.names[layer], key, stage, entering)
            check_layer_fits(chain.names[layer], sum(x.nbytes for x in stage.parameters()), setup.device)
            with materialised(stage, seed=0, device=setup.device):
                sampled[key], more = _sampled(bench, subject, setup, part(progress, place, 1 + len(stages)))
                notes += more
            stage.zero_grad()
    found = _measured_size(subject, sampled, [x.memory for x in analyses], analyses, notes)
    reduction = find_reduction_of_outputs(subject.file, chain.model_output(outputs), subject.target, size)
    return replace(found, loss_reduction=reduction)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What was sampled on a bench."""

    samples: Callable[[str], Samples]  # by name
    shares_run_again: Mapping[str, float]  # by key: of a layer's forward, by a recompute that ends with the layer
    corrections: Corrections
    on_host: _Sampled | None = None  # by the host's clock, where that is another one
    waiting: frozenset[str] = frozenset()  # the passes in which the host waits for the device, such as "0/forward"


def _sampled(bench: Bench, subject: _Subject, setup: Setup, progress: Progress) -> tuple[_Sampled, tuple[str, ...]]:
    """Measure a bench; also returns notes."""
    notes, obstacle = rehearse(bench), split_backward_obstacle(bench)
    if obstacle:
        notes += (f"the backward cannot be split, so schedules that split it cannot be used: {obstacle}",)
    setup.before_timing()
    samples = defaultdict[str, Samples](Samples).__getitem__
    what = f"{len(bench.layers)} of {len(subject.chain)} layers" if bench.layers else "the loss"
    if len(set(bench.keys)) == 1:
        what = bench.names[0]
    what = f"micro-batch size {subject.microbatch_size}: {what}"
    unsampled = TimingRounds(bench, setup.clock, lambda _: Samples())
    work = partial(unsampled.layer_round, lambda _: Samples())
    with garbage_collector_frozen(), neighbours(setup.shares, work, bench.parameters) as others:
        beside = others if setup.shares else None
        rounds = TimingRounds(
            bench,
            setup.clock,
            samples,
            splits_backward=not obstacle,
            others=beside,
            between=setup.between_samples,
        )
        before = read_load()
        rounds.sample(setup.budget_s, lambda index, share: progress(f"{what}, round {index}", share))
        load = load_between(before, read_load())
        if beside is not None and not beside.are_alive:
            notes += (NEIGHBOUR_FAILED,)

    def now() -> float:
        if setup.device != "cpu":
            torch.cuda.synchronize(setup.device)
        return time.perf_counter()

    shares: dict[str, list[float]] = {key: [] for key in bench.keys}

    def run(place: int, leaves: Tensors) -> Tensors:
        share, outputs = share_run_again(bench.layers[place], leaves, now=now)
        shares[bench.keys[place]].append(share)
        return outputs

    for _ in range(_SHARE_RUNS):
        bench.forward(run)
    medians = {key: median(x) for key, x in shares.items()}
    waiting = frozenset(waiting_passes(bench, setup.clock))

    def by_clock(samples: Callable[[str], Samples], on_host: _Sampled | None = None) -> _Sampled:
        corrections = corrections_of(bench, samples, medians[bench.keys[-1]]) if bench.keys else NO_CORRECTIONS
        return _Sampled(samples, medians, corrections, on_host, waiting)

    on_host = by_clock(lambda name: samples(name).on_host) if setup.clock.has_host else None
    return by_clock(samples, on_host), (*notes, *_notes_on_samples(bench, samples, load, waiting))


def _notes_on_samples(
    bench: Bench, samples: Callable[[str], Samples], load: HostLoad, waiting: Collection[str]
) -> Iterator[str]:
    """Notes on layers that take their host longer than their GPU, on those for which the host waits, and on refused samples."""
    names = {**dict(zip(bench.keys, bench.names, strict=True)), "loss": "the loss"}
    found = {name: [samples(f"{key}/{x}") for x in ("forward", "backward")] for key, name in names.items()}
    bound = [name for name, (forward, _) in found.items() if forward.is_host_bound and name != "the loss"]
    waits = dict.fromkeys(name for key, name in names.items() if {f"{key}/forward", f"{key}/backward"} & {*waiting})
    disturbed = [name for name, passes in found.items() if any(x.is_disturbed and not x.host_s for x in passes)]
    if bound:
        yield f"host-bound, the GPU waits for its host: {', '.join(bound)}; larger micro-batches cost them little"
    if waits:
        yield (
            f"the host waits for the GPU in {', '.join(waits)}, as for .item(), a copy to the host or a shape that depends on "
            "values, so it cannot enqueue later layers meanwhile"
        )
    if disturbed:
        yield (
            f"nearly all samples of {', '.join(disturbed)} were {interruption_text(load)}: the shorter half of all was taken"
            + ("" if load.is_evidence else "; such a layer may wait by itself, as for a lock or for memory")
        )


def _layer_cost(
    sampled: _Sampled, key: str, microbatch_size: int, memory: LayerBytes, analysis: LayerAnalysis | None
) -> LayerCost:
    """The costs of one layer, by its samples and their corrections; of the loss without, as it is no part of a stage."""
    timings = _timings(sampled, key)
    if sampled.on_host is not None:
        of_host = _timings(sampled.on_host, key)
        timings |= {
            f"host_{x}": of_host[x] for x in ("forward", "backward", "recompute", "input_gradient", "weight_gradient")
        }
    pairs = [
        (sampled.samples(f"{key}/{x}"), sampled.samples(f"{key}/{x}{BESIDE_OTHERS}")) for x in ("forward", "backward")
    ]
    return LayerCost(
        microbatch_size=microbatch_size,
        slow_down=slow_down(pairs),
        forward_waits=f"{key}/forward" in sampled.waiting,
        backward_waits=f"{key}/backward" in sampled.waiting,
        forward_work=total_work(analysis.forward) if analysis else (),
        backward_work=total_work(analysis.backward) if analysis else (),
        **timings,
        **memory.fields(on_gpu=sampled.on_host is not None),
    )


def _timings(sampled: _Sampled, key: str) -> dict[str, Any]:
    """The times of one layer by one clock, by the fields of `LayerCost`."""
    samples, corrections = sampled.samples, NO_CORRECTIONS if key == "loss" else sampled.corrections

    def backward(name: str, even_cut_s: float) -> Timing | None:
        timing = samples(f"{key}/{name}").timing()
        return net(timing, even_cut_s).times(corrections.backward_tail) if timing.num_samples else None

    forward = net(samples(f"{key}/forward").timing(), corrections.forward_cut_s).times(corrections.forward_tail)
    first_half = backward("input gradient", corrections.input_gradient_cut_s)
    second_half = backward("weight gradient", 0.0 if first_half else corrections.backward_cut_s)
    if first_half and second_half:  # a part of a stage; without a first half it is the whole backward
        second_half = second_half.times(corrections.weight_gradient_factor)
    factor = corrections.recompute_factor
    return {
        "forward": forward,
        "backward": backward("backward", corrections.backward_cut_s) or Timing.exactly(0.0, origin="measured"),
        "recompute": None if factor is None else forward.times(factor),
        "last_recompute": None if factor is None else forward.times(factor * sampled.shares_run_again.get(key, 1.0)),
        "first_backward": backward("first backward", corrections.backward_cut_s),
        "input_gradient": first_half,
        "weight_gradient": second_half,
    }


def _measured_size(
    subject: _Subject,
    sampled: Mapping[str, _Sampled],
    memories: Sequence[LayerBytes],
    analyses: Sequence[LayerAnalysis | None],
    notes: tuple[str, ...],
) -> MeasuredSize:
    """The costs by what was sampled, by key; those of measured layers for the layers like them.

    The last of `memories` and `analyses` is the loss's.
    """
    size, keys = subject.microbatch_size, (*subject.keys.values(), "loss")
    costs = [_layer_cost(sampled[key], key, size, x, y) for key, x, y in zip(keys, memories, analyses, strict=True)]
    by_layer = dict(zip(subject.keys, costs[:-1], strict=True))
    of_layer = dict(zip(subject.keys, memories, strict=False))
    return MeasuredSize(
        microbatch_size=size,
        chain=subject.chain,
        sources=subject.sources,
        layers=tuple(by_layer[source] for source in subject.sources),
        loss=costs[-1],
        memories=tuple(of_layer[source] for source in subject.sources),
        whole=None,
        overhead_s=fmean(sampled[key].corrections.overhead_s for key in {*subject.keys.values()}),
        loss_reduction=None,
        notes=tuple(dict.fromkeys((*subject.chain.notes, *notes))),
    )
