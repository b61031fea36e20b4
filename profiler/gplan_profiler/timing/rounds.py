"""Time layers in rounds: all layers forward, the loss, all layers backward, so that caches and clocks are as in a step.

Each round also runs the user's model, all layers as one stage, and all layers beside other processes. Every
other round runs a recomputed stage; the rounds between run a backward that creates gradients, and the two halves of a split
backward. Sampling ends when the standard errors of every relevant median and of the sum of the layers are small.
`Corrections` turns the time of a layer on its own into its time within a stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from gplan.core import Timing
from gplan_profiler.backward.rematerialize import recomputed
from gplan_profiler.backward.split_backward import first_half
from gplan_profiler.capture.chain import Tensors, detached, wants_gradient
from gplan_profiler.timing.bench import Bench, Composed, backward, run_passes
from gplan_profiler.timing.clock import Clock, Samples, median_s
from gplan_profiler.timing.neighbours import BESIDE_OTHERS, Neighbours

_CERTAIN = 3.0  # standard errors, above which a difference counts in full
_LEAST_RERUN = 0.1  # share of the stage's forward that is run again, below which the factor of recompute is 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """Corrections from the times of layers on their own to their times within a stage.

    Cut cost: a layer on its own also pays a call and a start of autograd's engine. The excess of the layers' sum over
    the one stage, compared within each round because clocks drift, is subtracted evenly, but never more than half of a
    layer's time. Only an excess above its own standard error counts: noise would never cancel out.

    Tail: medians do not add up. A burst of other work lengthens one layer or another in most rounds. So the mean of the
    layers' sum is above the sum of their medians, and all layers are scaled by the ratio. Both are taken over rounds.

    Weight gradients: the second half of a split backward starts autograd once for every place where weights enter, and
    each start visits the graph below, so its time grows faster than the number of layers. The layers share the ratio
    measured for the one stage; stages with more layers than the bench take slightly longer than predicted.

    Recompute: besides the second run, each saved tensor is replaced in the forward and found again in the backward, and
    buffers that a forward writes to are kept. Both passes of a recomputed stage, less the second run, are compared with
    those of the one stage within each round. The difference counts only above three of its standard errors: of large layers,
    for which it is next to nothing, there are few samples, perhaps in different phases of the host.
    """

    recompute_factor: float | None = None  # what a recompute adds to a step, over the part of a forward that it repeats
    forward_cut_s: float = 0.0
    backward_cut_s: float = 0.0
    input_gradient_cut_s: float = 0.0  # of the first half of a split backward
    weight_gradient_factor: float = 1.0  # the second half of the one stage, over the sum of the layers'
    overhead_s: float = 0.0  # that a stage adds to each forward or backward
    forward_tail: float = 1.0  # mean of the layers' sum in a round, over the sum of their medians
    backward_tail: float = 1.0


NO_CORRECTIONS = Corrections()
"""Of the loss, which is no part of a stage."""


def corrections_of(bench: Bench, samples: Callable[[str], Samples], share_run_again: float = 1.0) -> Corrections:
    """The corrections by the samples of a bench; a recompute runs this share of its last layer again."""

    def seconds(*names: str) -> float:
        return sum(samples(name).timing().median_s for name in names)

    def together_s(name: str) -> float:
        """The mean of the layers' sum in a round."""
        return samples(f"together/{name}").mean_timing().median_s

    cuts, excesses = {}, {}
    halved = [key for key in bench.keys if samples(f"{key}/input gradient").timing().num_samples]
    for name, keys in (("forward", bench.keys), ("backward", bench.keys), ("input gradient", halved)):
        excesses[name] = lower_bound_s(samples(f"excess/{name}"))
        cuts[name] = even_cut_s([samples(f"{key}/{name}").timing().low_s / 2 for key in keys], excesses[name])
    forward_s, weights_s = seconds("stage/forward"), seconds("stage/weight gradient")
    rerun_s = forward_s - (1 - share_run_again) * seconds(f"{bench.keys[-1]}/forward")
    around = samples("recomputed/around")
    around_s = median_s(around.clean_s) if around.clean_s else 0.0
    again_s = seconds("recomputed/again") + (around_s if around_s > _CERTAIN * around.median_error_s else 0.0)
    return Corrections(
        recompute_factor=_ratio(again_s, rerun_s) if rerun_s > _LEAST_RERUN * forward_s else 1.0,
        forward_cut_s=cuts["forward"],
        backward_cut_s=cuts["backward"],
        input_gradient_cut_s=cuts["input gradient"],
        weight_gradient_factor=_ratio(weights_s, seconds(*(f"{key}/weight gradient" for key in halved))),
        overhead_s=(excesses["forward"] + excesses["backward"]) / 2 / len(bench.keys),
        forward_tail=_ratio(together_s("forward"), seconds(*(f"{key}/forward" for key in bench.keys))),
        backward_tail=_ratio(together_s("backward"), seconds(*(f"{key}/backward" for key in bench.keys))),
    )


def _ratio(piece_s: float, sum_s: float) -> float:
    """The ratio, or 1 where either was not measured."""
    return piece_s / sum_s if piece_s and sum_s else 1.0


def lower_bound_s(excess: Samples) -> float:
    """The median less its standard error, at least 0; 0 with fewer than five samples.

    >>> lower_bound_s(Samples([1.0] * 5)), lower_bound_s(Samples([1.0] * 4)), lower_bound_s(Samples([-1.0, 1.0, 0.0, 0.5, -0.5]))
    (1.0, 0.0, 0.0)
    """
    return max(0.0, median_s(excess.clean_s) - excess.median_error_s) if excess.clean_s else 0.0


def shares_weights(layers: Sequence[nn.Module]) -> bool:
    """Whether several of them have a trained weight in common.

    On one stage, the second half of a split backward then runs through all that lies between the uses again, which
    layers on different stages do not.
    """
    used = [x for layer in layers for x in dict.fromkeys(layer.parameters()) if x.requires_grad]
    return len(used) > len(set(used))


def even_cut_s(most_s: Sequence[float], total_s: float) -> float:
    """The seconds s for which the sum of min(s, most) over `most_s` is `total_s`; the largest `most` if there is none.

    >>> even_cut_s([1.0, 4.0, 4.0], 3.0), even_cut_s([1.0, 4.0, 4.0], 6.0), even_cut_s([1.0, 4.0, 4.0], 20.0)
    (1.0, 2.5, 4.0)
    """
    left_s = total_s
    for place, most in enumerate(sorted(most_s)):
        share_s = left_s / (len(most_s) - place)
        if share_s <= most:
            return share_s
        left_s -= most
    return max(most_s, default=0.0)


def net(timing: Timing, cut_off_s: float) -> Timing:
    """A layer's time less the cut cost, at least half of its lower quartile."""
    return timing.plus(-min(cut_off_s, timing.low_s / 2))


_LEAST_ROUNDS = 10
_MOST_ROUNDS = 60
_LEAST_SUMS = 5  # rounds with a sum of all layers, for its error to count
_SETTLED = 0.025  # standard error of a median, over the median
_SETTLED_OF_ALL = 0.004  # or over the time of all layers: small ones need not settle
_SETTLED_SUM = 0.01  # the same of the sum of several layers, as drift that they have in common hardly shows in each


class RoundSamples:
    """Access to samples that also tracks which of them one round added."""

    def __init__(self, samples: Callable[[str], Samples]) -> None:
        self._samples = samples
        self._before: dict[str, tuple[int, int, int]] = {}  # how many were clean, refused, and the host's

    def __call__(self, name: str) -> Samples:
        """The samples of that name, which may be added to."""
        found = self._samples(name)
        self._before.setdefault(name, (len(found.clean_s), len(found.refused_s), len(found.host_s)))
        return found

    def seconds(self, *names: str, on_host: bool) -> float | None:
        """The sum of what was added under these names, by one clock; None where that was nothing, or something was refused."""
        added: list[float] = []
        for name in names:
            if name in self._before:
                found, (num_clean, num_refused, num_host) = self._samples(name), self._before[name]
                if on_host:
                    added += found.host_s[num_host:]
                elif len(found.refused_s) > num_refused:
                    return None
                else:
                    added += found.clean_s[num_clean:]
        return sum(added) if added else None


class TimingRounds:
    """The measurements of one bench; their samples have names such as `0/forward`, by the key of the layer.

    Per round, `together/forward` is the sum over the layers and `excess/forward` that sum less the one stage;
    `recomputed/around` is what recompute adds besides the second run.
    """

    def __init__(
        self,
        bench: Bench,
        clock: Clock,
        samples: Callable[[str], Samples],
        *,
        splits_backward: bool = True,
        others: Neighbours | None = None,
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """`between` is called between samples, while no other process is measured beside this one."""
        self._bench, self._clock, self._samples = bench, clock, samples
        self._benches = (bench, *bench.others)  # of as many batches
        self._between = between
        self._splits_backward, self._others = splits_backward, others

    def sample(self, budget_s: float, report: Callable[[int, float], None]) -> None:
        """Run rounds until the medians settle or `budget_s` is spent; `report` gets the round and the share done."""
        start_s, rounds = time.monotonic(), 0
        while rounds < self._clock.warmup_rounds or time.monotonic() - start_s < self._clock.warmup_s:
            self.layer_round(lambda _name: Samples())
            self._clock.flush()
            rounds += 1
        start_s = time.monotonic()
        for index in range(_MOST_ROUNDS):
            if index >= _LEAST_ROUNDS and (self._is_settled or time.monotonic() - start_s > budget_s):
                return
            self._bench = self._benches[index // 2 % len(self._benches)]  # a pair of rounds measures everything
            added = RoundSamples(self._samples)
            self.layer_round(added, between=self._between)
            self._stage_round(added, "stage", self._bench.stage)
            if self._bench.whole is not None:
                self._between()
                self._clock.flush()
                loss = self._clock.time(self._samples("whole/forward"), self._bench.whole)
                if loss.requires_grad:
                    self._clock.flush()
                    self._clock.time(self._samples("whole/backward"), loss.backward)
            if index % 2 == 0:
                self._stage_round(added, "recomputed", partial(self._recomputed, added("recomputed/again")))
            else:
                self._first_round()
                if self._splits_backward:
                    self._split_round(added)
            if self._others is not None:
                with self._others.running():
                    self.layer_round(lambda name, added=added: added(f"{name}{BESIDE_OTHERS}"))  # type: ignore[misc]
                    self._clock.flush()
            self._clock.flush()
            self._add_excesses(added)
            spent = (time.monotonic() - start_s) / budget_s
            report(index + 1, min((index + 1) / _LEAST_ROUNDS, max(spent, (index + 1) / _MOST_ROUNDS), 1.0))

    def _recomputed(self, samples: Samples, *inputs: Tensor) -> Tensors:
        """The one stage with recompute; the second run is timed."""

        @contextmanager
        def again() -> Iterator[None]:
            end = self._clock.begin(samples)  # within a backward that is timed as one
            yield
            end()

        return recomputed(self._bench.stage, inputs, again=again, written=self._written)

    @cached_property
    def _written(self) -> list[Tensor]:
        """The buffers that a forward writes into."""
        versions = [(x, x._version) for x in self._bench.stage.buffers()]
        if versions:
            with torch.no_grad():
                self._bench.stage(*self._bench.inputs)
        return [x for x, version in versions if x._version != version]

    def _add_excesses(self, added: RoundSamples) -> None:
        """The sum of the layers in this round, its excess over the one stage, and what recompute adds besides the rerun; by
        each clock."""
        for on_host in (False, True):
            seconds = partial(added.seconds, on_host=on_host)
            differences = list[tuple[str, float | None, float | None]]()
            for name in ("forward", "backward", "input gradient"):
                layers_s = seconds(*(f"{key}/{name}" for key in dict.fromkeys(self._bench.keys)))
                if name != "input gradient":
                    differences.append((f"together/{name}", layers_s, 0.0))
                differences.append((f"excess/{name}", layers_s, seconds(f"stage/{name}")))
            again_s, both_s = seconds("recomputed/again"), seconds("stage/forward", "stage/backward")
            if again_s is not None and both_s is not None:
                recomputed_s = seconds("recomputed/forward", "recomputed/backward")
                differences.append(("recomputed/around", recomputed_s, again_s + both_s))
            for name, more_s, less_s in differences:
                if more_s is not None and less_s is not None:
                    found = self._samples(name)
                    (found.host_s if on_host else found.clean_s).append(more_s - less_s)

    def layer_round(self, samples: Callable[[str], Samples], *, between: Callable[[], object] = lambda: None) -> None:
        """All layers forward, the loss, all layers backward; `between` is called before each of them."""
        keys = (*self._bench.keys, "loss")

        def run(place: int, direction: str, work: Callable[[], Any]) -> Any:
            if place < len(self._bench.keys):
                between()
            return self._clock.time_layer(samples(f"{keys[place]}/{direction}"), work)

        run_passes(self._bench, run)

    def _first_round(self) -> None:
        """A round whose backward creates the gradients instead of accumulating into them."""
        kept = {parameter: parameter.grad for parameter in self._bench.parameters}
        for parameter in kept:
            parameter.grad = None

        def samples(name: str) -> Samples:
            if not name.endswith("backward") or name == "loss/backward":
                return Samples()
            return self._samples(name.replace("/backward", "/first backward"))

        self.layer_round(samples, between=self._between)
        self._clock.flush()
        for parameter, gradient in kept.items():
            parameter.grad = gradient

    def _split_round(self, samples: Callable[[str], Samples]) -> None:
        """Both halves of each layer's backward, then of all layers as one stage."""
        passed, leaves = self._bench.forward(lambda place, leaves: self._bench.layers[place](*leaves))
        leaves = self._with_gradients(leaves)
        keys = self._bench.keys
        backward(
            passed, leaves, lambda place, *roots: self._time_halves(samples, keys[place], passed[place][0], *roots)
        )
        self._clock.flush()
        first = next((place for place, (inputs, _) in enumerate(passed) if wants_gradient(inputs)), None)
        if first is not None:
            is_usual = not shares_weights(self._bench.layers[first:])
            inputs = detached(passed[first][0])
            outputs = Composed(self._bench.layers[first:])(*inputs)
            backward(
                [(inputs, outputs)],
                self._with_gradients(outputs),
                lambda _, *roots: self._time_halves(samples, "stage", inputs, *roots, times_second=is_usual),
            )

    def _time_halves(
        self,
        samples: Callable[[str], Samples],
        key: str,
        inputs: Tensors,
        roots: list[Tensor],
        gradients: list[Tensor],
        *,
        times_second: bool = True,
    ) -> None:
        """Both halves of a layer's backward; without a first half where no input requires a gradient."""
        self._between()
        first = samples(f"{key}/input gradient")
        second = samples(f"{key}/weight gradient") if times_second else Samples()
        if not wants_gradient(inputs):
            self._clock.time_layer(second, torch.autograd.backward, roots, gradients)
            return
        found, rest = self._clock.time_layer(first, first_half, roots, gradients, inputs)
        for x, gradient in zip(inputs, found, strict=True):
            x.grad = gradient
        self._clock.time_layer(second, rest.run)

    def _with_gradients(self, outputs: Tensors) -> Tensors:
        """Leaves in place of the last outputs, with the gradients of the loss."""
        leaves = detached(outputs)
        loss = self._bench.loss(leaves)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        return leaves

    def _stage_round(self, samples: Callable[[str], Samples], name: str, stage: Callable[..., Tensors]) -> None:
        if not self._bench.layers:
            return
        self._between()
        inputs = detached(self._bench.inputs)
        outputs = self._clock.time_layer(samples(f"{name}/forward"), stage, *inputs)
        gradients = self._with_gradients(outputs)
        work = partial(self._clock.time_layer, samples(f"{name}/backward"), torch.autograd.backward)
        backward([(inputs, outputs)], gradients, lambda _, *roots: work(*roots))

    @property
    def _is_settled(self) -> bool:
        found = [self._samples(f"{key}/{x}") for key in self._bench.keys for x in ("forward", "backward")]
        medians = [x.timing().median_s for x in found]
        small_s = _SETTLED_OF_ALL * sum(medians)
        sums = [self._samples(f"together/{x}") for x in ("forward", "backward") if len(set(self._bench.keys)) > 1]
        known = [x for x in sums if len(x.clean_s) >= _LEAST_SUMS]  # else nearly every round is interrupted
        return all(x.settled(_SETTLED_SUM) for x in known) and all(
            x.median_error_s <= max(_SETTLED * s, small_s) for x, s in zip(found, medians, strict=True) if s
        )
