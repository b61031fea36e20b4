"""How the step varies: all action times are drawn at random, and the plan is laid out with each draw.

A layer's time is drawn from two half-normals with the profile's quartiles, shifted to the profile's time as their mean,
and cut off at 0; each half of a split backward has its own quartiles. Layers, passes and micro-batches are drawn
independently. Variation that slows a whole step (clock rate, other work) and of links is not in a profile and not drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gplan.core import Action, ActionKind, LayerCost, Plan, Profile, Stage, Timing, runs_forward_again
from gplan.core.interpolation import cost_at
from gplan.evaluate.explain.batch_layout import Floats, steps_s
from gplan.evaluate.explain.explanation import Spread
from gplan.simulation.simulator import schedule_of

SEED = 0
_MOST_DRAWS, _LEAST_DRAWS = 1000, 60
_MOST_NUMBERS = 50_000_000  # drawn in all, about two seconds
_QUARTILE = 0.6744897501960817  # of the standard normal
_MEAN_ABOVE = 1.0 / np.sqrt(2.0 * np.pi) / _QUARTILE  # of the draws above 0, where all others are 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimings:
    """The timings of a stage that vary, and the plan's seconds for one second of them."""

    stage: int
    kinds: Mapping[ActionKind, tuple[Timing, ...]]  # of the kinds of action that the stage has, without recompute
    recompute: tuple[Timing, ...]
    scale: float  # contention over the device's speed
    optimizer_scale: float  # the stage's share of the optimizer

    @property
    def num_timings(self) -> int:
        """How many timings vary."""
        return len(self.recompute) + sum(map(len, self.kinds.values()))


def step_spread(plan: Plan, profile: Profile, *, seed: int = SEED) -> Spread:
    """p50 and p95 of the plan's step; the profile is in the plan's order. O(draws M L)."""
    stages = [stage_timings(plan, stage, profile) for stage in plan.stages]
    num_timings = sum(stage.num_timings for stage in stages)
    if num_timings == 0:
        step_s = plan.prediction.step_s
        return Spread(median_s=step_s, p95_s=step_s, num_draws=0, seed=seed)
    num_draws = _MOST_NUMBERS // (num_timings * plan.num_microbatches)
    num_draws = max(_LEAST_DRAWS, min(_MOST_DRAWS, num_draws))
    steps = sample_steps_s(plan, stages, num_draws=num_draws, generator=np.random.default_rng(seed))
    median_s, p95_s = np.quantile(steps, [0.5, 0.95])
    return Spread(median_s=float(median_s), p95_s=float(p95_s), num_draws=num_draws, seed=seed)


def stage_timings(plan: Plan, stage: Stage, profile: Profile) -> StageTimings:
    """The varying timings of a stage at the plan's micro-batch size."""
    layers = profile.layers[stage.first_layer : stage.end_layer]
    costs = [cost_at(layer.costs, plan.microbatch_size) for layer in layers]
    loss = [cost_at(profile.loss, plan.microbatch_size)] if profile.loss and stage is plan.stages[-1] else []
    again = [x for x, layer in zip(costs, layers, strict=True) if _recomputes(plan, stage, layer.name)]
    update, update_s = (profile.step.optimizer, profile.step.zero_grad), profile.step.update_s
    occurring = {x.kind for x in _actions_of(plan, stage.index)}
    kinds = {kind: _varying(_timings((*costs, *loss), kind, stage.index)) for kind in sorted(occurring)}
    return StageTimings(
        stage=stage.index,
        kinds={**kinds, ActionKind.OPTIMIZER: _varying(update if stage.cost.optimizer_s else ())},
        recompute=_varying(x.recompute or x.forward for x in again),
        scale=_contention(plan, stage) / (stage.machine_device.speed if stage.machine_device else 1.0),
        optimizer_scale=plan.stage_costs[stage.index].optimizer_s / update_s if update_s else 0.0,
    )


def _contention(plan: Plan, stage: Stage) -> float:
    """How many times longer the stage's layers take beside the other devices."""
    alone_s = sum(stage.layer_forward_s) + sum(stage.layer_backward_s)
    return sum(map(sum, plan.layer_times_s(stage))) / alone_s if alone_s else 1.0


def _timings(costs: Iterable[LayerCost], kind: ActionKind, stage: int) -> Iterator[Timing]:
    """The timings that add up to an action; of the first stage, W is the whole backward and I is empty."""
    for cost in costs:
        first = None if cost.input_gradient is None and cost.weight_gradient else cost.input_gradient or cost.backward
        is_first = stage == 0
        found = {
            ActionKind.FORWARD: cost.forward,
            ActionKind.BACKWARD: cost.backward,
            ActionKind.INPUT_GRADIENT: None if is_first else first,
            ActionKind.WEIGHT_GRADIENT: cost.backward if is_first else cost.weight_gradient,
        }[kind]
        if found is not None:
            yield found


def sample_steps_s(
    plan: Plan, stages: Iterable[StageTimings], *, num_draws: int, generator: np.random.Generator
) -> Floats:
    """[num_draws]: the seconds of the plan's step in each draw."""
    added = {
        action: added_s for stage in stages for action, added_s in sampled_actions(plan, stage, num_draws, generator)
    }
    return steps_s(plan, num_steps=num_draws, added_s=lambda action: added[action])


def sample_deviations_s(timings: Iterable[Timing], *, shape: tuple[int, ...], generator: np.random.Generator) -> Floats:
    """The sum of the timings, each drawn independently, minus their means."""
    total = np.zeros(shape)
    for timing in timings:
        normal = generator.standard_normal(shape) / _QUARTILE
        below_s, above_s = timing.median_s - timing.low_s, timing.high_s - timing.median_s
        drawn = np.where(normal < 0, below_s, above_s) * normal - (above_s - below_s) * _MEAN_ABOVE
        total += np.maximum(drawn, -timing.median_s)
    return total


def sampled_actions(
    plan: Plan, stage: StageTimings, num_draws: int, generator: np.random.Generator
) -> Iterator[tuple[Action, Floats]]:
    """Every action of the stage, with the seconds that each draw adds to it."""
    shape = (plan.num_microbatches, num_draws)
    kinds: dict[ActionKind, Floats] = {
        kind: stage.scale * sample_deviations_s(timings, shape=shape, generator=generator)
        for kind, timings in stage.kinds.items()
        if kind is not ActionKind.OPTIMIZER
    }
    again = stage.scale * sample_deviations_s(stage.recompute, shape=shape, generator=generator)
    for action in _actions_of(plan, stage.stage):
        added = kinds[action.kind][action.microbatch]
        if runs_forward_again(action, num_microbatches=plan.num_microbatches, recompute=plan.recompute):
            added = added + again[action.microbatch]
        yield action, added
    update = sample_deviations_s(stage.kinds[ActionKind.OPTIMIZER], shape=(num_draws,), generator=generator)
    yield Action(stage.stage, ActionKind.OPTIMIZER, 0), stage.optimizer_scale * update


def _actions_of(plan: Plan, stage: int) -> list[Action]:
    """The forwards and backwards of one stage, in its device's order."""
    return [x for x in schedule_of(plan).orders[plan.devices[stage]] if x.stage == stage]


def _varying(timings: Iterable[Timing]) -> tuple[Timing, ...]:
    return tuple(x for x in timings if x.low_s < x.high_s)


def _recomputes(plan: Plan, stage: Stage, layer: str) -> bool:
    """Whether the stage recomputes that layer for some micro-batch."""
    if plan.recompute == "selected":
        return layer in stage.recompute_layers
    return plan.recompute != "never"
