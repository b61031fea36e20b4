"""The step's time as the goal: an end for every action of the schedule, whichever it is, and the updates after them.

An action ends its own duration after the action before it on its device, and after the arrival of its input, which comes
after the arrival before it over the same link: the last end is a longest path, as the simulator walks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import permutations
from typing import Any

import numpy as np

from gplan.core import Action, ActionKind, Schedule, StageSeconds
from gplan.core.machine import num_messages
from gplan.corrections.sharding import EXCHANGED
from gplan.cost.action_seconds import ActionKey, action_s
from gplan.partition.milp.assignment import StageAssignment
from gplan.partition.milp.boundary_terms import Amount, BoundaryTerms, transfer
from gplan.partition.milp.coefficients import LayerSeconds, ParameterBytes
from gplan.partition.milp.program import Expression, LinearProgram, total, weighted
from gplan.partition.plan_evaluation import compute_s
from gplan.partition.problem import Problem
from gplan.schedules.dependencies import dependencies_of


def pass_terms(
    choices: StageAssignment, cuts: BoundaryTerms, k: int, *, figures: LayerSeconds, unit_s: float
) -> StageSeconds[Any]:
    """What the passes of stage k take, in units, with the engine's time after each, as expressions."""
    costs, speed = figures.costs, figures.problem.speed(k)
    scale = 1.0 / speed / unit_s

    def seconds(name: str, sending: Expression = 0.0, *, overhead_s: float = costs.overhead_s) -> Expression:
        layers_s, loss_s = figures.of(name)
        of_layers = choices.sum_on(k, (layers_s * scale).tolist())
        at_end = loss_s * scale if k == choices.stages[-1] else 0.0
        return weighted([(1.0, of_layers), (overhead_s * scale, 1), (at_end, 1), (1.0 / speed, sending)])

    back = cuts.gradient_sending(k - 1)
    unfinished = (costs.sums.unfinished_s * scale).tolist()
    recompute_s = seconds("recompute_s", overhead_s=0.0)
    return StageSeconds(
        forward_s=seconds("forward_s", cuts.activation_sending(k)),
        backward_s=seconds("backward_s", back),
        recompute_s=weighted([(1.0, recompute_s), (-1.0, choices.of_last(k, unfinished))]),
        input_gradient_s=seconds("input_gradient_s", back) if costs.sums.has_halves else None,
        weight_gradient_s=seconds("weight_gradient_s") if costs.sums.has_halves else None,
        optimizer_s=0.0,  # the update is no pass: see `StepTimeRows`
        activation_s=0.0,
        gradient_s=0.0,
    )


def add_loads(
    program: LinearProgram, choices: StageAssignment, cuts: BoundaryTerms, *, figures: LayerSeconds, unit_s: float
) -> None:
    """The goal is the largest load of a device, in units."""
    problem, loads = figures.problem, {}
    for k in choices.stages:
        load = compute_s(problem, k, pass_terms(choices, cuts, k, figures=figures, unit_s=unit_s))
        loads[k] = total([load, cuts.gradient_time(k), cuts.activation_time(k - 1)])
    for stages in problem.stages_by_device:
        program.require(program.goal, at_least=total(loads[k] for k in stages))


def _sent(schedule: Schedule, needs: Mapping[Action, Action]) -> Iterator[tuple[Action, Action | None, str]]:
    """Each action whose output goes to another device, the one sent before it over the same link, and what is sent."""
    receivers = {
        needed: x.stage for x, needed in needs.items() if schedule.devices[needed.stage] != schedule.devices[x.stage]
    }
    for order in schedule.orders:
        last: dict[int, Action] = {}
        for action in order:
            if action in receivers:
                target = schedule.devices[receivers[action]]
                yield action, last.get(target), "activation" if action.kind is ActionKind.FORWARD else "gradient"
                last[target] = action


@dataclass(frozen=True)
class StepTimeRows:
    """Writes the step's time into a program."""

    program: LinearProgram
    choices: StageAssignment
    cuts: BoundaryTerms
    weights: ParameterBytes
    figures: LayerSeconds
    unit_s: float

    @property
    def problem(self) -> Problem:
        """What is balanced."""
        return self.figures.problem

    def add(self) -> None:
        """The goal is the end of the step, in units."""
        schedule = self.problem.made_schedule
        needs = dependencies_of([x for order in schedule.orders for x in order], schedule.num_stages)
        ends = {action: self.program.variable(f"end_{action}") for order in schedule.orders for action in order}
        require, duration_of, time = self.program.require, cache(self._duration), cache(self._time)
        arrivals = dict[Action, Expression]()
        for sender, before, way in _sent(schedule, needs):
            hop = time(sender.stage if way == "activation" else sender.stage - 1, way)
            arrivals[sender] = self.program.variable(f"arrival_{sender}")
            for earlier in (ends[sender], *([arrivals[before]] if before is not None else [])):
                require(arrivals[sender], at_least=total([earlier, hop]))
        for order in schedule.orders:
            for before, action in zip([None, *order[:-1]], order, strict=True):
                key = ActionKey.of(action, num_microbatches=schedule.num_microbatches, recompute=self.problem.recompute)
                duration = duration_of(key)
                require(ends[action], at_least=total([ends[before] if before else 0, duration]))
                needed = needs.get(action)
                if needed is not None and needed.stage != action.stage:
                    arrival = arrivals.get(needed, ends[needed])
                    require(ends[action], at_least=total([arrival, duration]))
        updates = [[time(k, "update") for k in stages] for stages in self.problem.stages_by_device]
        last = [ends[order[-1]] for order in schedule.orders]
        for end, own in zip(last, updates, strict=True):
            require(self.program.goal, at_least=total([end, *own]))
        for one, other in permutations(self.choices.stages, 2) if self.problem.tied_links else ():
            there, here = self.problem.devices[one], self.problem.devices[other]
            if there != here:
                require(self.program.goal, at_least=total([last[there], *updates[here], self._unless_tied(one, other)]))

    @cached_property
    def _passes(self) -> list[StageSeconds[Any]]:
        """Of every stage."""
        choices, cuts = self.choices, self.cuts
        return [pass_terms(choices, cuts, k, figures=self.figures, unit_s=self.unit_s) for k in choices.stages]

    def _duration(self, key: ActionKey) -> Expression:
        """How long an action keeps its device, in units."""
        seconds = total([action_s(key, self._passes[key.stage])])
        if not seconds:  # the first half of a backward on stage 0
            return 0.0
        again = "_again" if key.recomputes else ""
        return self.program.at_least(f"{key.kind.name.lower()}{again}_time_{key.stage}", [seconds])

    def _time(self, k: int, name: str) -> Expression:
        """Transfers over the cut after stage k, and its update, in units."""
        of = {"activation": self.cuts.activation_time, "gradient": self.cuts.gradient_time, "update": self._update}
        return self.program.at_least(f"{name}_time_{k}", [of[name](k)])

    def _update(self, k: int) -> Expression:
        """The update and what the ranks exchange before it, as in `Costs.columns`, in units."""
        costs, scale = self.figures.costs, 1.0 / self.problem.speed(k) / self.unit_s
        step, contention = costs.profile.step, costs.profile.step.contention if k else 1.0
        alone = weighted([(step.spread_s * scale, self.weights.update_share(k)), (step.fixed_part_s * scale, 1)])
        update = weighted([(contention, alone)])
        if self.problem.tied_links:
            is_tied, tied_s = self.weights.is_any_tied(k), costs.profile.step.tied_update_s * scale
            most_s = (step.spread_s + step.fixed_part_s) * scale
            beside = weighted([(1.0, update), ((1.0 - contention) * most_s + tied_s, is_tied)])
            update = self.program.at_least(f"own_update_{k}", [weighted([(1.0, alone), (tied_s, is_tied)]), beside])
        around = weighted([(costs.around_s * scale if k == 0 else 0.0, 1)])
        return total([update, around, self._tied(k), self._replicas(k)])

    def _unless_tied(self, one: int, other: int) -> Expression:
        """0 where both stages have tied weights, so that the other's update waits for the one; else enough below 0."""
        are_tied = [self.weights.is_any_tied(k) for k in (one, other)]
        return weighted([(self._most_updates, total([*are_tied, -2.0]))])

    @cached_property
    def _most_updates(self) -> float:
        """More than all updates of a device can take, in units."""
        costs, links = self.figures.costs, self.problem.tied_links
        whole = costs.seconds(*costs.all_layers)
        update_s = (
            costs.profile.step.contention * float(whole.optimizer_s[0])
            + costs.profile.step.tied_update_s
            + costs.around_s
        )
        num_bytes = np.array([sum(x.gradient_bytes for x in costs.profile.shared_weights)])
        summing_s = max(float(link.collectives_s("all_reduce", num_bytes, 2)[0]) for link in links)
        stage_s = update_s / min(self.problem.speeds) + float(np.max(whole.all_reduce_s)) + summing_s
        return self.problem.num_stages * stage_s / self.unit_s

    def _tied(self, k: int) -> Expression:
        """Summing the gradients of tied weights, as `Costs.columns`."""
        if not self.problem.tied_links:
            return 0.0
        amount = Amount(
            num_bytes=weighted([(0.5, self.weights.tied_bytes(k))]),
            is_any=self.weights.is_any_tied(k),
            most_bytes=0.5 * sum(x.gradient_bytes for x in self.figures.costs.profile.shared_weights),
        )
        links = [link.ring_message("all_reduce", 2) for link in self.problem.tied_links]
        messages = [
            weighted([(2.0, transfer(self.program, f"sum_{k}_{i}", link=link, amount=amount, unit_s=self.unit_s))])
            for i, link in enumerate(links)
        ]
        return messages[0] if len(messages) == 1 else self.program.at_least(f"sum_{k}", messages)

    def _replicas(self, k: int) -> Expression:
        """What the replicas of a stage exchange."""
        num_replicas, costs = self.problem.num_replicas, self.figures.costs
        if num_replicas == 1:
            return 0.0
        terms, is_any = [], self.weights.is_any_trained(k)
        for kind, field in EXCHANGED[costs.sharding]:
            everything = [*costs.profile.layers, *costs.profile.shared_weights]
            amount = Amount(
                num_bytes=weighted([(1.0 / num_replicas, self.weights.held_sum(k, field))]),
                is_any=is_any,
                most_bytes=sum(getattr(x, field) for x in everything) / num_replicas,
            )
            link = costs.profile.link.ring_message(kind, num_replicas)
            message = transfer(self.program, f"{kind}_{k}", link=link, amount=amount, unit_s=self.unit_s)
            terms.append((float(num_messages(kind, num_replicas)), message))
        return weighted(terms)
