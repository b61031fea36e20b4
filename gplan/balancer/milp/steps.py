"""The step's time as the goal: an end for every action of the schedule, whichever it is, and the updates after them.

An action ends its own duration after the action before it on its device, and after the arrival of its input: the last
end is a longest path, as the simulator walks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gplan.balancer.milp.choices import Choices
from gplan.balancer.milp.cuts import Cuts
from gplan.balancer.milp.figures import Figures
from gplan.balancer.milp.program import Expression, Program, total, weighted
from gplan.balancer.milp.transfers import Amount, transfer
from gplan.balancer.milp.weights import Weights
from gplan.balancer.problem import Problem
from gplan.downsets import Floats
from gplan.nouns import Action, ActionKind
from gplan.schedules import needs_of
from gplan.simulator import is_recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The variables of one stage's times, as in `StageCost`, in units."""

    forward: Expression
    backward: Expression
    again: Expression  # a backward that recomputes
    update: Expression  # all-reduce and optimizer
    activation: Expression  # to the next stage
    gradient: Expression  # from the next stage


@dataclass(frozen=True)
class Steps:
    """Writes the step's time into a program."""

    program: Program
    choices: Choices
    cuts: Cuts
    weights: Weights
    figures: Figures
    unit_s: float

    @property
    def problem(self) -> Problem:
        """What is balanced."""
        return self.figures.problem

    def add(self) -> None:
        """The goal is the end of the step, in units."""
        schedule = self.problem.made_schedule
        needs = needs_of([x for order in schedule.orders for x in order], schedule.num_stages)
        times = [self._times(k) for k in self.choices.stages]
        ends = {action: self.program.variable(f"end_{action}") for order in schedule.orders for action in order}
        require = self.program.require
        for order in schedule.orders:
            for before, action in zip([None, *order[:-1]], order, strict=True):
                duration = self._duration(action, times)
                require(ends[action], at_least=total([ends[before] if before else 0, duration]))
                needed = needs.get(action)
                if needed is not None:
                    arrival = total([ends[needed], _transfer(needed, action, times), duration])
                    require(ends[action], at_least=arrival)
            updates = [times[k].update for k in sorted({action.stage for action in order})]
            require(self.program.goal, at_least=total([ends[order[-1]], *updates]))

    def _times(self, k: int) -> Times:
        figures, (loss_forward_s, loss_backward_s) = self.figures, self.figures.loss_s
        forward = self._on_stage(k, figures.forward_s, figures.overhead_s, loss_forward_s)
        backward = self._on_stage(k, figures.backward_s, figures.overhead_s, loss_backward_s)
        again = self._on_stage(k, figures.backward_s + figures.recompute_s, figures.overhead_s, loss_backward_s)
        times = {"forward": forward, "backward": backward, "again": again, "update": self._update(k)}
        sent = {"activation": self.cuts.activation_time(k), "gradient": self.cuts.gradient_time(k)}
        return Times(**{
            name: self.program.at_least(f"{name}_time_{k}", [time]) for name, time in {**times, **sent}.items()
        })  # fmt: skip

    def _on_stage(self, k: int, of_layers: Floats, overhead_s: float, loss_s: float) -> Expression:
        scale = 1.0 / self.problem.speed(k) / self.unit_s
        fixed = [(overhead_s * scale, 1), (loss_s * scale, self.choices.is_last(k))]
        return weighted([(1.0, self.choices.sum_on(k, (of_layers * scale).tolist())), *fixed])

    def _update(self, k: int) -> Expression:
        optimizer_s = self.figures.costs.optimizer_total_s / self.problem.speed(k) / self.unit_s
        optimizer = (optimizer_s, self.weights.trained_share(k))
        num_replicas, profile = self.problem.num_replicas, self.figures.costs.profile
        if num_replicas == 1:
            return weighted([optimizer])
        amount = Amount(
            num_bytes=weighted([(1.0 / num_replicas, self.weights.trained_bytes(k))]),
            is_any=self.weights.is_any_trained(k),
            most_bytes=profile.trained_bytes / num_replicas,
        )
        message = transfer(self.program, f"reduce_{k}", link=profile.link, amount=amount, unit_s=self.unit_s)
        return weighted([optimizer, (2.0 * (num_replicas - 1), message)])

    def _duration(self, action: Action, times: Sequence[Times]) -> Expression:
        if action.kind is ActionKind.FORWARD:
            return times[action.stage].forward
        num_microbatches, recompute = self.problem.num_microbatches, self.problem.recompute
        again = is_recomputed(action.microbatch, num_microbatches=num_microbatches, recompute=recompute)
        return times[action.stage].again if again else times[action.stage].backward


def _transfer(sent: Action, action: Action, times: Sequence[Times]) -> Expression:
    """From the end of one action until its output is where another needs it."""
    if sent.stage == action.stage:
        return 0
    return times[sent.stage].activation if sent.kind is ActionKind.FORWARD else times[action.stage].gradient
