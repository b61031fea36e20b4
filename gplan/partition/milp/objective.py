"""The step's time as the goal: an end for every action of the schedule, whichever it is, and the updates after them.

An action ends its own duration after the action before it on its device, and after the arrival of its input: the last
end is a longest path, as the simulator walks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from gplan.core import Action, ActionKind, is_recomputed
from gplan.graph.down_sets import Floats
from gplan.partition.milp.assignment import Choices
from gplan.partition.milp.boundary_terms import Amount, Cuts, transfer
from gplan.partition.milp.coefficients import LayerSeconds, ParameterBytes
from gplan.partition.milp.program import Expression, Program, total, weighted
from gplan.partition.problem import Problem
from gplan.schedules.dependencies import dependencies_of


def add_loads(program: Program, choices: Choices, cuts: Cuts, *, figures: LayerSeconds, unit_s: float) -> None:
    """The goal is the largest load of a device, in units."""
    problem = figures.problem
    loads = {}
    for k in choices.stages:
        load = compute_time(choices, k, figures=figures, unit_s=unit_s)
        sending = weighted(
            [(1.0 / problem.speed(k), total([cuts.activation_sending(k), cuts.gradient_sending(k - 1)]))]
        )
        loads[k] = total([load, sending, cuts.gradient_time(k), cuts.activation_time(k - 1)])
    for stages in problem.stages_by_device:
        program.require(program.goal, at_least=total(loads[k] for k in stages))


def compute_time(choices: Choices, k: int, *, figures: LayerSeconds, unit_s: float) -> Expression:
    """What stage k computes for a micro-batch, in units."""
    problem, scale = figures.problem, 1.0 / figures.problem.speed(k) / unit_s
    overheads_s = (2 + problem.split_shares[k]) * figures.overhead_s
    ends = [(overheads_s * scale, 1), (figures.loss_compute_s(k) * scale, k == choices.stages[-1])]
    return weighted([(1.0, choices.sum_on(k, (figures.compute_s(k) * scale).tolist())), *ends])


@dataclass(frozen=True)
class StepTimeRows:
    """Writes the step's time into a program."""

    program: Program
    choices: Choices
    cuts: Cuts
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
        require, time = self.program.require, cache(self._time)
        for order in schedule.orders:
            for before, action in zip([None, *order[:-1]], order, strict=True):
                duration = time(action.stage, self._duration_name(action))
                require(ends[action], at_least=total([ends[before] if before else 0, duration]))
                needed = needs.get(action)
                if needed is not None and needed.stage != action.stage:
                    way = "activation" if needed.kind is ActionKind.FORWARD else "gradient"
                    arrival = total([ends[needed], time(min(needed.stage, action.stage), way), duration])
                    require(ends[action], at_least=arrival)
            updates = [time(k, "update") for k in sorted({action.stage for action in order})]
            require(self.program.goal, at_least=total([ends[order[-1]], *updates]))

    def _duration_name(self, action: Action) -> str:
        """Which of a stage's times an action takes, as in the simulator."""
        kind, is_first_stage = action.kind, action.stage == 0
        if kind is ActionKind.FORWARD:
            return "forward"
        if kind is ActionKind.INPUT_GRADIENT and is_first_stage:
            return "nothing"
        if kind is ActionKind.WEIGHT_GRADIENT and not is_first_stage:
            return "second half"
        num_microbatches, recompute = self.problem.num_microbatches, self.problem.recompute
        again = is_recomputed(action.microbatch, num_microbatches=num_microbatches, recompute=recompute)
        name = "first half" if kind is ActionKind.INPUT_GRADIENT else "backward"
        return f"{name} again" if again else name

    def _time(self, k: int, name: str) -> Expression:
        """One of the times of stage k, in units."""
        figures, (loss_forward_s, loss_backward_s) = self.figures, self.figures.loss_s
        first_s, second_s = figures.halves_s
        if name == "nothing":
            return 0.0
        if name in ("activation", "gradient", "update"):
            of = {"activation": self.cuts.activation_time, "gradient": self.cuts.gradient_time, "update": self._update}
            return self.program.at_least(f"{name}_time_{k}", [of[name](k)])
        of_layers, loss_s = {
            "forward": (figures.forward_s, loss_forward_s),
            "backward": (figures.backward_s, loss_backward_s),
            "first half": (first_s, figures.loss_first_half_s),
            "second half": (second_s, 0.0),
        }[name.removesuffix(" again")]
        if name.endswith(" again"):
            of_layers = of_layers + figures.recompute_s
        lasts = weighted(
            [(1.0, self._on_stage(k, of_layers, loss_s)), (1.0 / self.problem.speed(k), self._sending(k, name))]
        )
        return self.program.at_least(f"{name.replace(' ', '_')}_time_{k}", [lasts])

    def _sending(self, k: int, name: str) -> Expression:
        """What keeps the stage after such an action, on the profiled device."""
        if name == "forward":
            return self.cuts.activation_sending(k)
        return 0.0 if name == "second half" else self.cuts.gradient_sending(k - 1)

    def _on_stage(self, k: int, of_layers: Floats, loss_s: float) -> Expression:
        scale = 1.0 / self.problem.speed(k) / self.unit_s
        fixed = [(self.figures.overhead_s * scale, 1), (loss_s * scale, k == self.choices.stages[-1])]
        return weighted([(1.0, self.choices.sum_on(k, (of_layers * scale).tolist())), *fixed])

    def _update(self, k: int) -> Expression:
        costs, scale = self.figures.costs, 1.0 / self.problem.speed(k) / self.unit_s
        optimizer = [
            (costs.optimizer_bytes_s * scale, self.weights.trained_share(k)),
            (costs.tensor_s * scale, self.weights.num_trained(k)),
            (costs.around_s * scale if k == 0 else 0.0, 1),
        ]
        return total([weighted(optimizer), self._tied(k), self._replicas(k)])

    def _tied(self, k: int) -> Expression:
        """Summing the gradients of tied weights, as `Problem.all_reduce_s`."""
        if not self.problem.tied_links:
            return 0.0
        amount = Amount(
            num_bytes=weighted([(0.5, self.weights.tied_bytes(k))]),
            is_any=self.weights.is_any_tied(k),
            most_bytes=0.5 * sum(x.gradient_bytes for x in self.figures.costs.profile.shared_weights),
        )
        messages = [
            weighted([(2.0, transfer(self.program, f"sum_{k}_{i}", link=link, amount=amount, unit_s=self.unit_s))])
            for i, link in enumerate(self.problem.tied_links)
        ]
        return messages[0] if len(messages) == 1 else self.program.at_least(f"sum_{k}", messages)

    def _replicas(self, k: int) -> Expression:
        """Summing the gradients of replicas."""
        num_replicas, profile = self.problem.num_replicas, self.figures.costs.profile
        if num_replicas == 1:
            return 0.0
        amount = Amount(
            num_bytes=weighted([(1.0 / num_replicas, self.weights.trained_bytes(k))]),
            is_any=self.weights.is_any_trained(k),
            most_bytes=profile.trained_bytes / num_replicas,
        )
        message = transfer(self.program, f"reduce_{k}", link=profile.link, amount=amount, unit_s=self.unit_s)
        return weighted([(2.0 * (num_replicas - 1), message)])
