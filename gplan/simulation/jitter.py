"""The predicted step where actions vary: its expectation and quantiles, and the expected bubble.

A step is the longest of many paths, so it is longer on average than the step of the mean times: a device that is early
waits, one that is late is waited for. Every action gets the plan's time as its mean, and the spread of its stage
(`gplan/cost/stage_spread.py`), drawn from a normal distribution, independently of all other actions. The plan is laid out
with all draws at once. The draws are fixed and stratified: every action gets the same quantiles in an order of its own (a
Latin hypercube). So the same plan always gives the same result, and as the draws of each action have the mean 0 and a
step is a maximum of sums, no spread gives the step of the means, and more spread never gives less. What varies from one
step to the next, such as the speed of the host, is no part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from gplan.core import Action, ActionKind, Floats, Plan, StageCost, StageSeconds, idle_share
from gplan.cost.action_seconds import action_s
from gplan.cost.stage_spread import StageSpread
from gplan.simulation.batch_layout import lay_out_steps
from gplan.simulation.kernel import whole_program
from gplan.simulation.simulator import planned_s, schedule_of, step_and_bubble

NUM_DRAWS = 256
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpread:
    """The predicted step where actions vary."""

    expected_s: float
    median_s: float  # p50
    p95_s: float
    bubble: float  # of the expected length of the micro-batch loop
    num_draws: int  # 0: nothing varies


def step_spread(plan: Plan, spreads: Sequence[StageSpread]) -> StepSpread:
    """The plan's step with these spreads of its stages; O(K M) operations on arrays of the draws."""
    schedule, costs = schedule_of(plan), plan.stage_costs
    program = whole_program(schedule, plan.recompute)
    variances = [_variances(cost, spread) for cost, spread in zip(costs, spreads, strict=True)]
    by_key = [math.sqrt(action_s(key, variances[key.stage])) for key in program.durations]
    deviations = {
        **{x: by_key[entry.duration] for x, entry in zip(program.actions, program.entries, strict=True)},
        **{Action(i, ActionKind.OPTIMIZER, 0): math.sqrt(x.optimizer_s) for i, x in enumerate(variances)},
    }
    if not any(deviations.values()):
        step_s, bubble = step_and_bubble(schedule, costs, recompute=plan.recompute)
        return StepSpread(expected_s=step_s, median_s=step_s, p95_s=step_s, bubble=bubble, num_draws=0)
    draws = normal_draws(len(deviations), NUM_DRAWS)
    added = {x: deviation_s * draw for (x, deviation_s), draw in zip(deviations.items(), draws, strict=True)}
    steps = lay_out_steps(plan, num_steps=NUM_DRAWS, added_s=added.__getitem__)
    busy_s = math.fsum(map(planned_s(schedule, costs, plan.recompute), program.actions))
    median_s, p95_s = np.quantile(steps.step_s, [0.5, 0.95]).tolist()
    return StepSpread(
        expected_s=float(steps.step_s.mean()),
        median_s=median_s,
        p95_s=p95_s,
        bubble=idle_share(busy_s, plan.num_devices * float(steps.loop_s.mean())),
        num_draws=NUM_DRAWS,
    )


def normal_draws(num_rows: int, num_draws: int) -> Floats:
    """[rows, draws]: of each row the same quantiles of a normal distribution in an order of its own; mean 0, variance 1."""
    rows = np.broadcast_to(_quantiles(num_draws), (num_rows, num_draws))
    found: Floats = np.random.default_rng(_SEED).permuted(rows, axis=1)
    return found


@lru_cache(maxsize=4)
def _quantiles(num_draws: int) -> Floats:
    middles = np.array([NormalDist().inv_cdf((i + 0.5) / num_draws) for i in range(num_draws)])
    symmetric = (middles - middles[::-1]) / 2  # to the last bit
    found: Floats = symmetric / symmetric.std()
    return found


def _variances(cost: StageCost, spread: StageSpread) -> StageSeconds[float]:
    """The variance of each pass in squared seconds; those of independent parts add up as their seconds do (`action_s`)."""

    def variance(seconds: float | None, share: float) -> float:
        return ((seconds or 0.0) * share) ** 2

    return StageSeconds(
        forward_s=variance(cost.forward_s, spread.forward),
        backward_s=variance(cost.backward_s, spread.backward),
        recompute_s=variance(cost.recompute_s, spread.recompute),
        optimizer_s=variance(cost.optimizer_s, spread.optimizer),
        activation_s=0.0,
        gradient_s=0.0,
        input_gradient_s=variance(cost.input_gradient_s, spread.input_gradient),
        weight_gradient_s=variance(cost.weight_gradient_s, spread.weight_gradient),
    )
