"""Which device of a machine holds which stage: every arrangement that differs, the most promising first.

Arrangements that give every stage the same speed and memory and every cut the same link are one. Each is bounded by its
smallest largest stage, which is found in milliseconds; those that could still beat the best plan are solved in the order
of that bound until none is left or the time is up, when the bound of the best one left out limits the proof. Exact, but
for machines with more than `MOST_ARRANGEMENTS` arrangements: then those are looked at that keep the devices of a host
together, and a note says so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, permutations

from gplan.balancer.largest import smallest_largest
from gplan.balancer.price import Problem, Solution
from gplan.errors import UsageError
from gplan.nouns import Link, Machine, Place

MOST_ARRANGEMENTS = 5040

_SECONDS = 20.0

Solve = Callable[[Problem], Solution | None]
"""The best partition of a problem whose places are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A problem with its devices, and its best partition."""

    problem: Problem
    solution: Solution


def best_placement(
    problem: Problem, machine: Machine, solve: Solve, *, objective_s: Callable[[Problem, Solution], float]
) -> Placed | None:
    """The best arrangement and partition; None where no arrangement fits the memory.

    Raises UsageError where the machine has fewer devices than there are stages.
    """
    if len(machine.places) < problem.num_stages:
        raise UsageError(
            f"the machine has {len(machine.places)} devices; {problem.num_stages} stages need as many "
            f"(try --k {len(machine.places)})"
        )
    found = list(islice(arrangements(machine, problem.num_stages), MOST_ARRANGEMENTS + 1))
    is_all = len(found) <= MOST_ARRANGEMENTS
    if not is_all:
        found = list(islice(host_by_host(machine, problem.num_stages), MOST_ARRANGEMENTS))
    bounded = sorted(_bounded(problem, machine, found), key=lambda pair: pair[0])
    return _search(bounded, solve, objective_s, is_all=is_all)


def arrangements(machine: Machine, num_stages: int) -> Iterator[tuple[Place, ...]]:
    """Every ordered choice of devices that differs in speeds, memories or links from those before it."""
    seen: set[object] = set()

    def grow(chosen: tuple[Place, ...]) -> Iterator[tuple[Place, ...]]:
        if len(chosen) == num_stages:
            yield chosen
            return
        for place, _ in _kinds_left(machine, chosen):
            longer = (*chosen, place)
            look = (_look(machine, longer), _left(machine, longer))
            if look not in seen:
                seen.add(look)
                yield from grow(longer)

    return grow(())


def host_by_host(machine: Machine, num_stages: int) -> Iterator[tuple[Place, ...]]:
    """Arrangements that visit each host once, its devices by falling memory, in every order of the hosts."""
    hosts = list(dict.fromkeys(place.host for place in machine.places))
    seen: set[object] = set()
    for order in permutations(hosts):
        devices = [x for host in order for x in _by_memory(machine, host)][:num_stages]
        look = _look(machine, devices)
        if look not in seen:
            seen.add(look)
            yield tuple(devices)


def _by_memory(machine: Machine, host: str) -> list[Place]:
    there = [place for place in machine.places if place.host == host]
    return sorted(there, key=lambda place: -(place.memory_bytes or 0))


def _look(machine: Machine, places: Sequence[Place]) -> tuple[object, ...]:
    """What the costs see of an arrangement."""
    devices = tuple((place.speed, place.memory_bytes) for place in places)
    return devices, tuple(machine.link(a, b) for a, b in pairwise(places))


def _left(machine: Machine, places: Sequence[Place]) -> tuple[object, ...]:
    """What can still follow: the devices that are left, by their links from the last one and among each other."""
    rest = _kinds_left(machine, places)
    hosts = list(dict.fromkeys(place.host for place, _ in rest))
    ahead = sorted(
        repr((x.speed, x.memory_bytes, machine.link(places[-1], x), hosts.index(x.host), count)) for x, count in rest
    )
    return tuple(ahead), places[-1].host in hosts


def _kinds_left(machine: Machine, places: Sequence[Place]) -> list[tuple[Place, int]]:
    """Of the devices that are left, the first of those that nothing tells apart, and how many they are."""
    used = {place.name for place in places}
    rest = [place for place in machine.places if place.name not in used]
    kinds = [(place.host, place.speed, place.memory_bytes) for place in rest]
    counts, first = Counter(kinds), dict(zip(reversed(kinds), reversed(rest), strict=True))
    return [(first[kind], count) for kind, count in counts.items()]


def _bounded(problem: Problem, machine: Machine, found: Sequence[tuple[Place, ...]]) -> Iterator[tuple[float, Problem]]:
    """Each arrangement as a problem, with what its objective is at least; those without a partition are left out."""
    for places in found:
        links: tuple[Link, ...] = tuple(machine.link(a, b) for a, b in pairwise(places))
        there = replace(problem, places=places, links=links)
        largest = smallest_largest(there)
        if largest is not None:
            yield _at_least_s(there, largest), there


def _at_least_s(problem: Problem, largest: Solution) -> float:
    """A load contains half of each transfer of a stage, which may overlap with computing; computing alone may not."""
    if problem.minimize != "step-time":
        return largest.lower_bound_s
    alone = smallest_largest(replace(problem, minimize="max-compute"))
    assert alone is not None, "there is a partition"
    return problem.num_microbatches * alone.lower_bound_s


def _search(
    bounded: Sequence[tuple[float, Problem]],
    solve: Solve,
    objective_s: Callable[[Problem, Solution], float],
    *,
    is_all: bool,
) -> Placed | None:
    deadline_s = time.perf_counter() + _SECONDS
    best: Placed | None = None
    best_s = lower_s = float("inf")
    num_solved = 0
    for bound_s, problem in bounded:
        if best is not None and (bound_s >= best_s or time.perf_counter() > deadline_s):
            lower_s = min(lower_s, bound_s)
            break
        solution = solve(problem)
        assert solution is not None, "an arrangement without a partition is left out"
        num_solved += 1
        lower_s = min(lower_s, solution.lower_bound_s)
        if objective_s(problem, solution) < best_s:
            best, best_s = Placed(problem=problem, solution=solution), objective_s(problem, solution)
    if best is None:
        return None
    return replace(best, solution=_noted(best.solution, lower_s, num_solved, len(bounded), is_all=is_all))


def _noted(solution: Solution, lower_s: float, num_solved: int, num_known: int, *, is_all: bool) -> Solution:
    notes = solution.notes
    if num_known > 1:
        notes = (*notes, f"{num_known} arrangements of the devices were bounded, {num_solved} of them solved")
    if not is_all:
        notes = (
            *notes,
            "the machine has too many arrangements: only those that keep each host together were looked at",
        )
        lower_s = 0.0
    return replace(solution, lower_bound_s=min(solution.lower_bound_s, lower_s), notes=notes)
