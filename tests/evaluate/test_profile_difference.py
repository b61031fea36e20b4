"""Differences of two profiles: verdicts for plain numbers, and laws of the noise."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Layer, Profile, SharedWeight, Timing
from gplan.core.errors import UsageError
from gplan.core.precision import Precision
from gplan.evaluate.profile_difference import (
    Change,
    Difference,
    Estimate,
    SizeDifference,
    profile_difference,
    time_change,
    total,
)
from tests.made import make_profile


def measured(seconds: float, *, spread_s: float = 0.0, num_samples: int = 25) -> Timing:
    """A timing whose quartiles lie `spread_s` apart."""
    low_s, high_s = seconds - spread_s / 2, seconds + spread_s / 2
    return Timing(median_s=seconds, low_s=low_s, high_s=high_s, num_samples=num_samples)


def as_measured(layer: Layer) -> Layer:
    costs = tuple(
        replace(x, forward=measured(x.forward.median_s), backward=measured(x.backward.median_s)) for x in layer.costs
    )
    return replace(layer, costs=costs)


def measured_profile(forward_s: list[float], *, overhead_s: float = 0.0, weight_bytes: int = 0) -> Profile:
    made = make_profile(forward_s, overhead_s=overhead_s, weight_bytes=weight_bytes)
    return replace(made, layers=tuple(map(as_measured, made.layers)), origin="measured")


def only_size(found: Difference) -> SizeDifference:
    (size,) = found.sizes
    return size


def estimate(timing: Timing) -> Estimate:
    return total([(timing, 1)])


def whole(old: Profile, new: Profile) -> dict[str, Change]:
    return {x.quantity: x for x in only_size(profile_difference(old, new)).whole_model}


def forwards(old: Profile, new: Profile) -> list[Change]:
    return [layer.changes[0] for layer in only_size(profile_difference(old, new)).layers]


def test_noise_formula() -> None:
    before, after = estimate(measured(1.0, spread_s=0.027)), estimate(measured(1.2, spread_s=0.027))
    change = time_change("forward", before, after, overhead_s=0.01)
    error_s = 1.25 * (0.027 / 1.35) / math.sqrt(25)
    assert change.noise == pytest.approx(1.96 * math.sqrt(2) * error_s + 0.05 * 1.2 + 0.01)
    assert change.verdict == "slower"


@pytest.mark.parametrize(("new_s", "verdict"), [(1.049, "same"), (1.06, "slower"), (0.951, "same"), (0.94, "faster")])
def test_change_within_drift_is_none(new_s: float, verdict: str) -> None:
    old, new = (estimate(measured(x, spread_s=1e-6, num_samples=10_000)) for x in (1.0, new_s))
    assert time_change("forward", old, new).verdict == verdict


def test_more_samples_show_smaller_changes() -> None:
    few, many = (
        time_change("forward", *(estimate(measured(x, spread_s=0.3, num_samples=n)) for x in (1.0, 1.2)))
        for n in (5, 500)
    )
    assert (few.verdict, many.verdict) == ("same", "slower")


def test_band_holds_95_percent_of_medians() -> None:
    chance, num_outside, num_pairs = random.Random(0), 0, 2000
    for _ in range(num_pairs):
        change = time_change(
            "forward", *(estimate(timing_of([chance.gauss(1.0, 0.1) for _ in range(25)])) for _ in "ab")
        )
        num_outside += abs(change.change) > change.noise - 0.05 * max(change.old, change.new)
    assert 0.02 < num_outside / num_pairs < 0.08


def timing_of(samples: list[float]) -> Timing:
    low_s, median_s, high_s = quantiles(samples, method="inclusive")
    return Timing(median_s=median_s, low_s=low_s, high_s=high_s, num_samples=len(samples))


seconds = st.floats(min_value=1e-6, max_value=10.0)


@given(old_s=seconds, new_s=seconds, error_s=st.floats(min_value=0.0, max_value=1.0))
def test_time_change_is_antisymmetric(old_s: float, new_s: float, error_s: float) -> None:
    old, new = Estimate(old_s, error_s, True), Estimate(new_s, 0.0, True)
    there, back = time_change("forward", old, new), time_change("forward", new, old)
    assert there.noise == back.noise
    assert {there.verdict, back.verdict} in ({"same"}, {"slower", "faster"})


def test_given_times_have_no_noise() -> None:
    given_old, given_new = make_profile([1.0]), make_profile([1.001])
    assert forwards(given_old, given_new)[0].verdict == "slower"
    assert forwards(given_old, measured_profile([1.001]))[0].verdict == "same"


def test_overhead_is_noise_of_tiny_layers() -> None:
    old, new = (measured_profile([1.0, x], overhead_s=0.004) for x in (0.001, 0.002))
    assert [x.verdict for x in forwards(old, new)] == ["same", "same"]
    exact = [measured_profile([1.0, x]) for x in (0.001, 0.002)]
    assert [x.verdict for x in forwards(*exact)] == ["same", "slower"]


def test_equal_profiles() -> None:
    found = profile_difference(
        measured_profile([1.0, 2.0], weight_bytes=8), measured_profile([1.0, 2.0], weight_bytes=8)
    )
    assert not any(layer.is_changed for layer in only_size(found).layers)
    assert {x.verdict for x in only_size(found).whole_model} == {"same"}
    assert (found.remarks, found.appeared, found.vanished) == ((), (), ())


def test_bytes_are_exact_so_that_one_more_is_more() -> None:
    old, new = (make_profile([1.0, 1.0], weight_bytes=x, stash_bytes=7) for x in ([100, 200], [100, 201]))
    first, second = only_size(profile_difference(old, new)).layers
    assert not first.is_changed and second.is_changed
    changed = {x.quantity: (x.change, x.verdict) for x in second.changes if x.change}
    assert changed == {"weights": (1, "more"), "gradients": (1, "more")}
    totals = whole(old, new)
    assert (totals["weights"].old, totals["weights"].new) == (300, 301)
    assert (totals["stash"].old, totals["stash"].new) == (14, 14)


def test_shared_weight_counts_once() -> None:
    shared = SharedWeight(name="w", layers=(0, 1), num_parameters=4, weight_bytes=16, gradient_bytes=16)
    old, new = make_profile([1.0, 1.0], weight_bytes=100), make_profile([1.0, 1.0], shared_weights=(shared,))
    assert whole(old, new)["weights"].new == 16


def test_totals_of_the_whole_model() -> None:
    old = make_profile([1.0, 2.0], overhead_s=0.5, optimizer_s=10.0)
    new = replace(old, loss=old.layers[0].costs)
    found = {name: (x.old, x.new) for name, x in whole(old, new).items() if x.unit == "seconds"}
    assert found == {"forward": (3.5, 4.5), "backward": (6.5, 8.5), "optimizer": (10.0, 10.0), "step": (20.0, 23.0)}


def alike(count: int, seconds: float, *, spread_s: float = 0.0) -> Profile:
    """Layers a, b, c, ... of which only the first was measured."""
    made = make_profile([seconds] * count)
    cost = replace(made.layers[0].costs[0], forward=measured(seconds, spread_s=spread_s), backward=measured(0.0))
    layers = [replace(x, costs=(cost,), same_as=0 if i else None) for i, x in enumerate(made.layers)]
    return replace(made, layers=tuple(layers))


def test_equal_layers_are_one_entry() -> None:
    (layer,) = only_size(profile_difference(alike(4, 1.0), alike(4, 1.5))).layers
    assert layer.names == ("a", "b", "c", "d")
    assert layer.change_s == pytest.approx(4 * 0.5)


def test_layers_equal_in_one_profile_are_apart() -> None:
    names = [x.names for x in only_size(profile_difference(alike(3, 1.0), measured_profile([1.0, 1.0, 1.1]))).layers]
    assert names == [("a", "b"), ("c",)]


def test_error_of_a_shared_measurement_adds_up() -> None:
    noise_s = [whole(*(alike(n, 1.0, spread_s=0.2) for _ in "ab"))["forward"].noise for n in (1, 9)]
    assert noise_s[1] == pytest.approx(9 * noise_s[0])


def test_independent_errors_partly_cancel() -> None:
    one, nine = (alike(n, 1.0, spread_s=0.2) for n in (1, 9))
    boundaries = replace(
        nine, layers=tuple(replace(x, same_as=None, kind=f"Kind{i}") for i, x in enumerate(nine.layers))
    )
    single, many = (whole(x, x)["forward"].noise for x in (one, boundaries))
    assert many - 9 * 0.05 == pytest.approx(3 * (single - 0.05))


def test_layers_are_matched_by_name() -> None:
    old, new = make_profile([1.0, 2.0, 3.0]), make_profile([1.0, 2.0, 3.0])
    new = replace(new, layers=(new.layers[2], replace(new.layers[0], name="z"), new.layers[1]))
    found = profile_difference(old, new)
    assert [(x.names, x.change_s) for x in only_size(found).layers] == [(("c",), 0.0), (("b",), 0.0)]
    assert (found.appeared, found.vanished) == (("z",), ("a",))


def test_median_change() -> None:
    found = only_size(profile_difference(measured_profile([1.0, 2.0, 4.0]), measured_profile([1.1, 2.2, 4.4])))
    assert found.median_change == pytest.approx(0.1)


def test_remarks_on_other_differences() -> None:
    old = replace(make_profile([1.0]), versions=(("torch", "2.13"),), notes=("half measured",))
    new = replace(
        old,
        device=replace(old.device, name="other", num_threads=2),
        model=replace(old.model, settings=(("depth", "3"),), digest="new"),
        versions=(("torch", "2.14"),),
        num_neighbours=1,
        precision=Precision.named("autocast"),
        plan_notes=("also shown with plans",),
    )
    assert profile_difference(old, new).remarks == (
        "digest of layers and parameters: made → new",
        "machine: made (cpu) → other (cpu)",
        "threads: 1 → 2",
        "version of torch: 2.13 → 2.14",
        "precision: as made → autocast",
        "processes beside the measured one: 0 → 1",
        "setting depth: none → 3",
        "of the old and the new profile: half measured",
        "of the new profile: also shown with plans",
    )


def test_common_microbatch_sizes_are_compared() -> None:
    old, new = make_profile([1.0], microbatch_sizes=(1, 2, 4)), make_profile([2.0], microbatch_sizes=(2, 4, 8))
    found = profile_difference(old, new)
    assert [(x.microbatch_size, x.layers[0].change_s) for x in found.sizes] == [(2, 6.0), (4, 12.0)]
    assert found.remarks == ("micro-batch sizes: 1, 2, 4 → 2, 4, 8",)
    assert [x.microbatch_size for x in profile_difference(old, new, microbatch_size=4).sizes] == [4]


def test_halves_are_compared_if_both_have_them() -> None:
    plain = make_profile([1.0])
    cost = replace(plain.layers[0].costs[0], weight_gradient=Timing.exactly(1.0))
    split = replace(plain, layers=(replace(plain.layers[0], costs=(cost,)),))
    for old, new, expected in ((plain, split, 2), (split, split, 3)):
        changes = only_size(profile_difference(old, new)).layers[0].changes
        assert sum(x.unit == "seconds" for x in changes) == expected


def test_pending_bytes_need_halves_in_both() -> None:
    plain = make_profile([1.0])
    split, more = (
        replace(plain, layers=(replace(plain.layers[0], costs=(cost,)),))
        for cost in (
            replace(plain.layers[0].costs[0], weight_gradient=Timing.exactly(1.0), pending_bytes=x) for x in (8, 24)
        )
    )
    for old, new, expected in ((plain, split, []), (split, plain, []), (split, more, [16])):
        found = only_size(profile_difference(old, new))
        for changes in (found.whole_model, found.layers[0].changes):
            assert [x.change for x in changes if x.quantity == "pending"] == expected


def test_profiles_with_nothing_in_common_are_refused() -> None:
    one, two = make_profile([1.0], microbatch_sizes=(1,)), make_profile([1.0], microbatch_sizes=(2,))
    with pytest.raises(
        UsageError, match="the old profile has micro-batch sizes 1, the new one 2; expected a micro-batch"
    ):
        profile_difference(one, two)
    with pytest.raises(UsageError, match="expected micro-batch size 4 in both"):
        profile_difference(one, one, microbatch_size=4)
    other = replace(one, layers=(replace(one.layers[0], name="q"),))
    with pytest.raises(UsageError, match=r"no layer of the old profile \(made, 1 layer\) has the name"):
        profile_difference(one, other)


def test_different_models_are_refused() -> None:
    old, new = make_profile([1.0] * 5), make_profile([1.0] * 7)
    new = replace(
        new, layers=tuple(replace(x, name=x.name if i < 2 else f"other.{i}") for i, x in enumerate(new.layers))
    )
    with pytest.raises(UsageError, match="only 2 layers of the old profile .* expected two profiles of one model"):
        profile_difference(old, new)
    assert profile_difference(make_profile([1.0] * 4), new).appeared
