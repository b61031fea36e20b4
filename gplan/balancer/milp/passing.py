"""What crosses both cuts of a stage, which holds it once: in the buffers in which it came.

For each way that values take and each stage k a variable says that it does not pass:
    n >= 1 - y[producer, k-1]                                not made before the stage
    n >= y[reader, k] + ... + y[last reader, k] - (R - 1)    read by all R before the next one
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
        is_chain = choices.reach.is_chain
        routes = (x for x in routes_of(costs, choices.reach) if not x.is_gradient)
        self._routes = [x for x in routes if not is_chain or max(x.readers) > _place(x) + 1]
        self._stays = cache(self._add_stays)

    def num_bytes(self, k: int) -> Expression:
        """All that passes stage k."""
        return self._sum(k, [(x.activation_bytes, x) for x in self._routes])

    def unsaved_bytes(self, k: int) -> Expression:
        """Of it, what no layer keeps."""
        return self._sum(k, [(x.unsaved_bytes, x) for x in self._routes])

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


def _place(route: Route) -> int:
    return -1 if route.producer is None else route.producer
