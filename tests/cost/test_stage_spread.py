"""The spread of a stage, from the quartiles of its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gplan.core import Profile, Timing
from gplan.cost.stage_spread import StageSpread, stage_spreads
from tests.evaluate.explain.settings import plan_of, recompute_bound
from tests.made import make_profile
from tests.scheduled import scheduled_plan

SIGMA = 1.35  # distance of the quartiles of a normal distribution of deviation 1


def varied(seconds: float, deviation_s: float) -> Timing:
    half = SIGMA * deviation_s / 2
    return Timing(median_s=seconds, low_s=seconds - half, high_s=seconds + half, num_samples=9)


def with_times(profile: Profile, **times: Timing) -> Profile:
    """The same with these times for every layer."""
    layers = (replace(x, costs=tuple(replace(cost, **times) for cost in x.costs)) for x in profile.layers)  # type: ignore[arg-type]
    return replace(profile, layers=tuple(layers))


def spreads(profile: Profile, *, cuts: Sequence[int] = (), **given: object) -> tuple[StageSpread, ...]:
    return stage_spreads(plan_of(profile, num_stages=1 + len(cuts), **given), profile)


@pytest.mark.parametrize(("common", "variance"), [(None, 0.16), (0.0, 0.16), (0.5, 0.4), (1.0, 0.64)])
def test_layers_vary_together_as_far_as_a_round_did(common: float | None, variance: float) -> None:
    """Four layers of 1 s, each with a deviation of 0.2 s."""
    profile = with_times(make_profile([1.0] * 4), forward=varied(1.0, 0.2))
    (found,) = spreads(replace(profile, common_variance=common))
    share = pytest.approx(math.sqrt(variance) / 4)
    assert found == StageSpread(forward=share, recompute=share)


def test_given_times_do_not_vary() -> None:
    assert spreads(make_profile([1.0, 2.0]), cuts=(1,)) == (StageSpread(), StageSpread())


def test_the_loss_is_part_of_the_last_stage() -> None:
    profile = make_profile([1.0, 1.0])
    loss = replace(profile.layers[0].costs[0], forward=varied(1.0, 0.2))
    first, last = spreads(replace(profile, loss=(loss,)), cuts=(1,))
    assert (first.forward, last.forward, last.recompute) == (0.0, pytest.approx(0.1), 0.0)


def test_only_selected_layers_are_recomputed() -> None:
    profile = recompute_bound()
    layers = [
        replace(x, costs=(replace(x.costs[0], forward=varied(1.0, 0.1 * i)),)) for i, x in enumerate(profile.layers, 1)
    ]
    profile = replace(profile, layers=tuple(layers))
    plan = plan_of(profile, memory_bytes=70, recompute="selected")
    names = [x.recompute_layers for x in plan.stages]
    assert sum(map(len, names)) == 1
    for stage, found in zip(plan.stages, stage_spreads(plan, profile), strict=True):
        assert found.recompute == pytest.approx(sum(0.1 * (1 + "abc".index(x)) for x in stage.recompute_layers))


def test_each_half_has_its_own_spread() -> None:
    exact, loose = Timing.exactly(1.0), varied(1.0, 0.2)
    profile = with_times(make_profile([1.0, 1.0]), input_gradient=loose, weight_gradient=exact, backward=exact)
    plan = scheduled_plan("zb-h1")
    assert [(x.input_gradient, x.weight_gradient, x.backward) for x in stage_spreads(plan, profile)] == [
        (pytest.approx(0.2), 0.0, 0.0)
    ] * 2
    whole = make_profile([1.0, 1.0])
    whole = with_times(whole, backward=loose)  # the halves are not known: all is in the first
    assert stage_spreads(plan, whole)[1].input_gradient == pytest.approx(0.2)
    no_first = with_times(whole, weight_gradient=loose)  # a layer before all weights has no first half
    assert stage_spreads(plan, no_first)[1].input_gradient == 0.0


def test_the_update_is_zero_grad_and_the_optimizer() -> None:
    profile = make_profile([1.0, 1.0], weight_bytes=8, optimizer_s=1.0)
    step = replace(profile.step, optimizer=varied(3.0, 0.3), zero_grad=varied(1.0, 0.4))
    assert [x.optimizer for x in spreads(replace(profile, step=step), cuts=(1,))] == [pytest.approx(0.5 / 4)] * 2


def test_between_profiled_sizes_the_spread_is_interpolated() -> None:
    profile = make_profile([1.0], microbatch_sizes=(1, 3))
    costs = tuple(
        replace(x, forward=varied(x.microbatch_size, 0.1 * x.microbatch_size)) for x in profile.layers[0].costs
    )
    profile = replace(profile, layers=(replace(profile.layers[0], costs=costs),))
    assert spreads(profile, microbatch_size=2)[0].forward == pytest.approx(0.1)
