"""What crosses both cuts of a stage: activations, which it holds once, and gradients to which it adds nothing, copied.

For each way that values take and each stage k a variable says that the activation does not pass,
    n >= 1 - y[producer, k-1]                                 not made before the stage
    n >= y[reader, k] + ... + y[last reader, k] - (R - 1)     read by all R before the next one
and one that the gradient does, a row for each reader r that may come behind the stage while no other q is on it:
    m >= y[producer, k-1] - y[r, k] - sum of (y[q, k] - y[q, k-1]) over all q but r
"""

from __future__ import annotations

from functools import cache

from gplan.balancer.milp.choices import Choices
from gplan.balancer.milp.program import Expression, Program, weighted
from gplan.balancer.milp.routes import routes_of
from gplan.balancer.problem import Problem
from gplan.costs import Costs
from gplan.downsets import Way


class Passing:
    """Bytes that only pass a stage, for every stage."""

    def __init__(self, program: Program, problem: Problem, costs: Costs, choices: Choices) -> None:
        self._program, self._problem, self._choices = program, problem, choices
        self._routes = [x for x in routes_of(costs, choices.reach) if not x.is_gradient]
        self._gradients = list(zip(*costs.passing.gradient_ways, strict=True))
        self._stays, self._returns = cache(self._add_stays), cache(self._add_returns)

    def activation_bytes(self, k: int) -> Expression:
        """Of the activations that cross both cuts of stage k, where the stage before is on another device."""
        return self._activations(k, [x.activation_bytes for x in self._routes])

    def unsaved_bytes(self, k: int) -> Expression:
        """Of them, what no layer keeps."""
        return self._activations(k, [x.unsaved_bytes for x in self._routes])

    def gradient_bytes(self, k: int) -> Expression:
        """Of the gradients that only pass stage k."""
        if not self._is_inside(k):
            return 0.0
        return weighted(
            (float(size), self._returns(i, k)) for i, (way, size) in enumerate(self._gradients) if self._may_pass(way)
        )

    def _activations(self, k: int, sizes: list[int]) -> Expression:
        if not self._is_inside(k) or not self._problem.apart(k).before:
            return 0.0
        passing = (i for i, x in enumerate(self._routes) if sizes[i] and self._may_pass((x.producer, x.readers)))
        return weighted(x for i in passing for x in ((float(sizes[i]), 1.0), (-float(sizes[i]), self._stays(i, k))))

    def _is_inside(self, k: int) -> bool:
        return 0 < k < self._problem.num_stages - 1

    def _may_pass(self, way: Way) -> bool:
        """Of a chain only what is read further on."""
        made, read = way
        return not self._choices.reach.is_chain or max(read) > (-1 if made is None else made) + 1

    def _add_stays(self, route: int, k: int) -> Expression:
        producer, readers, y = self._routes[route].producer, self._routes[route].readers, self._choices.up_to
        not_made = 0.0 if producer is None else weighted([(1.0, 1.0), (-1.0, y(producer, k - 1))])
        read = weighted([*((1.0, y(x, k)) for x in readers), (1.0 - len(readers), 1.0)])
        return self._program.at_least(f"stays_{route}_{k}", [not_made, read], high=1)

    def _add_returns(self, way: int, k: int) -> Expression:
        (producer, readers), _ = self._gradients[way]
        made = 1.0 if producer is None else self._choices.up_to(producer, k - 1)
        on_stage = {x: self._choices.is_on(x, k) for x in readers if x < self._choices.reach.num_layers}
        rows = [
            weighted([
                (1.0, made),
                (-1.0, self._choices.up_to(reader, k)),
                *((-1.0, is_on) for other, is_on in on_stage.items() if other != reader),
            ])
            for reader in readers
        ]  # fmt: skip
        return self._program.at_least(f"returns_{way}_{k}", rows, high=1)
