"""What a given partition costs: every answer of every solver is priced here, by the cost model and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gplan.costs import ChainCosts
from gplan.memory import stage_memory, stage_moments
from gplan.nouns import Objective, Plan, Prediction, Proof, RecomputeMode, Stage, StageCost
from gplan.schedules import make_schedule
from gplan.simulate import simulate_schedule


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


def stage_load_s(cost: StageCost, *, left: StageCost | None, num_recomputed_share: float) -> float:
    """Seconds of device time that a micro-batch occupies on a stage, its transfers over both cuts included."""
    compute_s = cost.forward_s + cost.backward_s + num_recomputed_share * cost.recompute_s
    return compute_s + cost.gradient_s + (left.activation_s if left else 0.0)


def recomputed_share(problem: Problem) -> float:
    """The share of the micro-batches whose backward recomputes."""
    num_microbatches = problem.num_microbatches
    kept = {"never": num_microbatches, "except-last": 1, "always": 0}[problem.recompute]
    return 1.0 - kept / num_microbatches


def stages_of(problem: Problem, cuts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages between the cuts (each the first layer of a stage after the first), priced."""
    bounds = [0, *cuts, problem.costs.num_layers]
    return tuple(_stage(problem, index, first, end) for index, (first, end) in enumerate(pairwise(bounds)))


def objective_s(problem: Problem, stages: Sequence[Stage]) -> float:
    """What the problem minimises: the load of the largest stage, or the simulated step."""
    costs = [stage.cost for stage in stages]
    if problem.minimize == "max-stage":
        share = recomputed_share(problem)
        lefts = [None, *costs[:-1]]
        return max(stage_load_s(x, left=y, num_recomputed_share=share) for x, y in zip(costs, lefts, strict=True))
    return step_s(problem, costs)


def step_s(problem: Problem, costs: Sequence[StageCost]) -> float:
    """The simulated step of these stages."""
    schedule = make_schedule(problem.schedule, num_stages=problem.num_stages, num_microbatches=problem.num_microbatches)
    return simulate_schedule(schedule, costs, recompute=problem.recompute).step_s


def price(problem: Problem, cuts: Sequence[int], *, solver: str, lower_bound_s: float, solve_s: float) -> Plan:
    """The plan with these cuts, with its prediction, its objective and the bound that the solver proved."""
    stages = stages_of(problem, cuts)
    schedule = make_schedule(problem.schedule, num_stages=problem.num_stages, num_microbatches=problem.num_microbatches)
    timeline = simulate_schedule(schedule, [stage.cost for stage in stages], recompute=problem.recompute)
    num_stages, num_microbatches = problem.num_stages, problem.num_microbatches
    profile = problem.costs.profile
    return Plan(
        model=profile.model,
        device=profile.device,
        link=profile.link,
        stages=stages,
        schedule=problem.schedule,
        num_microbatches=num_microbatches,
        microbatch_size=problem.costs.microbatch_size,
        recompute=problem.recompute,
        minimize=problem.minimize,
        memory_limit_bytes=problem.memory_bytes,
        loss_reduction=profile.loss_reduction,
        prediction=Prediction(
            step_s=timeline.step_s,
            bubble=timeline.bubble,
            ideal_bubble=(num_stages - 1) / (num_microbatches + num_stages - 1),
        ),
        proof=Proof(
            solver=solver,
            objective_s=objective_s(problem, stages),
            lower_bound_s=lower_bound_s,
            solve_s=solve_s,
        ),
        notes=problem.costs.notes,
    )


def _stage(problem: Problem, index: int, first: int, end: int) -> Stage:
    moments = stage_moments(
        problem.schedule,
        num_stages=problem.num_stages,
        num_microbatches=problem.num_microbatches,
        stage=index,
        recompute=problem.recompute,
    )
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
        memory=stage_memory(moments, costs.one_stage_bytes(first, end)),
    )
