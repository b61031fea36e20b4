"""Rounds: the sampled names, the corrections, and unchanged gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gplan.core import Timing
from gplan_profiler.memory.layer_memory import allocate_gradients
from gplan_profiler.timing.bench import Bench, Composed, sum_of_outputs
from gplan_profiler.timing.clock import CpuClock, Samples
from gplan_profiler.timing.rounds import (
    RoundSamples,
    TimingRounds,
    corrections_of,
    even_cut_s,
    net,
    shares_weights,
)


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (torch.tanh(self.inner(x)),)


class Bookkeeper:
    """Samples by name, and a clock on which every piece of work takes the time that `seconds` says for its samples."""

    warmup_s, warmup_rounds = 0.0, 1

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.samples: dict[str, Samples] = defaultdict(Samples)
        self._seconds = seconds or {}

    def __call__(self, name: str) -> Samples:
        return self.samples[name]

    def time(self, samples: Samples, work: Callable[..., Any], *args: Any) -> Any:
        name = next((name for name, x in self.samples.items() if x is samples), "")
        samples.add(self._seconds.get(name, 1.0), self._seconds.get(name, 1.0))
        return work(*args)

    def time_layer(self, samples: Samples, work: Callable[..., Any], *args: Any) -> Any:
        return self.time(samples, work, *args)

    def begin(self, samples: Samples) -> Callable[[], None]:
        return lambda: self.time(samples, lambda: None)

    def flush(self) -> None:
        pass


def bench_of(keys: tuple[str, ...], *, inputs_want_gradient: bool = False) -> Bench:
    layers = tuple(Layer() for _ in keys)
    model = nn.Sequential(*layers)
    allocate_gradients(model)
    return Bench(
        names=keys,
        keys=keys,
        layers=layers,
        stage=Composed(layers),
        inputs=(torch.ones(2, 4, requires_grad=inputs_want_gradient),),
        loss=sum_of_outputs,
        whole=lambda: sum_of_outputs(Composed(layers)(torch.ones(2, 4))),
    )


def sampled(bench: Bench, book: Bookkeeper, **options: Any) -> set[str]:
    TimingRounds(bench, book, book, **options).sample(10.0, lambda _index, _share: None)
    return set(book.samples)


def test_batches_take_turns() -> None:
    seen: list[float] = []
    bench = bench_of(("a",))
    bench.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(float(inputs[0][0, 0])))
    others = tuple(replace(bench, inputs=(torch.full((2, 4), number),), whole=None) for number in (2.0, 3.0))
    sampled(replace(bench, others=others), Bookkeeper())
    turns = [number for number, _ in groupby(seen)]
    assert set(seen) == {1.0, 2.0, 3.0} and turns[:4] == [1.0, 2.0, 3.0, 1.0]


def test_everything_is_sampled() -> None:
    assert sampled(bench_of(("a", "b")), Bookkeeper()) == {
        *(f"{key}/{x}" for key in "ab" for x in ("forward", "backward", "first backward")),
        *(f"{key}/{x}" for key in ("loss", "whole", "stage", "recomputed") for x in ("forward", "backward")),
        *(f"{key}/{x} gradient" for key in ("a", "b", "stage") for x in ("input", "weight")),
        *(f"excess/{x}" for x in ("forward", "backward", "input gradient")),
        *(f"recomputed/{x}" for x in ("again", "around")),
        *(f"together/{x}" for x in ("forward", "backward")),
    }


def test_whole_model_is_timed_in_every_round() -> None:
    book = Bookkeeper()
    sampled(bench_of(("a", "b")), book)
    whole, stage, recomputed = (len(book.samples[f"{x}/forward"].clean_s) for x in ("whole", "stage", "recomputed"))
    assert whole == stage == 2 * recomputed


def test_layers_that_are_alike_share_their_samples() -> None:
    book = Bookkeeper()
    sampled(bench_of(("a", "b", "b", "b")), book)
    assert len(book.samples["b/forward"].clean_s) == 3 * len(book.samples["a/forward"].clean_s)


def test_first_layer_has_only_a_second_half() -> None:
    book = Bookkeeper()
    sampled(bench_of(("a", "b")), book)
    counts = {name: len(x.clean_s) for name, x in book.samples.items() if "gradient" in name}
    assert counts == {
        "a/input gradient": 0, "a/weight gradient": 5, "b/input gradient": 5, "b/weight gradient": 5,
        "stage/input gradient": 5, "stage/weight gradient": 5, "excess/input gradient": 5,
    }  # fmt: skip


def test_no_halves_if_backward_cannot_be_split() -> None:
    assert not any("gradient" in name for name in sampled(bench_of(("a", "b")), Bookkeeper(), splits_backward=False))


def test_second_half_of_a_stage_that_uses_a_weight_twice_is_not_timed() -> None:
    """It runs through all that lies between the uses again: layers on different stages take less than half of that."""
    bench, book = bench_of(("a", "b", "c")), Bookkeeper()
    first, _, last = bench.layers
    last.inner.weight = first.inner.weight  # not in the part of the stage whose inputs want a gradient
    assert not shares_weights(bench.layers[1:])
    last.inner.weight = bench.layers[1].inner.weight
    assert shares_weights(bench.layers[1:])
    names = sampled(bench, book)
    assert "stage/input gradient" in names and "stage/weight gradient" not in names
    assert "c/weight gradient" in names


def test_halves_equal_the_whole_backward() -> None:
    bench = bench_of(("a", "b"), inputs_want_gradient=True)
    rounds = TimingRounds(bench, CpuClock(), Bookkeeper())
    rounds.layer_round(lambda _: Samples())
    whole = [x.grad.clone() for x in bench.parameters if x.grad is not None]
    for parameter in bench.parameters:
        parameter.grad = torch.zeros_like(parameter)
    rounds._split_round(Bookkeeper())  # once layer by layer, once in one piece
    for parameter, expected in zip(bench.parameters, whole, strict=True):
        assert torch.allclose(parameter.grad, 2 * expected)  # type: ignore[arg-type]


def test_first_backward_restores_gradients() -> None:
    bench, book = bench_of(("a",)), Bookkeeper()
    before = [x.grad for x in bench.parameters]
    TimingRounds(bench, book, book)._first_round()
    assert [x.grad is y for x, y in zip(bench.parameters, before, strict=True)] == [True, True]
    assert len(book.samples["a/first backward"].clean_s) == 1


def test_a_round_with_a_refused_sample_tells_no_difference() -> None:
    samples = {"a": Samples([1.0]), "b": Samples([1.0], [9.0])}
    added = RoundSamples(samples.__getitem__)
    for name, seconds in (("a", 2.0), ("a", 3.0), ("b", 4.0)):
        added(name).add(seconds, seconds)
    assert tuple(added.seconds(*names, on_host=False) for names in ("a", "ab", "c")) == (5.0, 9.0, None)
    added("b").add(5.0, 1.0)
    assert added.seconds("a", "b", on_host=False) is None


def test_rounds_end_with_the_budget() -> None:
    class Scattering(Bookkeeper):
        def time(self, samples: Samples, work: Callable[..., Any], *args: Any) -> Any:
            samples.add(1.0 + len(samples.clean_s) % 2, 1.0 + len(samples.clean_s) % 2)
            return work(*args)

    steady, scattering = Bookkeeper(), Scattering()
    sampled(bench_of(("a",)), steady)
    sampled(bench_of(("a",)), scattering)
    assert len(steady.samples["a/forward"].clean_s) == 10
    assert len(scattering.samples["a/forward"].clean_s) == 60
    short = Scattering()
    TimingRounds(bench_of(("a",)), short, short).sample(1e-9, lambda _index, _share: None)
    assert len(short.samples["a/forward"].clean_s) == 10


def test_progress_moves_where_a_round_takes_longer_than_the_budget() -> None:
    # All was said to be done after the first of the ten rounds.
    book, shares = Bookkeeper(), list[float]()
    TimingRounds(bench_of(("a",)), book, book).sample(1e-9, lambda _index, share: shares.append(share))
    assert shares == [x / 10 for x in range(1, 11)]


class Drifting(Bookkeeper):
    """All layers vary by 2 % together, as on a host whose speed changes."""

    def time(self, samples: Samples, work: Callable[..., Any], *args: Any) -> Any:
        seconds = 1.0 + (0.02 if len(samples.clean_s) % 2 else -0.02)
        samples.add(seconds, seconds)
        return work(*args)


def test_rounds_go_on_until_the_sum_of_all_layers_is_known() -> None:
    """Each layer is known within 1.2 % after ten rounds, which is enough for one, but not for the sum."""
    book = Drifting()
    sampled(bench_of(("a", "b")), book)
    assert len(book.samples["together/forward"].clean_s) == 14  # 1.25 * 0.04 / 1.35 / sqrt(14) < 1 %


def test_one_layer_need_not_be_known_as_exactly_as_a_sum() -> None:
    book = Drifting()
    sampled(bench_of(("a", "a")), book)
    assert len(book.samples["together/forward"].clean_s) == 10


def test_rounds_end_where_nearly_all_are_interrupted() -> None:
    """Sums of a few rounds cannot settle; the layers themselves have."""
    book = Bookkeeper()
    for name in ("a/forward", "a/backward", "b/forward", "b/backward"):
        book.samples[name].clean_s.extend([1.0] * 10)
    for name in ("forward", "backward"):
        book.samples[f"together/{name}"].clean_s.extend([1.0, 2.0])
    assert TimingRounds(bench_of(("a", "b")), book, book)._is_settled


@pytest.mark.parametrize("num_rounds", [0, 1, 3])
def test_rounds_of_the_warm_up_have_no_samples(num_rounds: int) -> None:
    calls: list[int] = []
    bench, book = bench_of(("a",)), Bookkeeper()
    book.warmup_rounds = num_rounds
    bench.layers[0].register_forward_pre_hook(lambda *_: calls.append(len(book.samples["a/forward"].clean_s)))
    sampled(bench, book)
    assert calls.count(0) == num_rounds  # the clock adds a sample before its work


def test_excess_is_the_cut_cost() -> None:
    passes = {"stage/forward": 1.5, "stage/backward": 1.8, "recomputed/forward": 1.6, "recomputed/backward": 3.4}
    book, bench = Bookkeeper(passes | {"recomputed/again": 1.4}), bench_of(("a", "b"))
    sampled(bench, book)
    sampled(bench, book)  # now that the clock knows the names
    for name in book.samples:
        book.samples[name].clean_s = book.samples[name].clean_s[-5:]
    corrections = corrections_of(bench, book)
    assert corrections.forward_cut_s == pytest.approx((2 - 1.5) / 2)
    assert corrections.backward_cut_s == pytest.approx((2 - 1.8) / 2)
    assert corrections.overhead_s == pytest.approx((0.25 + 0.1) / 2)
    around_s = 1.6 - 1.5 + 3.4 - 1.4 - 1.8
    assert corrections.recompute_factor == pytest.approx((1.4 + around_s) / 1.5)
    assert corrections_of(bench, book, 0.25).recompute_factor == pytest.approx((1.4 + around_s) / (1.5 - 0.75 * 1.0))


def test_tail_scales_layers() -> None:
    book, bench = Bookkeeper(), bench_of(("a", "b", "c"))
    sampled(bench, book)
    slow = ([2.0, 1.0, 1.0, 8.0, 1.0], [1.0, 2.0, 1.0, 8.0, 1.0], [1.0, 1.0, 2.0, 8.0, 1.0])  # and once all at a time
    for name, seconds in zip("abc", slow, strict=True):
        book.samples[f"{name}/forward"].clean_s = seconds
    book.samples["together/forward"].clean_s = [sum(x) for x in zip(*slow, strict=True)]
    corrections = corrections_of(bench, book)
    assert corrections.forward_tail == pytest.approx(3.8 / 3)  # 4, 4, 4 and 3, and for the disturbed round 4
    assert corrections.backward_tail == pytest.approx(1.0)


def test_sums_of_undisturbed_rounds() -> None:
    book, bench = Bookkeeper({"a/forward": 2.0, "b/forward": 3.0}), bench_of(("a", "b"))
    sampled(bench, book)
    sampled(bench, book)  # now that the clock knows the names
    assert book.samples["together/forward"].clean_s[-1] == pytest.approx(5.0)


def test_second_halves_sum_to_the_stage() -> None:
    names = ("b/input gradient", "c/input gradient", "b/weight gradient", "c/weight gradient", "a/weight gradient")
    book = Bookkeeper(
        {
            **dict.fromkeys(names, 1.0),
            "a/weight gradient": 7.0,
            "stage/input gradient": 1.6,
            "stage/weight gradient": 3.0,
        }
    )
    bench = bench_of(("a", "b", "c"))
    sampled(bench, book)
    sampled(bench, book)
    for name in book.samples:
        book.samples[name].clean_s = book.samples[name].clean_s[-5:]
    corrections = corrections_of(bench, book)
    assert corrections.input_gradient_cut_s == pytest.approx((2 - 1.6) / 2)
    assert corrections.weight_gradient_factor == pytest.approx(3.0 / 2)  # without a, which has no first half


def test_layer_halves_without_stage_halves() -> None:
    book = Bookkeeper()
    sampled(bench_of(("a",)), book, splits_backward=False)
    corrections = corrections_of(bench_of(("a",)), book)
    assert (corrections.input_gradient_cut_s, corrections.weight_gradient_factor) == (0.0, 1.0)


def test_noise_is_not_subtracted() -> None:
    book, bench = Bookkeeper(), bench_of(("a", "b"))
    sampled(bench, book)
    book.samples["excess/backward"].clean_s = [0.3, -0.2, 0.1, -0.3, 0.2]
    assert corrections_of(bench, book).backward_cut_s == 0.0
    book.samples["excess/backward"].clean_s = [0.3, 0.28, 0.32, 0.31, 0.29]
    assert corrections_of(bench, book).backward_cut_s == pytest.approx(0.3 / 2, rel=0.05)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=8), st.floats(0, 1))
def test_subtracted_cuts_sum_to_the_excess(most: list[float], share: float) -> None:
    total = share * sum(most)
    found = even_cut_s(most, total)
    assert sum(min(x, found) for x in most) == pytest.approx(total, abs=1e-9)


def test_no_layer_loses_more_than_half_of_its_time() -> None:
    timing = Timing(median_s=4.0, low_s=2.0, high_s=5.0, num_samples=9)
    assert net(timing, 0.5).median_s == 3.5
    assert net(timing, 3.0).median_s == 3.0
