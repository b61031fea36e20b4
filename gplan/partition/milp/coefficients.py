"""What each layer adds to its stage, and the loss to the last one: the constants of the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from gplan.core import Profile
from gplan.cost.stage_table import StageTable
from gplan.graph.down_sets import Floats, Waiting
from gplan.partition.milp.assignment import StageAssignment
from gplan.partition.milp.program import Expression, LinearProgram, total, weighted
from gplan.partition.problem import Problem


class ParameterBytes:
    """Weights and gradients of every stage; a shared weight counts once where any of its users is (0 <= u <= 1)."""

    def __init__(
        self, program: LinearProgram, choices: StageAssignment, profile: Profile, waiting: Sequence[Waiting]
    ) -> None:
        self._program, self._choices, self._profile, self._waiting = program, choices, profile, waiting
        self._shared_on, self._tied_on = cache(self._add_shared), cache(self._add_tied)
        self._any_tied, self._waits_between = cache(self._add_any_tied), cache(self._add_waits_between)

    def tied_bytes(self, k: int) -> Expression:
        """Bytes of the gradients on stage k of shared weights that other stages use too."""
        pairs = zip(self._profile.shared_weights, self._tied_on(k), strict=True)
        return weighted((weight.gradient_bytes, is_tied) for weight, is_tied in pairs)

    def waiting_bytes(self, v: int, k: int) -> Expression:
        """Bytes of gradients of shared weights that wait while layer v of stage k runs backward; 0 or less if it is elsewhere.

        A gradient waits between two layers that use the weight. With a and b whether any user up to v and any user
        behind v is on stage k, w >= a + b - 1 says that it waits.
        """
        is_on = self._choices.is_on(v, k)
        return weighted(
            term
            for users, num_bytes in self._waiting
            if users[0] <= v < users[-1]
            for term in ((num_bytes, self._waits(users, v, k)), (num_bytes, is_on), (-num_bytes, 1.0))
        )

    def _waits(self, users: tuple[int, ...], v: int, k: int) -> Expression:
        return self._waits_between(users, sum(x <= v for x in users), k)

    def _add_waits_between(self, users: tuple[int, ...], num_before: int, k: int) -> Expression:
        name = f"{'_'.join(map(str, users))}_{num_before}_{k}"
        before, behind = (
            self._program.at_least(f"{side}_{name}", [self._choices.is_on(x, k) for x in some], high=1)
            for side, some in (("before", users[:num_before]), ("behind", users[num_before:]))
        )
        row = weighted([(1.0, before), (1.0, behind), (-1.0, 1.0)])
        return self._program.at_least(f"waits_{name}", [row], high=1)

    def is_any_tied(self, k: int) -> Expression:
        """1 where stage k holds any such gradient, else 0."""
        return self._any_tied(k)

    def _add_any_tied(self, k: int) -> Expression:
        pairs = zip(self._profile.shared_weights, self._tied_on(k), strict=True)
        tied = [is_tied for weight, is_tied in pairs if weight.gradient_bytes]
        found = self._program.at_least(f"tied_{k}", tied, high=1)
        self._program.require(total(tied), at_least=found)
        return found

    def trained_share(self, k: int) -> Expression:
        """Which share of the model's trained bytes a replica updates on stage k."""
        return weighted([(1.0 / (self._profile.trained_bytes or 1), self.held_sum(k, "updated_bytes"))])

    def update_share(self, k: int) -> Expression:
        """As `StageTable.update_share`."""
        return weighted([(1.0 / self._profile.whole_update_amount, self.held_sum(k, "update_amount"))])

    def largest_bytes(self, k: int, field: str) -> Expression:
        """The largest number of the layers and shared weights on stage k, one row for each that may be."""
        sizes = [(self._choices.is_on(v, k), getattr(x, field)) for v, x in enumerate(self._profile.layers)]
        shared = zip(self._profile.shared_weights, self._shared_on(k), strict=True)
        sizes += [(held, getattr(x, field)) for x, held in shared]
        most = max((size for _, size in sizes), default=0) or 1
        rows = [weighted([(size / most, is_on)]) for is_on, size in sizes if size]
        return weighted([(most, self._program.at_least(f"{field}_{k}", rows, high=1))])

    def is_any_trained(self, k: int) -> Expression:
        """Whether anything on stage k is trained."""
        own = [self._choices.is_on(v, k) for v, layer in enumerate(self._profile.layers) if layer.gradient_bytes]
        pairs = zip(self._profile.shared_weights, self._shared_on(k), strict=True)
        shared = [held for weight, held in pairs if weight.gradient_bytes]
        return self._program.at_least(f"trained_{k}", own + shared, high=1)

    def held_sum(self, k: int, field: str) -> Expression:
        """A field of layers and shared weights, summed over those on stage k."""
        own = self._choices.sum_on(k, [getattr(layer, field) for layer in self._profile.layers])
        pairs = zip(self._profile.shared_weights, self._shared_on(k), strict=True)
        return weighted([(1.0, own), *((getattr(weight, field), held) for weight, held in pairs)])

    def _add_tied(self, k: int) -> list[Expression]:
        """Of every shared weight whether stage k holds it and not all of its users: t >= u - x[user, k] for each.

        No more than u, or than the number of users elsewhere, because a tied weight can make an update shorter.
        """
        found = []
        for i, (x, held) in enumerate(zip(self._profile.shared_weights, self._shared_on(k), strict=True)):
            tied = self._program.at_least(f"t_{i}_{k}", [self._less(held, v, k) for v in x.layers], high=1)
            elsewhere = weighted([(1.0, len(x.layers)), *((-1.0, self._choices.is_on(v, k)) for v in x.layers)])
            for most in (held, elsewhere):
                self._program.require(most, at_least=tied)
            found.append(tied)
        return found

    def _less(self, held: Expression, layer: int, k: int) -> Expression:
        return weighted([(1.0, held), (-1.0, self._choices.is_on(layer, k))])

    def _add_shared(self, k: int) -> list[Expression]:
        """Of every shared weight whether any of its users is on stage k."""
        found = []
        for i, x in enumerate(self._profile.shared_weights):
            on_stage = [self._choices.is_on(v, k) for v in x.layers]
            found.append(self._program.at_least(f"u_{i}_{k}", on_stage, high=1))
            self._program.require(total(on_stage), at_least=found[-1])
        return found


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one micro-batch on the profiled device, as the evaluator has them: of each layer, and of the loss."""

    problem: Problem

    @cached_property
    def costs(self) -> StageTable:
        """The costs with the layers in the profile's order."""
        return replace(self.problem.costs, given_downsets=None)

    def of(self, name: str) -> tuple[Floats, float]:
        """[L] and the loss: the seconds by the method of `StageTable` with this name, without the stage's overhead."""
        places, everything = np.arange(self.costs.num_layers), self.costs.all_layers
        whole, of_layers = getattr(self.costs, name), getattr(self._without_loss, name)
        return of_layers(places, places + 1), float(whole(*everything)[0] - of_layers(*everything)[0])

    @cached_property
    def _without_loss(self) -> StageTable:
        return replace(self.costs, profile=replace(self.costs.profile, loss=()))
