"""What a given partition costs: every answer of every solver is priced here, by the cost model and the simulator.

The load of a stage, which `max-stage` minimises, is the device time that one micro-batch takes on it: forward and
backward, the recompute averaged over the micro-batches, and what it receives over its two cuts (activations over the
left one, gradients over the right one). `step-time` minimises the simulated step, the optimizer's tail included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gplan.costs import ChainCosts
from gplan.memory import Moment, stage_memory, stage_moments
from gplan.nouns import Objective, Plan, Prediction, Proof, RecomputeMode, Stage, StageCost, Timeline
from gplan.schedules import make_schedule
from gplan.simulator import simulate_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What to balance: the chain's costs, K, how the pipeline runs, the memory of each device and the objective."""

    costs: ChainCosts
    num_stages: int
    schedule: str
    recompute: RecomputeMode
    minimize: Objective
    memory_bytes: int | None = None  # None: no limit

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.costs.num_microbatches

    @property
    def num_layers(self) -> int:
        """L."""
        return self.costs.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What a solver hands back: where it cuts, and below what no plan's objective lies."""

    cuts: tuple[int, ...]
    lower_bound_s: float
    solver: str
    notes: tuple[str, ...] = ()


def stage_load_s(cost: StageCost, *, left: StageCost | None, num_recomputed_share: float) -> float:
    """Seconds of device time that a micro-batch occupies on a stage, its transfers over both cuts included."""
    compute_s = cost.forward_s + cost.backward_s + num_recomputed_share * cost.recompute_s
    return compute_s + cost.gradient_s + (left.activation_s if left else 0.0)


def stage_loads_s(problem: Problem, stages: Sequence[Stage]) -> tuple[float, ...]:
    """The load of every stage."""
    costs = [stage.cost for stage in stages]
    share = recomputed_share(problem)
    pairs = zip(costs, [None, *costs[:-1]], strict=True)
    return tuple(stage_load_s(cost, left=left, num_recomputed_share=share) for cost, left in pairs)


def recomputed_share(problem: Problem) -> float:
    """The share of the micro-batches whose backward recomputes."""
    num_microbatches = problem.num_microbatches
    kept = {"never": num_microbatches, "except-last": 1, "always": 0}[problem.recompute]
    return 1.0 - kept / num_microbatches


def moments_of(problem: Problem, stage: int) -> tuple[Moment, ...]:
    """The moments at which the memory of a stage may peak."""
    return stage_moments(
        problem.schedule,
        num_stages=problem.num_stages,
        num_microbatches=problem.num_microbatches,
        stage=stage,
        recompute=problem.recompute,
    )


def stages_of(problem: Problem, cuts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages between the cuts (each the first layer of a stage after the first), priced."""
    bounds = [0, *cuts, problem.num_layers]
    return tuple(stage_of(problem, index, first, end) for index, (first, end) in enumerate(pairwise(bounds)))


def objective_s(problem: Problem, stages: Sequence[Stage]) -> float:
    """What the problem minimises: the load of the largest stage, or the simulated step."""
    if problem.minimize == "max-stage":
        return max(stage_loads_s(problem, stages))
    return step_s(problem, stages)


def step_s(problem: Problem, stages: Sequence[Stage]) -> float:
    """The simulated step of these stages."""
    return _timeline(problem, stages).step_s


def price(problem: Problem, solution: Solution, *, solve_s: float) -> Plan:
    """The plan with the solution's cuts, with its prediction, its objective and the bound that the solver proved."""
    stages = stages_of(problem, solution.cuts)
    timeline = _timeline(problem, stages)
    is_step = problem.minimize == "step-time"
    goal_s = timeline.step_s if is_step else objective_s(problem, stages)
    profile = problem.costs.profile
    return Plan(
        model=profile.model,
        device=profile.device,
        link=profile.link,
        stages=stages,
        schedule=problem.schedule,
        num_microbatches=problem.num_microbatches,
        microbatch_size=problem.costs.microbatch_size,
        recompute=problem.recompute,
        minimize=problem.minimize,
        memory_limit_bytes=problem.memory_bytes,
        loss_reduction=profile.loss_reduction,
        prediction=_prediction(problem, timeline),
        proof=Proof(
            solver=solution.solver,
            objective_s=goal_s,
            lower_bound_s=min(goal_s, solution.lower_bound_s),
            solve_s=solve_s,
        ),
        notes=problem.costs.notes + solution.notes,
    )


def _prediction(problem: Problem, timeline: Timeline) -> Prediction:
    num_stages, num_microbatches = problem.num_stages, problem.num_microbatches
    ideal_bubble = (num_stages - 1) / (num_microbatches + num_stages - 1)
    return Prediction(step_s=timeline.step_s, bubble=timeline.bubble, ideal_bubble=ideal_bubble)


def _timeline(problem: Problem, stages: Sequence[Stage]) -> Timeline:
    num_stages, num_microbatches = problem.num_stages, problem.num_microbatches
    schedule = make_schedule(problem.schedule, num_stages=num_stages, num_microbatches=num_microbatches)
    return simulate_schedule(schedule, [stage.cost for stage in stages], recompute=problem.recompute)


def stage_of(problem: Problem, index: int, first: int, end: int) -> Stage:
    """Layers [first, end) as stage `index`, priced."""
    costs = problem.costs
    layers = range(first, end)
    return Stage(
        index=index,
        first_layer=first,
        end_layer=end,
        layer_names=tuple(costs.profile.layers[i].name for i in layers),
        layer_forward_s=tuple(float(costs.forward_s[i, i + 1]) for i in layers),
        layer_backward_s=tuple(float(costs.backward_s[i, i + 1]) for i in layers),
        cost=costs.stage_cost(first, end),
        memory=stage_memory(moments_of(problem, index), costs.one_stage_bytes(first, end)),
    )
