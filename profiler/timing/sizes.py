"""One micro-batch size of a model: its layers captured, those that differ measured, the others given their costs.

A model in memory is measured in rounds over all layers that must be; a model without weights one structure after the
other, each made for it and dropped again, and its memory is followed on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gplan.errors import ModelError
from gplan.nouns import LayerCost, LossReduction, Timing, WholeModel
from profiler.analytic.analysis import LayerAnalysis, analyse
from profiler.capture.chain import Chain, flat_tensors
from profiler.capture.model import capture
from profiler.memory.bytes import traced_allocations
from profiler.memory.passage import LayerBytes, allocate_gradients, measure_bytes
from profiler.model.data import find_reduction_of_outputs, sample_batch
from profiler.model.load import ModelFile
from profiler.model.materialise import materialised, real_like
from profiler.timing.bench import Bench, bench_of_chain, bench_of_layer, bench_of_loss, chosen_layers
from profiler.timing.clock import Clock, Samples
from profiler.timing.journal import Journal
from profiler.timing.neighbours import neighbours
from profiler.timing.optimizer_step import contention
from profiler.timing.rehearsal import rehearse
from profiler.timing.rounds import Pieces, Rounds, pieces_of

_TIMES_IN_A_ROW = 3  # how often a layer measured alone follows itself, where it can

Progress = Callable[[str, float], None]
"""Called with what is being done and the share that is done, 0 to 1."""


def part(progress: Progress, index: int, count: int) -> Progress:
    """Progress of one part of several alike."""
    return lambda text, share: progress(text, (index + share) / count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """With what, where and how long to measure."""

    clock: Clock
    journal: Journal
    device: str  # as torch names it
    budget_s: float
    split_backward: bool
    shares: tuple[set[int], ...]  # the cores of the neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSize:
    """The costs of every layer and of the loss at one micro-batch size."""

    chain: Chain
    sources: tuple[int, ...]  # for each layer the one that was measured for it
    layers: tuple[LayerCost, ...]
    loss: LayerCost
    whole: WholeModel | None
    overhead_s: float
    loss_reduction: LossReduction | None  # found from the outputs of a model that cannot be run
    notes: tuple[str, ...]


def measure_size(file: ModelFile, size: int, means: Means, progress: Progress) -> MeasuredSize:
    """All costs at one micro-batch size."""
    progress(f"micro-batch size {size}: capturing the layers", 0.0)
    inputs, target = sample_batch(file, size, device=means.device)
    chain = capture(file.model, inputs)
    found, keys = chosen_layers(chain)
    measure = _measure_alone if file.is_lazy else _measure_together
    return measure(_Subject(file, chain, size, inputs, target, found, keys), means, progress)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is measured: a captured model and a micro-batch."""

    file: ModelFile
    chain: Chain
    size: int
    inputs: Any
    target: Any
    sources: tuple[int, ...]
    keys: dict[int, str]  # of the layers to be measured

    def samples(self, journal: Journal, bench: str) -> Callable[[str], Samples]:
        """The samples of one bench by their names."""
        return lambda name: journal.samples(f"{self.size}/{bench}/{name}")


def _measure_together(subject: _Subject, means: Means, progress: Progress) -> MeasuredSize:
    bench = bench_of_chain(subject.file, subject.chain, subject.keys, subject.inputs, subject.target)
    allocate_gradients(subject.file.model)
    notes = _sampled(bench, subject, means, progress)
    samples = subject.samples(means.journal, bench.name)
    pieces = pieces_of(bench, samples)
    sizes = measure_bytes(bench.layers, bench.inputs, bench.loss, device=means.device)
    analyses = _analysed(bench)
    costs = [
        _layer_cost(samples, key, subject.size, pieces, size, analysis)
        for key, size, analysis in zip((*bench.keys, "loss"), sizes, analyses, strict=True)
    ]
    measured = _measured_size(subject, costs, [pieces], notes)
    if bench.whole is None:
        return measured
    return replace(measured, whole=_whole_model(bench.whole, subject.size, pieces, means.device))


def _analysed(bench: Bench) -> Sequence[LayerAnalysis | None]:
    """What each layer does; unknown where layers decide by values, which cannot be followed without them."""
    try:
        return analyse(bench.layers, bench.inputs, bench.loss)
    except ModelError:
        return [None] * (1 + len(bench.layers))


def _whole_model(run: Callable[[], Tensor], size: int, pieces: Pieces, device: str) -> WholeModel:
    """The times of the model in one piece, and the memory of one more forward and backward of it."""
    if device != "cpu":
        torch.cuda.empty_cache()  # what the allocator holds afterwards is for this
    with traced_allocations(device) as trace:
        loss = run()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    return WholeModel(
        microbatch_size=size,
        forward=pieces.whole_forward,
        backward=pieces.whole_backward,
        allocated_bytes=max(0, trace.peak_bytes()),
        reserved_bytes=trace.peak_reserved_bytes,
    )


def _measure_alone(subject: _Subject, means: Means, progress: Progress) -> MeasuredSize:
    chain, journal = subject.chain, means.journal
    stages = [chain.stage(layer, layer + 1) for layer in subject.keys]
    inputs = flat_tensors(subject.inputs, what="the inputs")
    outputs = real_like(chain.specs(len(chain)), seed=0, device=means.device)
    loss_bench = bench_of_loss(subject.file, chain, outputs, subject.target)
    analyses = analyse(stages, inputs, loss_bench.loss)
    parts = iter([part(progress, x, 1 + len(stages)) for x in range(1 + len(stages))])
    notes, pieces = _sampled(loss_bench, subject, means, next(parts)), {}
    for (layer, key), stage, progress in zip(subject.keys.items(), stages, parts, strict=True):
        if key in pieces:
            continue
        times = _TIMES_IN_A_ROW if layer and chain.specs(layer) == chain.specs(layer + 1) else 1
        entering = inputs if layer == 0 else real_like(chain.specs(layer), seed=0, device=means.device)
        bench = bench_of_layer(chain.names[layer], key, stage, entering, times=times)
        with materialised(stage, model=subject.file.model, seed=0, device=means.device):
            notes += _sampled(bench, subject, means, progress)
        pieces[key] = pieces_of(bench, subject.samples(journal, key))
        stage.zero_grad()
    costs = [
        _layer_cost(subject.samples(journal, key), key, subject.size, pieces[key], analysis.size, analysis)
        for key, analysis in zip(subject.keys.values(), analyses, strict=False)
    ]
    loss_cost = _layer_cost(
        subject.samples(journal, "loss"), "loss", subject.size, None, analyses[-1].size, analyses[-1]
    )
    reduction = find_reduction_of_outputs(subject.file, chain.model_output(outputs), subject.target, subject.size)
    measured = _measured_size(subject, [*costs, loss_cost], list(pieces.values()), notes)
    return replace(measured, loss_reduction=reduction)


def _sampled(bench: Bench, subject: _Subject, means: Means, progress: Progress) -> tuple[str, ...]:
    """Measure a bench unless the journal has it already; returns notes."""
    done = f"{subject.size}/{bench.name}"
    kept = means.journal.value(done)
    if kept is not None:
        return tuple(kept)
    notes = rehearse(bench)
    samples = subject.samples(means.journal, bench.name)
    what = f"micro-batch size {subject.size}: {_layers_text(bench, subject)}"

    def report(index: int, share: float) -> None:
        means.journal.keep(f"{done}/rounds", index)
        means.journal.save_now_and_then()
        progress(f"{what}, round {index}", share)

    silent = Rounds(bench, means.clock, lambda _: Samples())
    with neighbours(means.shares, lambda: silent.layer_round(lambda _: Samples()), bench.parameters) as others:
        company = others if means.shares else None
        rounds = Rounds(bench, means.clock, samples, split_backward=means.split_backward, company=company)
        rounds.sample(means.budget_s, report, num_done=means.journal.value(f"{done}/rounds") or 0)
        if company is not None and not company.are_alive:
            notes += ("the neighbours failed: contention is not what it should be",)
    notes += _launch_bound_notes(bench, samples)
    means.journal.keep(done, notes)
    means.journal.save()
    return notes


def _launch_bound_notes(bench: Bench, samples: Callable[[str], Samples]) -> tuple[str, ...]:
    """The layers for which a GPU waits for its host."""
    names = dict(zip(bench.keys, bench.names, strict=True))
    bound = [name for key, name in names.items() if samples(f"{key}/forward").is_launch_bound]
    if not bound:
        return ()
    return (f"launch-bound, the GPU waits for its host: {', '.join(bound)}; larger micro-batches cost them little",)


def _layers_text(bench: Bench, subject: _Subject) -> str:
    if len(set(bench.keys)) == 1:
        return bench.names[0]
    num_layers = len(subject.chain)
    return f"{len(bench.layers)} of {num_layers} layers" if bench.layers else "the loss"


def _layer_cost(
    samples: Callable[[str], Samples],
    key: str,
    size: int,
    pieces: Pieces | None,
    sizes: LayerBytes,
    analysis: LayerAnalysis | None,
) -> LayerCost:
    """What was sampled of one layer, without the cost of being cut off."""
    cuts = (pieces.forward_cut_s, pieces.backward_cut_s) if pieces is not None and key != "loss" else (0.0, 0.0)

    def optional(name: str, cut_s: float = 0.0) -> Timing | None:
        timing = samples(f"{key}/{name}").timing()
        return _net(timing, cut_s) if timing.num_samples else None

    forward = _net(samples(f"{key}/forward").timing(), cuts[0])
    pairs = [(samples(f"{key}/{x}"), samples(f"{key}/{x} in company")) for x in ("forward", "backward")]
    return LayerCost(
        microbatch_size=size,
        forward=forward,
        backward=_net(pairs[1][0].timing(), cuts[1]),
        recompute=None if pieces is None or key == "loss" else forward.times(pieces.recompute_factor),
        first_backward=optional("first backward", cuts[1]),
        input_gradient=optional("input gradient"),
        weight_gradient=optional("weight gradient"),
        contention=contention(pairs),
        forward_work=analysis.forward_work if analysis else (),
        backward_work=analysis.backward_work if analysis else (),
        **asdict(sizes),
    )


def _net(timing: Timing, cut_off_s: float) -> Timing:
    """Without the cost of being cut off, but at least half: the cost is a mean, and no layer is free."""
    return timing.less(min(cut_off_s, timing.low_s / 2))


def _measured_size(
    subject: _Subject, costs: Sequence[LayerCost], pieces: Sequence[Pieces], notes: tuple[str, ...]
) -> MeasuredSize:
    """Every layer has the costs of its source."""
    by_layer = dict(zip(subject.keys, costs, strict=False))
    overheads = [x.overhead_s for x in pieces if x.overhead_s]
    return MeasuredSize(
        chain=subject.chain,
        sources=subject.sources,
        layers=tuple(by_layer[source] for source in subject.sources),
        loss=costs[-1],
        whole=None,
        overhead_s=sum(overheads) / len(overheads) if overheads else 0.0,
        loss_reduction=None,
        notes=tuple(dict.fromkeys(notes)),
    )
