"""Measure a model at one micro-batch size: capture its layers, measure one of each kind, and copy its costs to the rest.

A model in memory is measured in rounds over all layers to be measured. A model without weights is measured one layer at
a time: its weights are created, measured and freed; memory is followed on fake tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gplan.core import Granularity, LayerCost, LossReduction, Timing, WholeModel
from gplan.core.errors import ModelError
from gplan.core.host_load import HostLoad, interruption_text
from gplan.core.profile import adds_up
from gplan.core.progress import Progress, part
from gplan.core.units import seconds_text
from profiler.analytic.layer_work import LayerAnalysis, analyse, analyse_halves
from profiler.analytic.roofline import total_work
from profiler.backward.rematerialize import share_run_again
from profiler.capture.capture import capture
from profiler.capture.chain import Chain, Tensors, TensorSpec, flat_tensors, model_state_restored
from profiler.host.host_info import garbage_collector_frozen
from profiler.host.host_load import load_between, read_load
from profiler.memory.allocations import traced_allocations
from profiler.memory.chain_profile import Crossings
from profiler.memory.layer_memory import HalvesBytes, LayerBytes, allocate_gradients, measure_bytes, measure_halves
from profiler.model.data import call_model, find_reduction_of_outputs, sample_batch, sample_batches
from profiler.model.lazy_build import random_state_kept, seed_everything
from profiler.model.load import ModelFile
from profiler.model.materialise import materialised, real_like
from profiler.timing.bench import (
    Bench,
    bench_of_chain,
    bench_of_layer,
    bench_of_loss,
    layers_to_measure,
    rehearse,
    split_backward_obstacle,
)
from profiler.timing.clock import Clock, Samples
from profiler.timing.journal import Journal
from profiler.timing.neighbours import BESIDE_OTHERS, NEIGHBOUR_FAILED, contention, neighbours
from profiler.timing.rounds import NO_CORRECTIONS, Corrections, TimingRounds, corrections_of, net

_NUM_PAIRS_NAMED = 3
_SAME_LOSS = 1e-3  # share by which a loss may differ by the order of operations
_BATCHES_OF_LOSS_CHECK = 16  # a batch may have none of the tensors whose size depends on data
_SHARE_RUNS = 3  # whose median is the share of a forward that is run again
NUM_ROUTED_BATCHES = 4  # on which the layers of a model with routed ones are measured
_TIMES_IN_A_ROW = 3  # how often a layer measured alone follows itself, where it can
_CHECKPOINTING_LEFT_OUT = "the model checkpoints parts of itself: that is left out of its layers and of the whole model, and --recompute decides"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The clock, journal, device and limits of a measurement."""

    clock: Clock
    journal: Journal
    device: str  # as torch names it
    budget_s: float
    granularity: Granularity
    shares: tuple[set[int], ...]  # the cores of each neighbour
    between_samples: Callable[[], object] = lambda: None
    before_timing: Callable[[], object] = lambda: None  # called for each bench between its untimed run and its samples


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSize:
    """The costs of every layer and of the loss at one micro-batch size."""

    chain: Chain
    sources: tuple[int, ...]  # for each layer the one that was measured for it
    layers: tuple[LayerCost, ...]
    loss: LayerCost
    crossings: Crossings
    whole: WholeModel | None
    overhead_s: float
    loss_reduction: LossReduction | None  # found from the outputs of a model that cannot be run
    notes: tuple[str, ...]


def measure_size(file: ModelFile, microbatch_size: int, setup: Setup, progress: Progress) -> MeasuredSize:
    """Measure times and memory at one micro-batch size."""
    progress(f"micro-batch size {microbatch_size}: capturing the layers", 0.0)
    inputs, target = sample_batch(file, microbatch_size, device=setup.device)
    chain = capture(file.model, inputs, granularity=setup.granularity, precision=file.precision)
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
    def layer_keys(self) -> tuple[str, ...]:
        """For every layer of the model the key of its samples."""
        return tuple(self.keys[x] for x in self.sources)

    @property
    def tensors(self) -> Tensors:
        """The inputs, flat."""
        return flat_tensors(self.inputs, what="the inputs")

    def samples(self, journal: Journal, bench: str) -> Callable[[str], Samples]:
        """The samples of one bench by their names, to be added to."""
        return lambda name: journal.samples(f"{self.microbatch_size}/{bench}/{name}")


def _measure_together(subject: _Subject, setup: Setup, progress: Progress) -> MeasuredSize:
    others = _other_batches(subject, device=setup.device)
    bench = bench_of_chain(subject.file, subject.chain, subject.keys, subject.inputs, subject.target, others)
    allocate_gradients(subject.file.model)
    notes = _sampled(bench, subject, setup, progress)
    memories = measure_bytes(bench.layers, bench.inputs, bench.loss, device=setup.device)
    samples = subject.samples(setup.journal, bench.name)
    if any(samples(f"{key}/input gradient").timing().num_samples for key in bench.keys):
        halves = measure_halves(bench.layers, bench.inputs, bench.loss, device=setup.device)
        memories = tuple(replace(x, halves=y) for x, y in zip(memories, halves, strict=True))
    shares = _shares_run_again(bench, setup.device)
    try:
        analyses: Sequence[LayerAnalysis | None] = analyse(bench.layers, bench.inputs, bench.loss)
    except ModelError:  # fake tensors have no values
        analyses = [None] * (1 + len(bench.layers))
        notes += ("operations are not counted, as control flow depends on the values of tensors",)
    notes = (*notes, *_notes_on_pairs(bench, subject, samples))
    corrections = dict.fromkeys(bench.keys, corrections_of(bench, samples, shares[bench.keys[-1]]))
    found = _measured_size(subject, lambda _: samples, corrections, memories, analyses, shares, notes)
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


def _shares_run_again(bench: Bench, device: str) -> dict[str, float]:
    """By key: the share of a layer's forward that a recompute runs again where it ends with the layer."""

    def now() -> float:
        if device != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    found: dict[str, list[float]] = {key: [] for key in bench.keys}

    def run(place: int, leaves: Tensors) -> Tensors:
        share, outputs = share_run_again(bench.layers[place], leaves, now=now)
        found[bench.keys[place]].append(share)
        return outputs

    for _ in range(_SHARE_RUNS):
        bench.forward(run)
    return {key: median(shares) for key, shares in found.items()}


def _measure_alone(subject: _Subject, setup: Setup, progress: Progress) -> MeasuredSize:
    chain, size = subject.chain, subject.microbatch_size
    stages = {layer: chain.stage(layer, layer + 1) for layer in subject.keys}
    outputs = real_like(chain.specs(len(chain)), seed=0, device=setup.device)
    loss_bench = bench_of_loss(subject.file, chain, outputs, subject.target)
    analyses = analyse(list(stages.values()), subject.tensors, loss_bench.loss)
    notes = _sampled(loss_bench, subject, setup, part(progress, 0, 1 + len(stages)))
    benches, shares = dict[str, Bench](), {"loss": 1.0}
    for place, (layer, stage) in enumerate(stages.items(), start=1):
        if subject.keys[layer] not in benches:
            # several times in a row where its output can be its input
            times = _TIMES_IN_A_ROW if layer and chain.specs(layer) == chain.specs(layer + 1) else 1
            entering = real_like(chain.specs(layer), seed=0, device=setup.device) if layer else subject.tensors
            bench = bench_of_layer(chain.names[layer], subject.keys[layer], stage, entering, times=times)
            with materialised(stage, model=subject.file.model, seed=0, device=setup.device):
                notes += _sampled(bench, subject, setup, part(progress, place, 1 + len(stages)))
                shares |= _shares_run_again(bench, setup.device)
            benches[bench.name] = bench
            stage.zero_grad()
    try:
        halves = [x.memory for x in analyse_halves(list(stages.values()), subject.tensors, loss_bench.loss)]
    except ModelError:  # the backward cannot be split, which a note reports
        halves = [HalvesBytes()] * (1 + len(stages))
    memories = [replace(x.memory, halves=y) for x, y in zip(analyses, halves, strict=True)]

    def samples(key: str) -> Callable[[str], Samples]:
        return subject.samples(setup.journal, key)

    corrections = {key: corrections_of(bench, samples(key), shares[key]) for key, bench in benches.items()}
    found = _measured_size(subject, samples, corrections, memories, analyses, shares, notes)
    reduction = find_reduction_of_outputs(subject.file, chain.model_output(outputs), subject.target, size)
    return replace(found, loss_reduction=reduction)


def _sampled(bench: Bench, subject: _Subject, setup: Setup, progress: Progress) -> tuple[str, ...]:
    """Measure a bench unless the journal already has it; returns notes."""
    done = f"{subject.microbatch_size}/{bench.name}"
    kept = setup.journal.value(done)
    if kept is not None:
        return tuple(kept)
    notes, obstacle = rehearse(bench), split_backward_obstacle(bench)
    if obstacle:
        notes += (f"the backward cannot be split, so schedules that split it cannot be used: {obstacle}",)
    setup.before_timing()
    samples = subject.samples(setup.journal, bench.name)
    what = f"micro-batch size {subject.microbatch_size}: {_layers_text(bench, subject)}"

    def report(index: int, share: float) -> None:
        setup.journal.keep(f"{done}/rounds", index)
        setup.journal.save_now_and_then()
        progress(f"{what}, round {index}", share)

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
        rounds.sample(setup.budget_s, report, num_done=setup.journal.value(f"{done}/rounds") or 0)
        load = load_between(before, read_load())
        if not _adds_up(bench, subject, samples):
            rounds.sample_pairs()
        if beside is not None and not beside.are_alive:
            notes += (NEIGHBOUR_FAILED,)
    notes = (*notes, *_notes_on_samples(bench, samples, load))
    setup.journal.keep(done, notes)
    setup.journal.save()
    return notes


def _notes_on_samples(bench: Bench, samples: Callable[[str], Samples], load: HostLoad) -> Iterator[str]:
    """Notes on the layers for which the GPU waits for its host, and on those whose times include refused samples."""
    names = {**dict(zip(bench.keys, bench.names, strict=True)), "loss": "the loss"}
    found = {name: [samples(f"{key}/{x}") for x in ("forward", "backward")] for key, name in names.items()}
    bound = [name for name, (forward, _) in found.items() if forward.is_launch_bound and name != "the loss"]
    disturbed = [name for name, passes in found.items() if any(x.is_disturbed for x in passes)]
    if bound:
        yield f"launch-bound, the GPU waits for its host: {', '.join(bound)}; larger micro-batches cost them little"
    if disturbed:
        yield (
            f"nearly all samples of {', '.join(disturbed)} were {interruption_text(load)}: the shorter half of all was taken"
            + ("" if load.is_evidence else "; such a layer may wait by itself, as for a lock or for memory")
        )


def _adds_up(bench: Bench, subject: _Subject, samples: Callable[[str], Samples]) -> bool:
    """Whether all layers, corrected as parts of a stage, and the loss take as long as the model; True if not measured."""
    if bench.whole is None:
        return True
    corrections = corrections_of(bench, samples)

    def is_near(name: str, cut_s: float, tail: float) -> bool:
        layers_s = sum(net(samples(f"{key}/{name}").timing(), cut_s).median_s * tail for key in subject.layer_keys)
        total_s = corrections.overhead_s + layers_s + samples(f"loss/{name}").timing().median_s
        return adds_up(total_s, samples(f"whole/{name}").mean_timing().median_s)

    return is_near("forward", corrections.forward_cut_s, corrections.forward_tail) and is_near(
        "backward", corrections.backward_cut_s, corrections.backward_tail
    )


def _notes_on_pairs(bench: Bench, subject: _Subject, samples: Callable[[str], Samples]) -> Iterator[str]:
    """A note on the pairs of layers whose times alone differ most from their time together, if layers do not add up.

    Equal layers are measured once, so a pair need not be neighbours in the model.
    """
    if _adds_up(bench, subject, samples):
        return

    def seconds(*keys: str) -> float:
        return sum(samples(f"{key}/{x}").timing().median_s for key in keys for x in ("forward", "backward"))

    found = dict[str, tuple[float, float, str]]()  # by key, since pairs of equal layers have the same samples
    for one, other in pairwise(zip(bench.keys, bench.names, strict=True)):
        if together_s := seconds(key := f"{one[0]}+{other[0]}"):
            found.setdefault(key, (seconds(one[0], other[0]), together_s, f"{one[1]} and {other[1]}"))
    worst = sorted(found.values(), key=lambda pair: -abs(pair[0] - pair[1]))[:_NUM_PAIRS_NAMED]
    if worst:
        pairs = ", ".join(
            f"{names} ({seconds_text(x)} one by one, {seconds_text(y)} together)" for x, y, names in worst
        )
        yield (
            "pairs of layers that take longer or shorter together than one by one, at micro-batch size "
            f"{subject.microbatch_size}: {pairs}"
        )


def _layers_text(bench: Bench, subject: _Subject) -> str:
    if len(set(bench.keys)) == 1:
        return bench.names[0]
    num_layers = len(subject.chain)
    return f"{len(bench.layers)} of {num_layers} layers" if bench.layers else "the loss"


def _layer_cost(
    samples: Callable[[str], Samples],
    key: str,
    microbatch_size: int,
    corrections: Corrections,
    memory: LayerBytes,
    analysis: LayerAnalysis | None,
    share_run_again: float,
) -> LayerCost:
    """The costs of one layer, by its samples and the corrections."""

    def backward(name: str, even_cut_s: float) -> Timing | None:
        timing = samples(f"{key}/{name}").timing()
        return net(timing, even_cut_s).times(corrections.backward_tail) if timing.num_samples else None

    forward = net(samples(f"{key}/forward").timing(), corrections.forward_cut_s).times(corrections.forward_tail)
    first_half = backward("input gradient", corrections.input_gradient_cut_s)
    second_half = backward("weight gradient", 0.0 if first_half else corrections.backward_cut_s)
    if first_half and second_half:  # a part of a stage; without a first half it is the whole backward
        second_half = second_half.times(corrections.weight_gradient_factor)
    factor = corrections.recompute_factor
    pairs = [(samples(f"{key}/{x}"), samples(f"{key}/{x}{BESIDE_OTHERS}")) for x in ("forward", "backward")]
    return LayerCost(
        microbatch_size=microbatch_size,
        forward=forward,
        backward=backward("backward", corrections.backward_cut_s) or Timing.exactly(0.0, origin="measured"),
        recompute=None if factor is None else forward.times(factor),
        last_recompute=None if factor is None else forward.times(factor * share_run_again),
        first_backward=backward("first backward", corrections.backward_cut_s),
        input_gradient=first_half,
        weight_gradient=second_half,
        contention=contention(pairs),
        forward_work=total_work(analysis.forward) if analysis else (),
        backward_work=total_work(analysis.backward) if analysis else (),
        **memory.fields,
    )


def _measured_size(
    subject: _Subject,
    samples_of: Callable[[str], Callable[[str], Samples]],
    corrections: Mapping[str, Corrections],
    memories: Sequence[LayerBytes],
    analyses: Sequence[LayerAnalysis | None],
    shares: Mapping[str, float],
    notes: tuple[str, ...],
) -> MeasuredSize:
    """The costs by samples and corrections, those of measured layers for the layers like them.

    `samples_of`, `corrections` and `shares` (of a forward that is run again) are by key; the last of `memories` and
    `analyses` is the loss's.
    """
    size, keys = subject.microbatch_size, (*subject.keys.values(), "loss")
    costs = [
        _layer_cost(samples_of(key), key, size, corrections.get(key, NO_CORRECTIONS), x, y, shares.get(key, 1.0))
        for key, x, y in zip(keys, memories, analyses, strict=True)
    ]
    by_layer = dict(zip(subject.keys, costs[:-1], strict=True))
    of_layer = dict(zip(subject.keys, memories, strict=False))
    return MeasuredSize(
        chain=subject.chain,
        sources=subject.sources,
        layers=tuple(by_layer[source] for source in subject.sources),
        loss=costs[-1],
        crossings=Crossings(
            microbatch_size=size,
            chain=subject.chain,
            after=tuple(of_layer[source].crossing for source in subject.sources),
            views=tuple(of_layer[source].views for source in subject.sources),
        ),
        whole=None,
        overhead_s=fmean(x.overhead_s for x in corrections.values()),
        loss_reduction=None,
        notes=tuple(dict.fromkeys((*subject.chain.notes, *notes))),
    )
