"""A profile scaled to the stage times of a run, so that a new plan needs no new profiling.

A run times stages, not layers, so all layers of a stage get one factor for the forward and one for the backward:

    factor = (measured - overhead) / (predicted - overhead)

with the overhead of a stage beside its layers, lowered where a stage took less than twice of it. Proportions within a
stage, bytes and the link stay as profiled: exact at the plan's cuts, an estimate elsewhere. "Predicted" is by the given
profile; only for a plan on different devices, whose speeds are in no other place, it is the plan's own prediction.
"""

from __future__ import annotations

from dataclasses import replace

from gplan.core import BACKWARD_KINDS, ActionKind, LayerCost, Plan, Profile, Run, is_recomputed
from gplan.core.errors import FileError
from gplan.core.units import now_text
from gplan.evaluate.replanning import profile_in_plan_order, reprice, why_not_replannable
from gplan.simulation.simulator import simulate

_MOST_OVERHEAD = 0.5  # of the shortest action


def retime_profile(profile: Profile, *, run: Run) -> Profile:
    """The profile of the run's plan, scaled to the run's times; raises FileError for another model's profile."""
    plan = run.plan
    profile_in_plan_order(plan, profile)
    predicted = plan if why_not_replannable(plan) else reprice(plan, profile, engine="torch")
    factors, overhead_s = _factors_of_stages(profile, predicted, run)
    stage_of = {name: stage.index for stage in plan.stages for name in stage.layer_names}
    stages = [stage_of[layer.name] for layer in profile.layers]
    recomputes = is_recomputed(0, num_microbatches=plan.num_microbatches, recompute=plan.recompute)

    def scaled(costs: tuple[LayerCost, ...], stage: int) -> tuple[LayerCost, ...]:
        forward, backward = factors[stage]
        again = backward if recomputes else forward  # the measured backwards ran their forward again
        return tuple(x.corrected(forward=forward, backward=backward, recompute=again) for x in costs)

    layers = tuple(
        replace(
            layer,
            costs=scaled(layer.costs, stage),
            same_as=layer.same_as if layer.same_as is not None and stages[layer.same_as] == stage else None,
        )
        for layer, stage in zip(profile.layers, stages, strict=True)
    )
    measured_s = sum(map(run.timeline.update_s, range(plan.num_devices)))
    predicted_s = sum(cost.optimizer_s for cost in predicted.stage_costs)
    has_update = measured_s > 0 and predicted_s > 0 and plan.num_replicas == 1  # replicas reduce gradients in it
    factors_text = ", ".join(f"stage {i} x{x:.2f} and x{y:.2f}" for i, (x, y) in enumerate(factors))
    note = (
        f"times scaled stage by stage (forward, backward) to what {run.num_counted} steps of a run measured with "
        f"micro-batches of {plan.microbatch_size}: {factors_text}; within a stage the layers' proportions are as profiled"
    )
    return replace(
        profile,
        layers=layers,
        loss=scaled(profile.loss, -1),
        step=profile.step.corrected(measured_s / predicted_s) if has_update else profile.step,
        overhead_s=overhead_s,
        whole_model=(),  # it was not measured in one piece at these times
        created=now_text(),
        notes=(*profile.notes, note),
        host_load=run.host_load,
    )


def _factors_of_stages(profile: Profile, predicted: Plan, run: Run) -> tuple[list[tuple[float, float]], float]:
    """The factors of forwards and backwards of each stage of the plan with the profile's costs, and the overhead of a stage
    beside its layers."""
    timeline = simulate(predicted)
    means = []
    for stage in predicted.stages:
        forward_s = run.timeline.mean_s(ActionKind.FORWARD, stage=stage.index)
        backward_s = run.timeline.mean_s(*BACKWARD_KINDS, stage=stage.index)
        if not forward_s or not backward_s:
            raise FileError(
                f"stage {stage.index} took no time in the run; expected operations or kernels in its actions: record "
                "with ProfilerActivity.CPU, on a GPU with ProfilerActivity.CUDA too"
            )
        means.append((forward_s, backward_s, timeline.actions_per_microbatch(*BACKWARD_KINDS, stage=stage.index)))
    shortest_s = min(min(forward_s, backward_s / max(1.0, num_calls)) for forward_s, backward_s, num_calls in means)
    overhead_s = min(profile.overhead_s, _MOST_OVERHEAD * shortest_s)

    def factor(measured_s: float, predicted_s: float, num_calls: float) -> float:
        net_s = predicted_s - num_calls * profile.overhead_s
        return max(0.0, measured_s - num_calls * overhead_s) / net_s if net_s > 0 else 1.0

    factors = [
        (
            factor(forward_s, predicted.stage_costs[k].forward_s, 1.0),
            factor(backward_s, timeline.mean_s(*BACKWARD_KINDS, stage=k), num_calls),
        )
        for k, (forward_s, backward_s, num_calls) in enumerate(means)
    ]
    return factors, overhead_s
