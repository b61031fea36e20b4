"""What a given partition costs: every answer of every solver is priced here, by the cost model and the simulator.

The load of a stage, which `max-stage` minimises, is the device time that one micro-batch takes on it: forward and
backward, the recompute averaged over the micro-batches, and what it receives over its two cuts (activations over the
left one, gradients over the right one). `max-compute` leaves the transfers out; `max-device-load` counts a value once
for its producer and once for every device that reads it from elsewhere, wherever that is. `step-time` minimises the
simulated step, the optimizer's tail included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from gplan.balancer.direct import direct_transfers_s
from gplan.balancer.selection import Choice, Demand, Selector
from gplan.costs import Costs
from gplan.downsets import Floats, Ints
from gplan.errors import UsageError
from gplan.memory import Moment, StageBytes, peak_of, stage_memory, stage_moments
from gplan.nouns import (
    Link,
    Objective,
    Place,
    Plan,
    Prediction,
    Proof,
    RecomputeMode,
    Schedule,
    Stage,
    StageCost,
    Wishes,
)
from gplan.order import in_order
from gplan.schedules import make_schedule, named
from gplan.simulator import equal_bubble, step_and_bubble
from gplan.units import percent_text


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What to balance: the costs, K, how the pipeline runs, its devices, the objective and what the user wishes."""

    costs: Costs
    num_stages: int
    schedule: str
    recompute: RecomputeMode
    minimize: Objective
    memory_bytes: int | None = None  # of every device; None: no limit, but for what the places say
    places: tuple[Place, ...] = ()  # the device of each stage; none: all are as the profiled one
    links: tuple[Link, ...] = ()  # K-1, from each stage to the next; none: all are the profile's
    wishes: Wishes = field(default_factory=Wishes)
    num_replicas: int = 1

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.costs.num_microbatches

    @property
    def num_devices(self) -> int:
        """K; each holds as many stages as the schedule has chunks."""
        said = named(self.schedule)
        return said.num_devices or self.num_stages // said.num_chunks

    @property
    def made_schedule(self) -> Schedule:
        """The orders of the devices."""
        return make_schedule(self.schedule, num_devices=self.num_devices, num_microbatches=self.num_microbatches)

    @property
    def num_layers(self) -> int:
        """L."""
        return self.costs.num_layers

    def speed(self, stage: int) -> float:
        """How much faster the stage's device is than the profiled one."""
        return self.places[stage].speed if self.places else 1.0

    def memory_of(self, stage: int) -> int | None:
        """The memory of the stage's device; None: no limit."""
        limits = [self.memory_bytes, self.places[stage].memory_bytes if self.places else None]
        return min((x for x in limits if x is not None), default=None)

    @property
    def has_memory_limit(self) -> bool:
        """Whether any device has one."""
        return any(self.memory_of(stage) is not None for stage in range(self.num_stages))

    def link_after(self, stage: int) -> Link:
        """The link from the stage to the next one."""
        return self.links[stage] if self.links and stage < self.num_stages - 1 else self.costs.profile.link

    def activation_s(self, stage: int) -> Floats:
        """[P]: seconds to send the activations over the cut after the stage, by its position; 0 before stage 0."""
        return self._sent[stage][0]

    def gradient_s(self, stage: int) -> Floats:
        """[P]: seconds to send the gradients back over the cut after the stage."""
        return self._sent[stage][1]

    def all_reduce_s(self, trained_bytes: Ints) -> Floats:
        """[E]: seconds in which a ring of replicas adds up gradients: 2 (R - 1) messages of a share of 1 / R."""
        replicas, link = self.num_replicas, self.costs.profile.link
        return 2 * (replicas - 1) * link.transfers_s(trained_bytes / replicas)

    def peak_bytes(self, stage: int, first: Ints, end: Ints) -> Ints:
        """[E]: the most memory that stages hold, at least, where layers to recompute are selected.

        For `max-device-load` their weights, as that planner counts.
        """
        if self.minimize == "max-device-load":
            return self.costs.weight_bytes(first, end)
        if self.recompute == "selected":
            return self.selector.least_peak_bytes(first, end, demand_of(self, stage))
        return peak_of(moments_of(self, stage), self.costs.parts(first, end))

    @cached_property
    def selector(self) -> Selector:
        """Which layers to recompute, where they are selected."""
        return Selector(self.costs)

    @cached_property
    def _sent(self) -> dict[int, tuple[Floats, Floats]]:
        nothing = np.zeros(self.costs.num_positions)
        links = {*self.links, self.costs.profile.link}
        by_link = {x: (self.costs.activation_s(x), self.costs.gradient_s(x)) for x in links}
        return {-1: (nothing, nothing), **{s: by_link[self.link_after(s)] for s in range(self.num_stages)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What a solver hands back: the layers of each stage, and below what no plan's objective lies."""

    stages: tuple[tuple[int, ...], ...]
    lower_bound_s: float
    solver: str
    notes: tuple[str, ...] = ()

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where the layers, laid out in the order of the stages, are cut."""
        return tuple(accumulate(len(stage) for stage in self.stages[:-1]))


def without_memory(problem: Problem) -> Problem:
    """The same problem on devices whose memory has no limit."""
    places = tuple(replace(place, memory_bytes=None) for place in problem.places)
    return replace(problem, memory_bytes=None, places=places)


def stage_load_s(cost: StageCost, *, left: StageCost | None, num_recomputed_share: float) -> float:
    """Seconds of device time that a micro-batch occupies on a stage, its transfers over both cuts included."""
    return _compute_s(cost, num_recomputed_share) + cost.gradient_s + (left.activation_s if left else 0.0)


def stage_loads_s(problem: Problem, stages: Sequence[Stage]) -> tuple[float, ...]:
    """What the objective minimises the largest of; for `step-time`, as for `max-stage`. The layers lie in order."""
    costs, share = [stage.cost for stage in stages], recomputed_share(problem)
    if problem.minimize == "max-compute":
        return tuple(_compute_s(cost, share) for cost in costs)
    if problem.minimize == "max-device-load":
        transfers_s = direct_transfers_s(problem.costs, [range(x.first_layer, x.end_layer) for x in stages])
        return tuple(_compute_s(cost, share) + float(x) for cost, x in zip(costs, transfers_s, strict=True))
    pairs = zip(costs, [None, *costs[:-1]], strict=True)
    return tuple(stage_load_s(cost, left=left, num_recomputed_share=share) for cost, left in pairs)


def _compute_s(cost: StageCost, num_recomputed_share: float) -> float:
    return cost.forward_s + cost.backward_s + num_recomputed_share * cost.recompute_s


def recomputed_share(problem: Problem) -> float:
    """The share of the micro-batches whose backward recomputes."""
    num_microbatches = problem.num_microbatches
    kept = {"never": num_microbatches, "except-last": 1}.get(problem.recompute, 0)
    return 1.0 - kept / num_microbatches


def nothing_recomputed(problem: Problem) -> Problem:
    """The same problem without selecting layers to recompute; others as they are."""
    return replace(problem, recompute="never") if problem.recompute == "selected" else problem


def honest(problem: Problem, solution: Solution) -> Solution:
    """The solution with a bound that holds although some choices of layers to recompute may not be the best."""
    inflation = problem.selector.inflation if problem.recompute == "selected" else 1.0
    if inflation == 1.0:
        return solution
    note = f"layers to recompute were selected to within {percent_text(inflation - 1)} of a backward; the bound allows for it"
    return replace(solution, lower_bound_s=solution.lower_bound_s / inflation, notes=(*solution.notes, note))


def demand_of(problem: Problem, stage: int) -> Demand:
    """The moments at which the memory of a stage may peak that recomputes nothing, or selected layers."""
    return Demand(keeping=moments_of(nothing_recomputed(problem), stage), selecting=moments_of(problem, stage))


def moments_of(problem: Problem, stage: int) -> tuple[Moment, ...]:
    """The moments at which the memory of a stage may peak."""
    return stage_moments(
        problem.schedule,
        num_devices=problem.num_devices,
        num_microbatches=problem.num_microbatches,
        stage=stage,
        recompute=problem.recompute,
    )


def laid_out(problem: Problem, stages: Sequence[Sequence[int]]) -> tuple[Problem, tuple[int, ...]]:
    """The same problem with the layers in the order of these stages, and where that order is cut."""
    order = [layer for stage in stages for layer in stage]
    cuts = tuple(accumulate(len(stage) for stage in stages[:-1]))
    costs = problem.costs
    if len(stages) < problem.num_stages:
        problem = replace(problem, num_stages=len(stages))
    if costs.given_downsets is None and order == list(range(len(order))):
        return problem, cuts
    costs = replace(costs, profile=in_order(costs.profile, order), given_downsets=None)
    return replace(problem, costs=costs, wishes=Wishes()), cuts


def stages_of(problem: Problem, cuts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages between the cuts (each the first layer of a stage after the first), priced; the layers stay in order."""
    bounds = [0, *cuts, problem.num_layers]
    return tuple(stage_of(problem, index, first, end) for index, (first, end) in enumerate(pairwise(bounds)))


def objective_s(problem: Problem, stages: Sequence[Stage]) -> float:
    """What the problem minimises: the largest load, or the simulated step."""
    if problem.minimize == "step-time":
        return step_s(problem, stages)
    return max(stage_loads_s(problem, stages))


def goal_s(problem: Problem, stages: Sequence[Sequence[int]]) -> float:
    """What the problem minimises, of stages given as layers in the profile's numbering."""
    laid, cuts = laid_out(problem, stages)
    return objective_s(laid, stages_of(laid, cuts))


def fits_memory(problem: Problem, stages: Sequence[Sequence[int]]) -> bool:
    """Whether stages, given as layers in the profile's numbering, fit the memory of their devices, to the byte."""
    laid, cuts = laid_out(problem, stages)
    bounds = np.array([0, *cuts, laid.num_layers])
    limits = [problem.memory_of(k) for k in range(len(stages))]
    return all(
        limit is None or laid.peak_bytes(k, bounds[k : k + 1], bounds[k + 1 : k + 2]).item() <= limit
        for k, limit in enumerate(limits)
    )


def step_s(problem: Problem, stages: Sequence[Stage]) -> float:
    """The simulated step of these stages."""
    return _prediction(problem, stages).step_s


def price(problem: Problem, solution: Solution, *, solve_s: float) -> Plan:
    """The plan with the solution's stages, with its prediction, its objective and the bound that the solver proved."""
    asked, (problem, cuts) = problem, laid_out(problem, solution.stages)
    stages = stages_of(problem, cuts)
    prediction = _prediction(problem, stages)
    goal_s = prediction.step_s if problem.minimize == "step-time" else objective_s(problem, stages)
    profile = asked.costs.profile
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
        prediction=prediction,
        proof=Proof(
            solver=solution.solver,
            objective_s=goal_s,
            lower_bound_s=min(goal_s, solution.lower_bound_s),
            solve_s=solve_s,
        ),
        notes=problem.costs.notes + solution.notes,
        granularity=profile.granularity,
        num_replicas=problem.num_replicas,
        wishes=asked.wishes,
    )


def _prediction(problem: Problem, stages: Sequence[Stage]) -> Prediction:
    schedule = problem.made_schedule
    costs = [stage.cost for stage in stages]
    step_s, bubble = step_and_bubble(schedule, costs, recompute=problem.recompute)
    if not step_s:
        raise UsageError("a step of this profile takes no time at all; expected layers or transfers that take some")
    ideal_bubble = equal_bubble(schedule, costs, recompute=problem.recompute)
    return Prediction(step_s=step_s, bubble=bubble, ideal_bubble=ideal_bubble)


def stage_of(problem: Problem, index: int, first: int, end: int) -> Stage:
    """Layers [first, end) as stage `index`, priced; the layers stay in order."""
    costs, speed = problem.costs, problem.speed(index)
    places = np.arange(first, end)
    forward_s, backward_s = (of(places, places + 1) / speed for of in (costs.forward_s, costs.backward_s))
    choice = _recomputed(problem, index, first, end)
    parts = StageBytes(**{name: int(getattr(choice.parts, name)[0]) for name in StageBytes.__slots__})
    return Stage(
        index=index,
        first_layer=first,
        end_layer=end,
        layer_names=tuple(costs.profile.layers[i].name for i in places),
        layer_forward_s=tuple(forward_s.tolist()),
        layer_backward_s=tuple(backward_s.tolist()),
        cost=_on_place(problem, index, first, end, recompute_s=choice.recompute_s),
        memory=stage_memory(choice.moments, parts),
        recompute_layers=tuple(costs.profile.layers[i].name for i in choice.layers),
        place=problem.places[index] if problem.places else None,
        device=None if problem.num_devices == problem.num_stages else problem.made_schedule.devices[index],
    )


def _recomputed(problem: Problem, index: int, first: int, end: int) -> Choice:
    """What the stage recomputes: the layers selected, or all or nothing, which no layer is named for."""
    costs = problem.costs
    if problem.recompute == "selected":
        return problem.selector.choice(first, end, demand_of(problem, index), limit_bytes=problem.memory_of(index))
    one, other = np.array([first]), np.array([end])
    return Choice(
        layers=(),
        recompute_s=float(costs.recompute_s(one, other)[0]),
        moments=moments_of(problem, index),
        parts=costs.parts(one, other),
    )


def _on_place(problem: Problem, index: int, first: int, end: int, *, recompute_s: float) -> StageCost:
    """What the stage costs on its device, with its replicas."""
    cost, speed = problem.costs.stage_cost(first, end, link=problem.link_after(index)), problem.speed(index)
    trained_bytes = problem.costs.trained_bytes(np.array([first]), np.array([end]))
    return replace(
        cost,
        forward_s=cost.forward_s / speed,
        backward_s=cost.backward_s / speed,
        recompute_s=recompute_s / speed,
        optimizer_s=cost.optimizer_s / speed,
        all_reduce_s=float(problem.all_reduce_s(trained_bytes)[0]),
    )
