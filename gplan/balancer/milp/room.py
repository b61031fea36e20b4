"""The memory of the devices as rows: one for every stage and moment of its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gplan.balancer.milp.choices import Choices
from gplan.balancer.milp.cuts import Cuts
from gplan.balancer.milp.figures import Figures
from gplan.balancer.milp.program import Expression, Program, total, weighted
from gplan.balancer.milp.weights import Weights
from gplan.balancer.price import moments_of
from gplan.memory import StageBytes, moment_bytes

_WORKSPACES = ("forward_workspace", "backward_workspace", "recompute_workspace")


@dataclass(frozen=True)
class Room:
    """Writes the memory limits into a program."""

    program: Program
    choices: Choices
    cuts: Cuts
    weights: Weights
    figures: Figures

    def add(self) -> None:
        """Every stage fits its device."""
        problem = self.figures.problem
        for k in self.choices.stages:
            limit_bytes = problem.memory_of(k)
            if limit_bytes is None:
                continue
            if problem.minimize == "max-device-load":
                self._require(self.weights.weight_bytes(k), limit_bytes)
            else:
                self._add_moments(k, limit_bytes)

    def _add_moments(self, k: int, limit_bytes: int) -> None:
        moments = moments_of(self.figures.problem, k)
        parts = self._parts(k, limit_bytes, used={moment.workspace for moment in moments})
        for moment in moments:
            self._require(moment_bytes(moment, parts), limit_bytes)

    def _require(self, num_bytes: Expression, limit_bytes: int) -> None:
        """A byte is left for rounding in the shares of the optimizer."""
        held = weighted([(1.0 / limit_bytes, num_bytes)])
        self.program.require(1.0 + 1.0 / limit_bytes, at_least=held)

    def _parts(self, k: int, limit_bytes: int, *, used: set[str]) -> StageBytes[Expression]:
        """The parts of the memory of stage k, as `Costs.parts` has them."""
        cuts, costs, step = self.cuts, self.figures.costs, self.figures.costs.profile.step
        loss = weighted([(costs.loss.stash_bytes if costs.loss else 0, self.choices.is_last(k))])
        received = total([cuts.activation_bytes(k - 1), cuts.gradient_bytes(k)])
        share = self.weights.trained_share(k)
        stash = self.choices.sum_on(k, [x.stash_bytes for x in costs.layer_costs])
        return StageBytes(
            weight=self.weights.weight_bytes(k),
            gradient=self.weights.trained_bytes(k),
            optimizer=weighted([(step.state_bytes, share)]),
            stash=total([stash, cuts.unsaved_bytes(k), loss]),
            checkpoint=total([cuts.kept_bytes(k), loss]),
            pending=0.0,
            sent=total([cuts.activation_bytes(k), cuts.gradient_bytes(k - 1)]),
            optimizer_workspace=weighted([(step.workspace_bytes, share)]),
            buffer=weighted([(costs.num_microbatches, received)]),
            **{name: self._workspace(k, name, limit_bytes) if name in used else 0.0 for name in _WORKSPACES},
        )

    def _workspace(self, k: int, name: str, limit_bytes: int) -> Expression:
        if name == "recompute_workspace":
            return self._alone(k, limit_bytes)
        return self._above_stash(k, f"{name}_bytes", limit_bytes)

    def _above_stash(self, k: int, field: str, limit_bytes: int) -> Expression:
        """The most that stage k holds while a layer runs, above the stash of all of them: layer by layer, each at least
        what was held before without the layer's own stash, and the layer's workspace.
        """
        loss, layer_costs = self.figures.costs.loss, self.figures.costs.layer_costs
        held: Expression = 0.0
        for v, cost in enumerate(layer_costs):
            is_on = self.choices.is_on(v, k)
            after = weighted([(1.0, held), (-cost.stash_bytes / limit_bytes, is_on)])
            own = weighted([(getattr(cost, field) / limit_bytes, is_on)])
            held = self.program.at_least(f"{field}_{v}_{k}", [after, own])
        if loss:
            is_last = self.choices.is_last(k)
            after = weighted([(1.0, held), (-loss.stash_bytes / limit_bytes, is_last)])
            own = weighted([(getattr(loss, field) / limit_bytes, is_last)])
            held = self.program.at_least(f"{field}_loss_{k}", [after, own])
        return weighted([(limit_bytes, held)])

    def _alone(self, k: int, limit_bytes: int) -> Expression:
        """The most that a layer of stage k, or the loss, holds in a forward that keeps nothing."""
        costs, is_on = self.figures.costs, self.choices.is_on
        sizes = [x.stash_bytes + x.forward_workspace_bytes for x in costs.layer_costs]
        rows: Sequence[Expression] = [weighted([(x / limit_bytes, is_on(v, k))]) for v, x in enumerate(sizes)]
        loss_bytes = costs.loss.forward_workspace_bytes if costs.loss else 0
        at_loss = weighted([(loss_bytes / limit_bytes, self.choices.is_last(k))])
        return weighted([(limit_bytes, self.program.at_least(f"alone_{k}", [*rows, at_loss]))])
