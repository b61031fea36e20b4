"""Ranking of a plan: regret and its noise, rank correlation, errors."""

from __future__ import annotations

import random

import pytest

from gplan.core import Contender, Verification
from gplan.evaluate.verify import rank_correlation, ranking_of, round_noise
from tests.evaluate.hosts import run_of, usual_plan

PLANS = {m: usual_plan(num_microbatches=m) for m in (4, 8)}


def contender(label: str, *steps: float, num_microbatches: int = 8) -> Contender:
    """A plan whose measured steps are these multiples of what it predicts."""
    plan = PLANS[num_microbatches]
    steps_s = tuple(x * plan.prediction.step_s for x in steps)
    return Contender(label=label, run=run_of(plan, sorted(steps)[len(steps) // 2]), steps_s=steps_s)


def verification(*contenders: Contender) -> Verification:
    return Verification(
        engine="torch", contenders=contenders, left_out=(), num_steps=8, created="2000-01-01T00:00:00+00:00"
    )


def test_faster_rival_is_named_with_the_regret() -> None:
    standing = ranking_of(verification(contender("mine", 1.1, 1.12, 1.11), contender("other", 1.0, 1.01, 1.02)))
    assert standing.best == "other"
    assert standing.regret == pytest.approx(0.1, abs=0.002)
    assert not standing.is_within_noise


def test_small_regret_is_within_the_noise() -> None:
    standing = ranking_of(verification(contender("mine", 1.01, 1.08, 0.97), contender("other", 1.0, 0.98, 1.05)))
    assert standing.regret > 0
    assert standing.is_within_noise


def test_common_drift_is_no_noise() -> None:
    standing = ranking_of(verification(contender("mine", 1.1, 1.65, 2.2), contender("other", 1.0, 1.5, 2.0)))
    assert standing.uncertainty == pytest.approx(0.0, abs=1e-6)
    assert not standing.is_within_noise


def test_failed_rival_is_compared_over_its_rounds() -> None:
    mine, short, whole = (
        contender("mine", 1.0, 2.0, 4.0),
        contender("short", 1.1, 2.2),
        contender("whole", 1.2, 2.4, 4.8),
    )
    found = verification(mine, short, whole)
    assert [found.beside(x) for x in found.contenders] == pytest.approx([1.0, 1.1, 1.2])
    standing = ranking_of(found)
    assert (standing.best, standing.regret) == ("mine", 0.0)
    assert standing.uncertainty == pytest.approx(0.0, abs=1e-9)
    alone = ranking_of(verification(mine, short))
    assert alone.uncertainty is None


def test_one_round_has_no_noise_estimate() -> None:
    standing = ranking_of(verification(contender("mine", 2.0), contender("other", 1.0)))
    assert standing.uncertainty is None
    assert standing.is_within_noise


def test_regret_is_within_the_batch() -> None:
    mine, half = contender("mine", 1.0), contender("half", 0.9, num_microbatches=4)
    assert half.measured_s < mine.measured_s
    standing = ranking_of(verification(mine, half))
    assert (standing.best, standing.regret, standing.num_same_batch) == ("mine", 0.0, 1)


def test_uncertainty_covers_equal_plans() -> None:
    chance, num_covered = random.Random(0), 0
    for _ in range(100):
        steps = [[chance.gauss(1.0, 0.03) for _ in range(3)] for _ in range(6)]
        found = ranking_of(verification(*(contender(str(i), *x) for i, x in enumerate(steps[:2]))))
        num_covered += found.is_within_noise
    assert num_covered >= 80


def test_the_noise_found_is_the_noise_put_in() -> None:
    chance = random.Random(1)
    steps = [[round_s * plan_s * (1 + chance.gauss(0, 0.02)) for round_s in range(1, 9)] for plan_s in range(1, 9)]
    assert round_noise(steps) == pytest.approx(0.02, rel=0.25)
    assert round_noise([[1.0, 2.0]]) is None


def test_rank_correlation_extremes() -> None:
    assert rank_correlation([1, 2, 30], [0.1, 5, 6]) == 1.0
    assert rank_correlation([1, 2, 30], [6, 5, 0.1]) == -1.0
    assert rank_correlation([1, 2], [1, 2]) is None


def test_values_that_tie_share_their_rank() -> None:
    assert rank_correlation([1, 1, 2, 2], [1, 2, 3, 4]) == pytest.approx(0.894, abs=1e-3)


def test_errors_of_the_ranking() -> None:
    standing = ranking_of(verification(contender("a", 1.25), contender("b", 0.8), contender("c", 1.0)))
    assert standing.median_error == pytest.approx(0.2)
    assert standing.largest_error == pytest.approx(0.25)
