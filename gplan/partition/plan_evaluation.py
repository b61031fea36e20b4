"""What a given partition costs: every answer of every solver is priced here, by the cost model and the simulator.

The load of a stage, which `max-stage` minimises, is the device time that one micro-batch takes on it: forward and
backward with the engine's own time after them, the recompute averaged over the micro-batches, and what it receives over
its two cuts (activations over the left one, gradients over the right one). A device's load is that of all its stages.
`step-time` minimises the simulated step, the optimizer's tail included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from gplan.core import (
    Constraints,
    HostBound,
    Plan,
    Prediction,
    Profile,
    Proof,
    Seconds,
    Stage,
    StageMemory,
    StageSeconds,
)
from gplan.core.errors import UsageError
from gplan.core.units import bytes_text
from gplan.corrections.host_clock import with_cuda_graphs, without_host
from gplan.cost.memory_moments import device_memory, stage_memory
from gplan.cost.part_table import first_of
from gplan.cost.reserved_bytes import with_reserved
from gplan.partition.problem import (
    Problem,
    Solution,
    device_peaks,
    device_sums,
    moments_of,
    num_recomputed,
    peak_moments_of,
)
from gplan.partition.recompute import RecomputeChoice
from gplan.simulation.kernel import occupied
from gplan.simulation.simulator import equal_bubble, step_and_bubble


def compute_s(problem: Problem, stage: int, times: StageSeconds[Seconds]) -> Seconds:
    """Seconds that a stage computes for a micro-batch, on average over a step."""
    return passes_s(problem, stage, times) + num_recomputed(problem) / problem.num_microbatches * times.recompute_s


def passes_s(problem: Problem, stage: int, times: StageSeconds[Seconds]) -> Seconds:
    """Seconds of a forward and a backward of a stage, on average over a step, without recompute.

    Raises ValueError where the schedule splits backwards of which the halves are not known.
    """
    backward_s, share = times.backward_s, problem.split_shares[stage]
    if share:
        first_s, second_s = times.input_gradient_s, times.weight_gradient_s
        if first_s is None or second_s is None:
            raise ValueError(f"stage {stage} splits its backward, and how long the halves take is not known")
        halves_s = first_s + second_s
        backward_s = halves_s if share == 1 else (1 - share) * backward_s + share * halves_s
    return times.forward_s + backward_s


def load_s(problem: Problem, stage: int, times: StageSeconds[Seconds], received_s: Seconds) -> Seconds:
    """The load of a stage: compute, sending its gradients, and receiving activations for `received_s`."""
    return compute_s(problem, stage, times) + times.gradient_s + received_s


def stage_loads_s(problem: Problem, stages: Sequence[Stage]) -> tuple[float, ...]:
    """The load of each stage, with its transfers."""
    costs = [occupied(stage.cost) for stage in stages]
    received_s = [0.0, *(cost.activation_s for cost in costs[:-1])]
    return tuple(load_s(problem, k, *pair) for k, pair in enumerate(zip(costs, received_s, strict=True)))


def device_loads_s(problem: Problem, stages: Sequence[Stage]) -> tuple[float, ...]:
    """[K]: what `max-stage` minimises the largest of."""
    return device_sums(problem, stage_loads_s(problem, stages))


def in_stage_order(problem: Problem, stages: Sequence[Sequence[int]]) -> tuple[Problem, tuple[int, ...]]:
    """The same problem with the layers in the order of these stages, and where that order is cut."""
    order = [layer for stage in stages for layer in stage]
    cuts = tuple(accumulate(len(stage) for stage in stages[:-1]))
    costs = problem.costs
    if len(stages) < problem.num_stages:
        problem = replace(problem, num_stages=len(stages))
    if costs.given_downsets is None and order == list(range(len(order))):
        return problem, cuts
    costs = replace(costs, profile=costs.profile.reordered(order), given_downsets=None)
    return replace(problem, costs=costs, constraints=Constraints()), cuts


def stages_of(problem: Problem, cuts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages between the cuts (each the first layer of a stage after the first), priced;
    the layers stay in order."""
    bounds = [0, *cuts, problem.num_layers]
    stages = [stage_of(problem, index, first, end) for index, (first, end) in enumerate(pairwise(bounds))]
    if not problem.has_chunks:
        return tuple(stages)
    schedule, found = problem.made_schedule, dict[int, StageMemory]()  # of each when its device holds most
    for device, own in enumerate(problem.stages_by_device):
        parts = {k: x for k in own if (x := stages[k].parts) is not None}
        ahead = problem.costs.transfers.receives_ahead
        found |= device_memory(schedule, device, parts, recompute=problem.recompute, receives_ahead=ahead)
    return tuple(replace(stage, memory=found[stage.index]) for stage in stages)


def objective_s(problem: Problem, stages: Sequence[Stage]) -> float:
    """What the problem minimises: the largest load of a device, or the simulated step."""
    if problem.minimize == "step-time":
        return step_s(problem, stages)
    return max(device_loads_s(problem, stages))


def fits_memory(problem: Problem, stages: Sequence[Sequence[int]]) -> bool:
    """Whether stages, given as layers in the profile's numbering, fit the memory of their devices, to the byte."""
    if not problem.has_memory_limit:
        return True
    laid, cuts = in_stage_order(problem, stages)
    bounds = np.array([0, *cuts, laid.num_layers])
    limits = [problem.memory_of(k) for k in range(len(stages))]
    if problem.has_chunks:
        peaks = device_peaks(laid, bounds[:-1, None], bounds[1:, None])[:, 0]
        return all(limit is None or peaks[laid.devices[k]] <= limit for k, limit in enumerate(limits))
    return all(
        limit is None or laid.peak_bytes(k, bounds[k : k + 1], bounds[k + 1 : k + 2]).item() <= limit
        for k, limit in enumerate(limits)
    )


def step_s(problem: Problem, stages: Sequence[Stage]) -> float:
    """The simulated step of these stages."""
    return _prediction(problem, stages).step_s


def price(problem: Problem, solution: Solution, *, solve_s: float) -> Plan:
    """The plan with the solution's stages, with its prediction, its objective and the bound that the solver proved."""
    requested, (problem, cuts) = problem, in_stage_order(problem, solution.stages)
    stages = stages_of(problem, cuts)
    prediction = _prediction(problem, stages)
    if requested.costs.profile.has_host:
        prediction = replace(prediction, host_bound=_host_bound(problem, cuts))
    objective_value_s = prediction.step_s if problem.minimize == "step-time" else objective_s(problem, stages)
    profile = requested.costs.profile
    return Plan(
        model=profile.model,
        device=profile.device,
        link=profile.link,
        stages=stages,
        schedule=problem.schedule,
        num_microbatches=problem.num_microbatches,
        microbatch_size=profile.microbatch_sizes[0],
        recompute=problem.recompute,
        minimize=problem.minimize,
        memory_limit_bytes=problem.memory_bytes,
        loss_reduction=profile.loss_reduction,
        prediction=prediction,
        proof=Proof(
            solver=solution.solver,
            objective_s=objective_value_s,
            lower_bound_s=min(objective_value_s, solution.lower_bound_s),
            solve_s=solve_s,
        ),
        notes=(
            *profile.plan_notes,
            *solution.notes,
            *_large_layer(problem, stages),
        ),
        granularity=profile.granularity,
        num_replicas=problem.num_replicas,
        sharding=problem.costs.sharding,
        shares_host=profile.shares_host,
        constraints=requested.constraints,
        precision=profile.precision,
        receives_ahead=problem.costs.transfers.receives_ahead,
    )


_FINER = {  # what would divide a large layer
    "auto": "profile with --granularity op, which divides it if it is several operations",
    "layer": "profile with --granularity auto, which divides it",
    "op": "it is one operation: use fewer devices, or put replicas in their place",
}


def with_reserved_memory(plan: Plan, profile: Profile, limit: int | None) -> Plan:
    """The plan with what its devices reserve, and a note where that is more than the `limit` in bytes; None: no limit."""
    found = plan if plan.reserved_bytes else with_reserved(plan, profile)
    if limit is None:
        return found
    found = replace(found, memory_limit_bytes=limit)
    if not found.reserved_bytes or found.device_total_bytes <= limit:
        return found
    note = (
        f"with what its allocator reserves and CUDA and NCCL take beside it the fullest device needs {bytes_text(found.device_total_bytes)}, "
        f"more than its {bytes_text(limit)}; try --recompute always, more devices or smaller micro-batches"
    )
    return replace(found, notes=(*found.notes, note))


def _large_layer(problem: Problem, stages: Sequence[Stage]) -> Iterator[str]:
    """A note if one layer alone is more than the share of a device."""
    options, num_devices = problem.options, len(set(problem.devices))
    fewer = f"take fewer devices in a pipeline ({options.num_devices})"
    remedy = _FINER[problem.costs.profile.granularity] if options.granularity else fewer
    seconds = {
        name: forward_s + backward_s
        for stage in stages
        for name, forward_s, backward_s in zip(
            stage.layer_names, stage.layer_forward_s, stage.layer_backward_s, strict=True
        )
    }
    name = max(seconds, key=seconds.__getitem__)
    share = seconds[name] / (sum(seconds.values()) or 1.0)
    if num_devices > 1 and share > 1 / num_devices:
        yield (
            f"layer {name} takes {share:.0%} of the layers' time, more than the share of one of {num_devices} devices: "
            f"{remedy}"
        )


def _prediction(problem: Problem, stages: Sequence[Stage]) -> Prediction:
    schedule = problem.made_schedule
    costs = [stage.cost for stage in stages]
    step_s, bubble = step_and_bubble(schedule, costs, recompute=problem.recompute)
    if not step_s:
        raise UsageError("a step of this profile takes no time at all; expected layers or transfers that take some")
    ideal_bubble = equal_bubble(schedule, costs, recompute=problem.recompute)
    return Prediction(step_s=step_s, bubble=bubble, ideal_bubble=ideal_bubble)


def _host_bound(problem: Problem, cuts: Sequence[int]) -> HostBound:
    """What the step of these stages would be with a faster host."""
    costs = problem.costs
    faster = without_host(costs.profile), with_cuda_graphs(costs.profile, {0, *cuts})
    changed = (replace(problem, costs=replace(costs, profile=x)) for x in faster)
    device_s, graphs_s = (step_s(x, stages_of(x, cuts)) for x in changed)
    return HostBound(device_step_s=device_s, graphs_step_s=graphs_s)


def stage_of(problem: Problem, index: int, first: int, end: int) -> Stage:
    """Layers [first, end) as stage `index`, priced as if its device held no other; the layers stay in order."""
    costs, speed = problem.costs, problem.speed(index)
    places = np.arange(first, end)
    forward_s, backward_s = (costs.sums.seconds(of, places, places + 1) / speed for of in ("forward", "backward"))
    choice = recomputed(problem, index, first, end)
    cost = costs.row(first, end, problem.stage_places[index])
    parts = first_of(choice.parts)
    return Stage(
        index=index,
        first_layer=first,
        end_layer=end,
        layer_names=tuple(costs.profile.layers[i].name for i in places),
        layer_forward_s=tuple(forward_s.tolist()),
        layer_backward_s=tuple(backward_s.tolist()),
        cost=replace(cost, recompute_s=choice.recompute_s / speed),
        memory=stage_memory(choice.moments, parts),
        parts=parts,
        gathered_bytes=costs.gathered_at_once(first, end),
        recompute_layers=tuple(costs.profile.layers[i].name for i in choice.layers),
        machine_device=problem.machine_devices[index] if problem.machine_devices else None,
        device=None if problem.devices == tuple(range(problem.num_stages)) else problem.devices[index],
    )


def recomputed(problem: Problem, index: int, first: int, end: int) -> RecomputeChoice:
    """What the stage recomputes: the layers selected, or all or nothing, which no layer is named for."""
    costs = problem.costs
    if problem.recompute == "selected":
        return problem.selector.choice(
            first, end, peak_moments_of(problem, index), limit_bytes=problem.memory_of(index)
        )
    one, other = np.array([first]), np.array([end])
    return RecomputeChoice(
        layers=(),
        recompute_s=float(costs.sums.recompute_s(one, other)[0]),
        moments=moments_of(problem, index),
        parts=costs.parts(one, other, problem.boundaries(index)),
    )
