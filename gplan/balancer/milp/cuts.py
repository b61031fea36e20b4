"""What crosses the cut after a stage, as expressions: bytes and seconds in both directions.

In a chain every cut is one of L-1 known ones, so what crosses it is a constant of the last layer before it. In a graph
each value crosses or not: with one last reader c[value, k] = y[producer, k] - y[reader, k], with several a variable of
at least each of these, so that a value that many read is sent once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from gplan.balancer.milp.choices import Choices
from gplan.balancer.milp.program import Expression, Program, weighted
from gplan.balancer.milp.routes import Route, always_sent, routes_of
from gplan.balancer.milp.transfers import Amount, transfer
from gplan.balancer.problem import Problem
from gplan.costs import Costs
from gplan.nouns import Link


class Cuts(Protocol):
    """The cut after each stage; nothing crosses before stage 0 and after the last."""

    def activation_bytes(self, k: int) -> Expression:
        """Bytes that cross on the way forward."""
        ...

    def gradient_bytes(self, k: int) -> Expression:
        """Bytes that cross on the way back."""
        ...

    def unsaved_bytes(self, k: int) -> Expression:
        """Of the activations, what no layer keeps."""
        ...

    def kept_bytes(self, k: int) -> Expression:
        """The activations; after the last stage the outputs that the loss keeps."""
        ...

    def activation_time(self, k: int) -> Expression:
        """To send the activations forward, in units."""
        ...

    def gradient_time(self, k: int) -> Expression:
        """To send the gradients back, in units."""
        ...

    def activation_sending(self, k: int) -> Expression:
        """For how long sending the activations keeps the stage before the cut on the profiled device, in units."""
        ...

    def gradient_sending(self, k: int) -> Expression:
        """For how long sending the gradients keeps the stage after the cut on the profiled device, in units."""
        ...


@dataclass(frozen=True)
class SentCuts:
    """The same cuts, over which nothing is sent where the stages on both sides are on one device."""

    cuts: Cuts
    problem: Problem

    def activation_bytes(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self.cuts.activation_bytes(k) if self._is_sent(k) else 0.0

    def gradient_bytes(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self.cuts.gradient_bytes(k) if self._is_sent(k) else 0.0

    def unsaved_bytes(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self.cuts.unsaved_bytes(k)

    def kept_bytes(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self.cuts.kept_bytes(k)

    def activation_time(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self.cuts.activation_time(k) if self._is_sent(k) else 0.0

    def gradient_time(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self.cuts.gradient_time(k) if self._is_sent(k) else 0.0

    def activation_sending(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self.cuts.activation_sending(k) if self._is_sent(k) else 0.0

    def gradient_sending(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self.cuts.gradient_sending(k) if self._is_sent(k) else 0.0

    def _is_sent(self, k: int) -> bool:
        return k >= 0 and self.problem.apart(k).after


@dataclass(frozen=True)
class ChainCuts:
    """The cuts of a chain, of which `costs` knows all."""

    problem: Problem
    costs: Costs  # with the layers in the profile's order
    choices: Choices
    unit_s: float

    def activation_bytes(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._at(k, self.costs.activation_bytes.tolist())

    def gradient_bytes(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._at(k, self.costs.gradient_bytes.tolist())

    def unsaved_bytes(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._at(k, self.costs.crossing.unsaved_bytes.tolist())

    def kept_bytes(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._at(k, self.costs.crossing.kept_bytes.tolist())

    def activation_time(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._at(k, (self.costs.activation_s(self.problem.link_after(k)) / self.unit_s).tolist())

    def gradient_time(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._at(k, (self.costs.gradient_s(self.problem.link_after(k)) / self.unit_s).tolist())

    def activation_sending(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._at(k, (self.costs.activation_sending_s / self.unit_s).tolist())

    def gradient_sending(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._at(k, (self.costs.gradient_sending_s / self.unit_s).tolist())

    def _at(self, k: int, at_positions: Sequence[float]) -> Expression:
        return self.choices.at_cut(k, at_positions[1:]) if k >= 0 else 0.0


class GraphCuts:
    """The cuts of a graph, by the values that its layers hand to each other."""

    def __init__(self, program: Program, problem: Problem, costs: Costs, choices: Choices, unit_s: float) -> None:
        self._program, self._problem, self._choices, self._unit_s = program, problem, choices, unit_s
        self._routes = routes_of(costs, choices.reach)
        self._always = {way: always_sent(costs, choices.reach, way=way) for way in ("activation", "gradient")}
        self._at_end = float(costs.crossing.kept_bytes[-1])
        self._crossing, self._is_any = cache(self._add_crossing), cache(self._add_is_any)
        self._sending = cache(self._add_sending)

    def activation_bytes(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._sum(k, [(route.activation_bytes, route) for route in self._routes])

    def gradient_bytes(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._sum(k, [(route.gradient_bytes, route) for route in self._routes])

    def unsaved_bytes(self, k: int) -> Expression:
        """As in `Cuts`."""
        if k == self._choices.num_stages - 1:
            return 0.0
        return self._sum(k, [(route.unsaved_bytes, route) for route in self._routes])

    def kept_bytes(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._at_end if k == self._choices.num_stages - 1 else self.activation_bytes(k)

    def activation_time(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._time(k, "activation")

    def gradient_time(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._time(k, "gradient")

    def activation_sending(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._sending(k, "activation")

    def gradient_sending(self, k: int) -> Expression:
        """As in `Cuts`."""
        return self._sending(k, "gradient")

    def _time(self, k: int, way: str) -> Expression:
        given = self._sum(k, [(route.given_s_of(way) / self._unit_s, route) for route in self._routes])
        return weighted([(1.0, self._moved(k, way, f"{way}_{k}", self._problem.link_after(k))), (1.0, given)])

    def _add_sending(self, k: int, way: str) -> Expression:
        engine = self._problem.costs.profile.engine
        return self._moved(k, way, f"{way}_sending_{k}", engine.sending) if engine else 0.0

    def _moved(self, k: int, way: str, name: str, link: Link) -> Expression:
        """The seconds that the link takes for what goes that way over the cut."""
        if not self._is_inside(k):
            return 0.0
        sizes = [(route.bytes_of(way), route) for route in self._routes]
        amount = Amount(
            num_bytes=self._sum(k, sizes),
            is_any=1 if self._always[way] else self._is_any(k, way),
            most_bytes=sum(num_bytes for num_bytes, _ in sizes),
        )
        return transfer(self._program, name, link=link, amount=amount, unit_s=self._unit_s)

    def _add_is_any(self, k: int, way: str) -> Expression:
        crossing = (self._crossing(route, k) for route in self._routes if route.bytes_of(way))
        return self._program.at_least(f"any_{way}_{k}", crossing, high=1)

    def _is_inside(self, k: int) -> bool:
        return 0 <= k < self._choices.num_stages - 1

    def _sum(self, k: int, terms: Sequence[tuple[float, Route]]) -> Expression:
        if not self._is_inside(k):
            return 0.0
        return weighted((factor, self._crossing(route, k)) for factor, route in terms if factor)

    def _add_crossing(self, route: Route, k: int) -> Expression:
        """c[route, k]: whether what takes this way crosses the cut after stage k."""
        y, producer = self._choices.up_to, route.producer
        made = 1 if producer is None else y(producer, k)
        if route.is_gradient:
            differences = [weighted([(1.0, y(x, k)), (-1.0, made)]) for x in route.readers]
        else:
            differences = [weighted([(1.0, made), (-1.0, y(x, k))]) for x in route.readers]
        if len(differences) == 1 and route.is_ordered:
            return differences[0]
        return self._program.at_least(f"crossing_{self._routes.index(route)}_{k}", differences, high=1)
