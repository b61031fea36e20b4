"""What crosses both cuts of a stage, which holds it once: in the buffers in which it came.

For each way that values take and each stage k a variable says that it does not pass:
    n >= 1 - y[producer, k-1]                                not made before the stage
    n >= y[reader, k] + ... + y[last reader, k] - (R - 1)    read by all R before the next one

and for each way of a gradient, from a reader to the one before it or the producer, that it does pass:
    m >= y[producer, k-1] - y[reader, k]
"""

from __future__ import annotations

from functools import cache

from gplan.balancer.milp.choices import Choices
from gplan.balancer.milp.program import Expression, Program, weighted
from gplan.balancer.milp.routes import Route, routes_of
from gplan.balancer.problem import Problem
from gplan.costs import Costs


class Passing:
    """Bytes that are held once and count for both cuts, for every stage."""

    def __init__(self, program: Program, problem: Problem, costs: Costs, choices: Choices) -> None:
        self._program, self._problem, self._choices = program, problem, choices
        routes = (x for x in routes_of(costs, choices.reach) if not x.is_gradient)
        self._routes = [x for x in routes if self._may_pass(x.producer, x.readers)]
        self._gradient_ways = costs.passing.gradient_ways
        self._stays, self._returns = cache(self._add_stays), cache(self._add_returns)

    def num_bytes(self, k: int) -> Expression:
        """All that passes stage k."""
        return self._sum(k, [(x.activation_bytes, x) for x in self._routes])

    def unsaved_bytes(self, k: int) -> Expression:
        """Of it, what no layer keeps."""
        return self._sum(k, [(x.unsaved_bytes, x) for x in self._routes])

    def gradient_bytes(self, k: int) -> Expression:
        """Of the gradients that only pass stage k, from behind a reader to before the one before it: copies, if any."""
        ways, sizes = self._gradient_ways
        if not 0 < k < self._problem.num_stages - 1:
            return 0.0
        pairs = zip(range(len(ways)), sizes.tolist(), strict=True)
        return weighted((float(size), self._returns(way, k)) for way, size in pairs if self._may_pass(*ways[way]))

    def _may_pass(self, made: int | None, read: tuple[int, ...]) -> bool:
        return not self._choices.reach.is_chain or max(read) > (-1 if made is None else made) + 1

    def _sum(self, k: int, terms: list[tuple[int, Route]]) -> Expression:
        if not 0 < k < self._problem.num_stages - 1 or not self._problem.apart(k).before:
            return 0.0
        sizes = [(float(size), route) for size, route in terms if size]
        return weighted(
            pair for size, route in sizes for pair in ((size, 1.0), (-size, self._stays(self._routes.index(route), k)))
        )

    def _add_stays(self, route: int, k: int) -> Expression:
        producer, readers, y = self._routes[route].producer, self._routes[route].readers, self._choices.up_to
        not_made = 0.0 if producer is None else weighted([(1.0, 1.0), (-1.0, y(producer, k - 1))])
        read = weighted([*((1.0, y(x, k)) for x in readers), (1.0 - len(readers), 1.0)])
        return self._program.at_least(f"stays_{route}_{k}", [not_made, read], high=1)

    def _add_returns(self, way: int, k: int) -> Expression:
        (made, (read,)), y = self._gradient_ways[0][way], self._choices.up_to
        before = 1.0 if made is None else y(made, k - 1)
        return self._program.at_least(f"returns_{way}_{k}", [weighted([(1.0, before), (-1.0, y(read, k))])], high=1)
