"""p50 and p95 of the step, from quartiles that are known."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from gplan.explain.spread import drawn_s, spread_of, stage_spread
from gplan.nouns import Profile, Timing
from tests.explain.settings import plan_of
from tests.made import make_profile


def timing(low_s: float, median_s: float, high_s: float) -> Timing:
    return Timing(median_s=median_s, low_s=low_s, high_s=high_s, num_samples=9)


def with_forward(profile: Profile, forward: Timing) -> Profile:
    """The same with that forward for every layer."""
    layers = (replace(x, costs=tuple(replace(cost, forward=forward) for cost in x.costs)) for x in profile.layers)
    return replace(profile, layers=tuple(layers))


def test_what_is_drawn_has_the_quartiles_of_the_timing() -> None:
    drawn = 10 + drawn_s([timing(9, 10, 13)], shape=(100_000,), generator=np.random.default_rng(1))
    assert np.quantile(drawn, [0.25, 0.5, 0.75]) == pytest.approx([9, 10, 13], rel=0.005)


def test_nothing_drawn_is_below_no_time() -> None:
    drawn = drawn_s([timing(0.1, 1.0, 1.5)], shape=(10_000,), generator=np.random.default_rng(1))
    assert drawn.min() == -1.0


def test_without_a_spread_both_are_the_predicted_step_and_nothing_is_drawn() -> None:
    profile = make_profile([1.0, 2.0])
    plan = plan_of(profile)
    found = spread_of(plan, profile)
    assert (found.median_s, found.p95_s, found.num_draws) == (plan.prediction.step_s, plan.prediction.step_s, 0)


def test_one_action_has_the_quantiles_of_its_layer() -> None:
    profile = with_forward(make_profile([10.0]), timing(9, 10, 12))
    found = spread_of(plan_of(profile, num_stages=1, num_microbatches=1), profile)
    scale_s, p95 = 2 / NormalDist().inv_cdf(0.75), NormalDist().inv_cdf(0.95)
    assert found.median_s == pytest.approx(30.0, rel=0.01)
    assert found.p95_s == pytest.approx(30.0 + scale_s * p95, rel=0.02)


def test_micro_batches_are_drawn_one_by_one_so_that_their_sum_varies_less() -> None:
    profile = with_forward(make_profile([10.0]), timing(9, 10, 11))
    one, many = (spread_of(plan_of(profile, num_stages=1, num_microbatches=m), profile) for m in (1, 100))
    shares = [x.p95_s / x.median_s - 1 for x in (one, many)]
    assert shares[0] / shares[1] == pytest.approx(10.0, rel=0.15)


def test_stages_that_wait_for_each_other_are_later_than_the_prediction() -> None:
    profile = with_forward(make_profile([10.0, 10.0, 10.0]), timing(8, 10, 12))
    plan = plan_of(profile, num_stages=3, num_microbatches=8)
    found = spread_of(plan, profile)
    assert plan.prediction.step_s < found.median_s < found.p95_s
    assert spread_of(plan, profile) == found != spread_of(plan, profile, seed=1)


@pytest.mark.parametrize(("recompute", "count"), [("never", 0), ("always", 2), ("except-last", 2)])
def test_what_is_recomputed_varies_too(recompute: str, count: int) -> None:
    profile = with_forward(make_profile([1.0, 1.0]), timing(0.9, 1.0, 1.1))
    plan = plan_of(profile, num_stages=1, recompute=recompute)
    assert len(stage_spread(plan, plan.stages[0], profile).recompute) == count


def test_the_optimizer_and_the_loss_vary_on_the_stages_that_have_them() -> None:
    profile = make_profile([1.0, 1.0], weight_bytes=[8, 0], optimizer_s=1.0)
    step = replace(profile.step, optimizer=timing(0.5, 1.0, 2.0))
    loss = replace(profile.layers[0].costs[0], forward=timing(0.5, 1.0, 2.0))
    profile = replace(profile, step=step, loss=(loss,))
    plan = plan_of(profile)
    first, last = (stage_spread(plan, stage, profile) for stage in plan.stages)
    assert (len(first.optimizer), len(last.optimizer), first.optimizer_scale) == (1, 0, 1.0)
    assert (len(first.forward), len(last.forward)) == (0, 1)
