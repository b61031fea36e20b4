"""The step where actions vary, against laws, a large Monte-Carlo, and itself with more or less spread."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest

from gplan.core import ActionKind, Plan
from gplan.cost.stage_spread import StageSpread
from gplan.simulation import jitter
from gplan.simulation.jitter import StepSpread, normal_draws, step_spread
from gplan.simulation.simulator import simulate
from tests.scheduled import EVERY_SCHEDULE, scheduled_plan

NONE = StageSpread()
KINDS = tuple(x.name for x in fields(StageSpread))


def spread_alike(plan: Plan, share: float, *kinds: str) -> StepSpread:
    """The step where these kinds of action, by default all, have this spread on every stage."""
    return step_spread(plan, [StageSpread(**dict.fromkeys(kinds or KINDS, share))] * plan.num_stages)


def test_draws_are_the_same_quantiles_in_other_orders() -> None:
    draws = normal_draws(50, 256)
    assert np.array_equal(np.sort(draws, axis=1), np.tile(np.sort(draws[0]), (50, 1)))
    assert np.abs(draws.mean(axis=1)).max() < 1e-12
    assert draws.std(axis=1) == pytest.approx(np.ones(50))
    assert np.quantile(draws[0], 0.95) == pytest.approx(NormalDist().inv_cdf(0.95), rel=0.02)
    others = np.corrcoef(draws)[~np.eye(50, dtype=bool)]
    assert np.abs(others).max() < 5 / math.sqrt(256)
    assert others.mean() == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
@pytest.mark.parametrize("recompute", ["never", "except-last"])
def test_without_spread_it_is_the_step(schedule: str, recompute: str) -> None:
    plan = scheduled_plan(schedule, recompute=recompute)  # type: ignore[arg-type]
    found, timeline = spread_alike(plan, 0.0), simulate(plan)
    assert (found.expected_s, found.median_s, found.p95_s, found.num_draws) == (*[timeline.step_s] * 3, 0)
    assert found.bubble == pytest.approx(timeline.bubble)
    nearly = spread_alike(plan, 1e-12)
    assert (nearly.expected_s, nearly.p95_s) == pytest.approx((timeline.step_s, timeline.step_s))
    assert nearly.bubble == pytest.approx(timeline.bubble)


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_more_spread_is_never_a_shorter_step(schedule: str) -> None:
    plan = scheduled_plan(schedule, num_microbatches=2 if schedule.startswith("custom") else 4, recompute="except-last")
    found = [spread_alike(plan, share) for share in (0.0, 0.01, 0.03, 0.1, 0.3)]
    for less, more in pairwise(found):
        assert more.expected_s >= less.expected_s * (1 - 1e-12)
        assert more.bubble >= less.bubble - 1e-12
        assert more.p95_s > less.p95_s


def test_one_device_has_the_sum_of_its_actions() -> None:
    plan = scheduled_plan("gpipe", num_devices=1, num_microbatches=9, transfer_s=0.0)
    found = spread_alike(plan, 0.1, "forward", "backward")
    deviation_s = math.sqrt(9 * 0.1**2 + 9 * 0.2**2)
    assert (found.expected_s, found.bubble) == pytest.approx((27.1, 0.0))
    assert found.median_s == pytest.approx(27.1, abs=0.1)
    assert found.p95_s - 27.1 == pytest.approx(deviation_s * NormalDist().inv_cdf(0.95), rel=0.1)


def test_two_equal_stages_wait_for_the_later_of_two() -> None:
    """F1 of stage 1 begins when both F1 of stage 0 and its own F0 are done, in the mean sigma / sqrt(pi) late."""
    plan = scheduled_plan("gpipe", times_s=(1.0,), transfer_s=0.0)
    found = spread_alike(plan, 0.1, "forward")
    assert found.expected_s - simulate(plan).step_s == pytest.approx(0.1 / math.sqrt(math.pi), rel=0.05)


def test_it_agrees_with_a_large_monte_carlo() -> None:
    """GPipe on two unequal stages with transfers, laid out here by hand, with draws of its own."""
    num_microbatches, num_draws, share = 6, 40_000, 0.15
    plan = scheduled_plan("gpipe", num_microbatches=num_microbatches, times_s=(1.0, 1.05), transfer_s=0.05)
    chance = np.random.default_rng(7)

    def drawn(mean_s: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return chance.normal(mean_s, share * mean_s, (num_microbatches, num_draws))

    costs = [stage.cost for stage in plan.stages]
    forwards, backwards = ([drawn(seconds) for seconds in x] for x in (
        [cost.forward_s for cost in costs], [cost.backward_s for cost in costs]
    ))  # fmt: skip
    first = second = np.zeros(num_draws)
    for i in range(num_microbatches):
        first = first + forwards[0][i]
        second = np.maximum(second, first + costs[0].activation_s) + forwards[1][i]
    for i in range(num_microbatches):
        second = second + backwards[1][i]
        first = np.maximum(first, second + costs[0].gradient_s) + backwards[0][i]
    steps_s = np.maximum(first, second) + 0.1  # the update of each stage
    found = spread_alike(plan, share, "forward", "backward")
    error = steps_s.std() * (1 / math.sqrt(num_draws) + 1 / math.sqrt(found.num_draws))
    assert found.expected_s > simulate(plan).step_s + 5 * error
    assert found.expected_s == pytest.approx(steps_s.mean(), abs=error)
    assert found.median_s == pytest.approx(np.median(steps_s), abs=4 * error)
    assert found.p95_s == pytest.approx(np.quantile(steps_s, 0.95), abs=5 * error)


def test_the_same_plan_gives_the_same_numbers() -> None:
    plan = scheduled_plan("1f1b", num_microbatches=4)
    assert spread_alike(plan, 0.1) == spread_alike(plan, 0.1)


def test_the_plan_is_laid_out_once_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, lay_out = list[int](), jitter.lay_out_steps
    monkeypatch.setattr(
        jitter, "lay_out_steps", lambda plan, **given: calls.append(given["num_steps"]) or lay_out(plan, **given)
    )
    spread_alike(scheduled_plan("1f1b", num_devices=4, num_microbatches=16), 0.1)
    assert calls == [jitter.NUM_DRAWS]


def test_micro_batches_average_out() -> None:
    one, many = (
        spread_alike(scheduled_plan("gpipe", num_devices=1, num_microbatches=m, transfer_s=0.0), 0.1, "forward")
        for m in (1, 100)
    )
    shares = [(x.p95_s - x.median_s) / (x.expected_s - 0.1) for x in (one, many)]
    assert shares[0] / shares[1] == pytest.approx(10.0, rel=0.15)


@pytest.mark.parametrize(
    ("schedule", "recompute", "kinds"),
    [
        ("gpipe", "never", {"forward", "backward", "optimizer"}),
        ("gpipe", "always", {"forward", "backward", "recompute", "optimizer"}),
        ("zb-h1", "never", {"forward", "backward", "input_gradient", "weight_gradient", "optimizer"}),
    ],
)
def test_what_runs_varies(schedule: str, recompute: str, kinds: set[str]) -> None:
    """With halves, the first stage's second half is its whole backward."""
    plan = scheduled_plan(schedule, recompute=recompute, transfer_s=0.0)  # type: ignore[arg-type]
    assert {kind for kind in KINDS if spread_alike(plan, 0.1, kind).num_draws} == kinds


def test_first_stage_has_no_first_half() -> None:
    plan = scheduled_plan("zb-h1")
    loose = StageSpread(input_gradient=0.1, weight_gradient=0.1)
    assert step_spread(plan, [loose, NONE]).num_draws == 0
    assert step_spread(plan, [NONE, loose]).num_draws > 0


def test_unknown_halves_are_not_needed_where_backwards_are_whole() -> None:
    plan = scheduled_plan("1f1b")
    whole = [replace(x, cost=replace(x.cost, input_gradient_s=None, weight_gradient_s=None)) for x in plan.stages]
    assert spread_alike(replace(plan, stages=tuple(whole)), 0.1) == spread_alike(plan, 0.1)


def test_updates_vary() -> None:
    plan = scheduled_plan("1f1b")
    assert {x.action.kind for x in simulate(plan).spans} >= {ActionKind.OPTIMIZER}
    found = spread_alike(plan, 0.1, "optimizer")
    assert found.p95_s > found.median_s
    assert found.bubble == pytest.approx(simulate(plan).bubble)
