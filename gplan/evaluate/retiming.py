"""A profile scaled to the stage times of a run, so that a new plan needs no new profiling.

A run times stages, not layers, so all layers of a stage get one factor for the forward and one for the backward:

    factor = (measured - overhead) / (predicted - overhead)

with the overhead of a stage beside its layers, lowered where a stage took less than twice of it. Proportions within a
stage, bytes and the link stay as profiled: exact at the plan's cuts, an estimate elsewhere. "Predicted" is by the given
profile; only for a plan on different devices, whose speeds are in no other place, it is the plan's own prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gplan.core import (
    BACKWARD_KINDS,
    ActionKind,
    Layer,
    LayerCost,
    Plan,
    Profile,
    Run,
    Stage,
    StepCost,
    Timeline,
    WholeModel,
    is_recomputed,
)
from gplan.core.errors import FileError
from gplan.core.units import now_text
from gplan.evaluate.replanning import profile_in_plan_order, reprice, why_not_replannable
from gplan.simulation.simulator import simulate

_MOST_OVERHEAD = 0.5  # of the shortest action


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The measured over the profiled times of a stage's layers."""

    forward: float
    backward: float
    recomputes: bool  # whether the measured backwards ran their forward again


def retime_profile(profile: Profile, *, run: Run) -> Profile:
    """The profile of the run's plan, scaled to the run's times; raises FileError for another model's profile."""
    plan = run.plan
    predicted = _predicted(profile, plan)
    timeline = simulate(predicted)
    shortest_s = min(_shortest_s(run, timeline, stage) for stage in predicted.stages)
    overhead_s = min(profile.overhead_s, _MOST_OVERHEAD * shortest_s)
    factors = [_factors(predicted, timeline, stage, run, profile.overhead_s, overhead_s) for stage in predicted.stages]
    scaled = replace(
        profile,
        layers=_layers(profile, plan, factors),
        loss=tuple(_scaled(cost, factors[-1]) for cost in profile.loss),
        step=_step(profile.step, run, predicted),
        overhead_s=overhead_s,
        created=now_text(),
        notes=(*profile.notes, _note(factors, run)),
        host_load=run.host_load,
    )
    return replace(scaled, whole_model=_rescaled_whole_model(profile, scaled))


def _rescaled_whole_model(before: Profile, after: Profile) -> tuple[WholeModel, ...]:
    """The whole model's times, scaled as the sum of its layers was, so that the two remain comparable."""
    rescaled = []
    for i, whole in enumerate(before.whole_model):
        forward, backward = (
            b / a if a else 1.0 for a, b in zip(before.one_stage_s(i), after.one_stage_s(i), strict=True)
        )
        rescaled.append(
            replace(whole, forward=whole.forward.corrected(forward), backward=whole.backward.corrected(backward))
        )
    return tuple(rescaled)


def _predicted(profile: Profile, plan: Plan) -> Plan:
    """The plan with the profile's costs; raises FileError where the two do not belong together."""
    profile_in_plan_order(plan, profile)
    return plan if why_not_replannable(plan) else reprice(plan, profile, engine="torch")


def _measured_s(run: Run, stage: Stage) -> tuple[float, float]:
    """The measured means of a stage's forwards and of its backwards, whole or both halves together."""
    forward_s = run.timeline.mean_s(ActionKind.FORWARD, stage=stage.index)
    backward_s = run.timeline.mean_s(*BACKWARD_KINDS, stage=stage.index)
    if not forward_s or not backward_s:
        raise FileError(
            f"stage {stage.index} took no time in the run; expected operations or kernels in its actions: record "
            "with ProfilerActivity.CPU, on a GPU with ProfilerActivity.CUDA too"
        )
    return forward_s, backward_s


def _shortest_s(run: Run, timeline: Timeline, stage: Stage) -> float:
    """The shorter of a stage's mean forward and mean backward; of a backward in halves, of the mean half."""
    forward_s, backward_s = _measured_s(run, stage)
    return min(forward_s, backward_s / max(1.0, timeline.actions_per_microbatch(*BACKWARD_KINDS, stage=stage.index)))


def _factors(
    predicted: Plan, timeline: Timeline, stage: Stage, run: Run, predicted_overhead_s: float, overhead_s: float
) -> Factors:
    """`timeline` is the simulated step of `predicted`."""
    plan, cost = run.plan, predicted.stage_costs[stage.index]
    forward_s, backward_s = _measured_s(run, stage)
    predicted_s = timeline.mean_s(*BACKWARD_KINDS, stage=stage.index)
    num_calls = timeline.actions_per_microbatch(*BACKWARD_KINDS, stage=stage.index)
    return Factors(
        forward=_factor(forward_s - overhead_s, cost.forward_s - predicted_overhead_s),
        backward=_factor(backward_s - num_calls * overhead_s, predicted_s - num_calls * predicted_overhead_s),
        recomputes=is_recomputed(0, num_microbatches=plan.num_microbatches, recompute=plan.recompute),
    )


def _factor(measured_s: float, predicted_s: float) -> float:
    return max(0.0, measured_s) / predicted_s if predicted_s > 0 else 1.0


def _layers(profile: Profile, plan: Plan, factors: Sequence[Factors]) -> tuple[Layer, ...]:
    """The scaled layers; those that share their figures still do so where they are on one stage."""
    stage_of = {name: stage.index for stage in plan.stages for name in stage.layer_names}
    stages = [stage_of[layer.name] for layer in profile.layers]
    return tuple(
        replace(
            layer,
            costs=tuple(_scaled(cost, factors[stage]) for cost in layer.costs),
            same_as=layer.same_as if layer.same_as is not None and stages[layer.same_as] == stage else None,
        )
        for layer, stage in zip(profile.layers, stages, strict=True)
    )


def _scaled(cost: LayerCost, by: Factors) -> LayerCost:
    again = by.backward if by.recomputes else by.forward
    return cost.corrected(forward=by.forward, backward=by.backward, recompute=again)


def _step(step: StepCost, run: Run, predicted: Plan) -> StepCost:
    """The optimizer's times, scaled if the run measured it without all-reduces of replicas."""
    measured_s = sum(map(run.timeline.update_s, range(run.plan.num_devices)))
    predicted_s = sum(cost.optimizer_s for cost in predicted.stage_costs)
    if not measured_s or not predicted_s or run.plan.num_replicas > 1:
        return step
    return step.corrected(measured_s / predicted_s)


def _note(factors: Sequence[Factors], run: Run) -> str:
    factors_text = ", ".join(f"stage {i} x{x.forward:.2f} and x{x.backward:.2f}" for i, x in enumerate(factors))
    return (
        f"times scaled stage by stage (forward, backward) to what {run.num_counted} steps of a run measured with "
        f"micro-batches of {run.plan.microbatch_size}: {factors_text}; within a stage the layers' proportions are as profiled"
    )
