"""p50 and p95 of the step, from known quartiles."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from gplan.core import ActionKind, Profile, Timing
from gplan.evaluate.explain.jitter import (
    sample_deviations_s,
    sample_steps_s,
    sampled_actions,
    stage_timings,
    step_spread,
)
from tests.evaluate.explain.settings import plan_of
from tests.made import make_profile
from tests.scheduled import EVERY_SCHEDULE, OWN, num_stages, scheduled_plan


def timing(low_s: float, median_s: float, high_s: float) -> Timing:
    return Timing(median_s=median_s, low_s=low_s, high_s=high_s, num_samples=9)


def with_forward(profile: Profile, forward: Timing) -> Profile:
    """The same with that forward for every layer."""
    layers = (replace(x, costs=tuple(replace(cost, forward=forward) for cost in x.costs)) for x in profile.layers)
    return replace(profile, layers=tuple(layers))


def test_draws_have_the_quartiles_and_mean_zero() -> None:
    drawn = sample_deviations_s([timing(9, 10, 13)], shape=(100_000,), generator=np.random.default_rng(1))
    low, middle, high = np.quantile(drawn, [0.25, 0.5, 0.75])
    assert (middle - low, high - middle) == pytest.approx((1, 3), abs=0.05)
    assert drawn.mean() == pytest.approx(0.0, abs=0.02)


def test_nothing_drawn_is_below_no_time() -> None:
    drawn = sample_deviations_s([timing(0.1, 1.0, 1.5)], shape=(10_000,), generator=np.random.default_rng(1))
    assert drawn.min() == -1.0


def test_no_variation_draws_nothing() -> None:
    profile = make_profile([1.0, 2.0])
    plan = plan_of(profile)
    found = step_spread(plan, profile)
    assert (found.median_s, found.p95_s, found.num_draws) == (plan.prediction.step_s, plan.prediction.step_s, 0)


def test_one_action_has_the_quantiles_of_its_layer() -> None:
    profile = with_forward(make_profile([10.0]), timing(9, 10, 12))
    found = step_spread(plan_of(profile, num_stages=1, num_microbatches=1), profile)
    scale_s, p95 = 2 / NormalDist().inv_cdf(0.75), NormalDist().inv_cdf(0.95)
    middle_s = 30.0 - (scale_s - scale_s / 2) / math.sqrt(2 * math.pi)  # the mean is 30
    assert found.median_s == pytest.approx(middle_s, rel=0.01)
    assert found.p95_s == pytest.approx(middle_s + scale_s * p95, rel=0.02)


def test_microbatches_vary_independently() -> None:
    profile = with_forward(make_profile([10.0]), timing(9, 10, 11))
    one, many = (step_spread(plan_of(profile, num_stages=1, num_microbatches=m), profile) for m in (1, 100))
    shares = [x.p95_s / x.median_s - 1 for x in (one, many)]
    assert shares[0] / shares[1] == pytest.approx(10.0, rel=0.15)


def test_jitter_lengthens_the_step() -> None:
    profile = with_forward(make_profile([10.0, 10.0, 10.0]), timing(8, 10, 12))
    plan = plan_of(profile, num_stages=3, num_microbatches=8)
    found = step_spread(plan, profile)
    assert plan.prediction.step_s < found.median_s < found.p95_s
    assert step_spread(plan, profile) == found != step_spread(plan, profile, seed=1)


@pytest.mark.parametrize(("recompute", "count"), [("never", 0), ("always", 2), ("except-last", 2)])
def test_recompute_varies(recompute: str, count: int) -> None:
    profile = with_forward(make_profile([1.0, 1.0]), timing(0.9, 1.0, 1.1))
    plan = plan_of(profile, num_stages=1, recompute=recompute)
    assert len(stage_timings(plan, plan.stages[0], profile).recompute) == count


def test_optimizer_and_loss_vary() -> None:
    profile = make_profile([1.0, 1.0], weight_bytes=[8, 0], optimizer_s=1.0)
    step = replace(profile.step, optimizer=timing(0.5, 1.0, 2.0))
    loss = replace(profile.layers[0].costs[0], forward=timing(0.5, 1.0, 2.0))
    profile = replace(profile, step=step, loss=(loss,))
    plan = plan_of(profile)
    first, last = (stage_timings(plan, stage, profile) for stage in plan.stages)
    assert (*(len(x.kinds[ActionKind.OPTIMIZER]) for x in (first, last)), first.optimizer_scale) == (1, 0, 1.0)
    assert [len(x.kinds[ActionKind.FORWARD]) for x in (first, last)] == [0, 1]


def with_halves(profile: Profile, *, input_gradient: Timing, weight_gradient: Timing, backward: Timing) -> Profile:
    halves = {"input_gradient": input_gradient, "weight_gradient": weight_gradient, "backward": backward}
    layers = (replace(x, costs=tuple(replace(cost, **halves) for cost in x.costs)) for x in profile.layers)
    return replace(profile, layers=tuple(layers))


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_exact_times_give_the_prediction(schedule: str) -> None:
    profile, plan = make_profile([1.0] * num_stages(schedule)), scheduled_plan(schedule)
    stages = [stage_timings(plan, stage, profile) for stage in plan.stages]
    drawn = sample_steps_s(plan, stages, num_draws=3, generator=np.random.default_rng(1))
    assert drawn.tolist() == pytest.approx([plan.prediction.step_s] * 3)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", OWN])
def test_each_half_of_a_backward_varies_by_itself(schedule: str) -> None:
    steady = make_profile([1.0] * num_stages(schedule))
    plan = scheduled_plan(schedule, transfer_s=0.0)
    exact, loose = Timing.exactly(1.0), timing(0.9, 1.0, 1.1)
    for halves, varies in (
        ({"input_gradient": loose, "weight_gradient": exact}, ActionKind.INPUT_GRADIENT),
        ({"input_gradient": exact, "weight_gradient": loose}, ActionKind.WEIGHT_GRADIENT),
    ):
        profile = with_halves(steady, **halves, backward=exact)
        found = {kind for x in plan.stages for kind, y in stage_timings(plan, x, profile).kinds.items() if y}
        assert found == {varies}
        spread = step_spread(plan, profile)
        assert spread.num_draws > 0
        assert spread.p95_s > spread.median_s or schedule == OWN  # where other actions hide it


def test_first_stage_second_half_is_the_whole_backward() -> None:
    loose, exact = timing(0.9, 1.0, 1.1), Timing.exactly(1.0)
    profile = with_halves(make_profile([1.0, 1.0]), input_gradient=loose, weight_gradient=loose, backward=exact)
    plan = scheduled_plan("zb-h1")
    first, second = (stage_timings(plan, stage, profile) for stage in plan.stages)
    halves = (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
    assert [len(first.kinds[x]) for x in halves] == [0, 0]
    assert [len(second.kinds[x]) for x in halves] == [1, 1]
    whole = with_halves(make_profile([1.0, 1.0]), input_gradient=exact, weight_gradient=exact, backward=loose)
    assert [len(stage_timings(plan, plan.stages[0], whole).kinds[x]) for x in halves] == [0, 1]


def test_unknown_halves_vary_in_the_first_half() -> None:
    loss = replace(make_profile([1.0]).layers[0].costs[0], backward=timing(0.9, 1.0, 1.1))
    profile = replace(
        with_halves(
            make_profile([1.0, 1.0]), input_gradient=Timing.exactly(1.0), weight_gradient=Timing.exactly(1.0),
            backward=Timing.exactly(1.0),
        ),
        loss=(loss,),
    )  # fmt: skip
    plan = scheduled_plan("zb-h1")
    kinds = stage_timings(plan, plan.stages[1], profile).kinds
    assert {kind for kind, timings in kinds.items() if timings} == {ActionKind.INPUT_GRADIENT}


def test_a_recompute_is_drawn_where_it_runs() -> None:
    """One micro-batch on two equal stages: the second's first half and the first's second half run it."""
    profile = with_forward(make_profile([1.0, 1.0]), timing(0.5, 1.0, 1.5))
    profile = with_halves(
        profile, input_gradient=Timing.exactly(1.0), weight_gradient=Timing.exactly(1.0), backward=Timing.exactly(1.0)
    )
    plan = scheduled_plan("zb-h1", num_microbatches=1, recompute="always")
    stages = [stage_timings(plan, stage, profile) for stage in plan.stages]
    for stage, kind in zip(stages, (ActionKind.WEIGHT_GRADIENT, ActionKind.INPUT_GRADIENT), strict=True):
        added = dict(sampled_actions(plan, stage, 5, np.random.default_rng(1)))
        varying = {action.kind for action, seconds in added.items() if np.any(seconds)}
        assert varying == {ActionKind.FORWARD, kind}
