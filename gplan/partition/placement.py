"""Which device of a machine holds which stage: every arrangement that differs, the most promising first.

Arrangements that give every stage the same speed and memory and every cut the same link are one. Each is bounded by its
smallest largest stage, which is found in milliseconds; those that could still beat the best plan are solved in the
order of that bound until none is left or the time is up, when the bound of the best one left out limits the proof.
Exact, but for machines with more than `MOST_ARRANGEMENTS` arrangements: then those are looked at that keep the devices
of a host together, the proof holds against the best devices everywhere and free transfers, and a note says so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, permutations

from gplan.core import Link, Machine, MachineDevice
from gplan.core.errors import UsageError
from gplan.core.machine import FREE_LINK
from gplan.partition.memory_feasibility import any_fits
from gplan.partition.minimax import smallest_largest
from gplan.partition.plan_evaluation import goal_s
from gplan.partition.problem import Problem, Solution

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
    problem: Problem,
    machine: Machine,
    solve: Solve,
    *,
    time_limit_s: float | None = None,
) -> Placed | None:
    """The best arrangement and partition; None where no arrangement fits the memory. By default it takes up to 20 s.

    Raises UsageError where the machine has fewer devices than there are stages.
    """
    if len(machine.devices) < problem.num_stages:
        raise UsageError(
            f"the machine has {len(machine.devices)} devices; {problem.num_stages} stages need as many "
            f"(try --k {len(machine.devices)})"
        )
    found = list(islice(arrangements(machine, problem.num_stages), MOST_ARRANGEMENTS + 1))
    is_all = len(found) <= MOST_ARRANGEMENTS
    if not is_all:
        found = list(islice(host_by_host(machine, problem.num_stages), MOST_ARRANGEMENTS))
    deadline_s = time.perf_counter() + (_SECONDS if time_limit_s is None else time_limit_s)
    bounded, has_bounded_all = _bounded(problem, machine, found, until_s=deadline_s)
    if not bounded:
        return None
    else_s = float("inf") if is_all and has_bounded_all else _anywhere_s(problem, machine)
    return _search(bounded, solve, deadline_s=deadline_s, else_s=else_s)


def fits_machine(problem: Problem, machine: Machine, *, deadline_s: float) -> bool | None:
    """Whether any partition fits the memory of some devices of a machine; None where the time does not suffice.

    Raises TooManyCandidates where the stages that might fit are too many to be looked at.
    """
    seen: set[tuple[int | None, ...]] = set()
    for devices in arrangements(machine, problem.num_stages):
        memories = tuple(device.memory_bytes for device in devices)
        if memories in seen:
            continue
        if seen and time.perf_counter() > deadline_s:
            return None
        seen.add(memories)
        if any_fits(replace(problem, machine_devices=devices)):
            return True
    return False


def arrangements(machine: Machine, num_stages: int) -> Iterator[tuple[MachineDevice, ...]]:
    """Every ordered choice of devices that differs in speeds, memories or links from those before it."""
    seen: set[object] = set()

    def grow(chosen: tuple[MachineDevice, ...]) -> Iterator[tuple[MachineDevice, ...]]:
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


def host_by_host(machine: Machine, num_stages: int) -> Iterator[tuple[MachineDevice, ...]]:
    """Arrangements that visit each host once, its devices by falling memory, in every order of the hosts."""
    hosts = list(dict.fromkeys(place.host for place in machine.devices))
    seen: set[object] = set()
    for order in permutations(hosts):
        devices = [x for host in order for x in _by_memory(machine, host)][:num_stages]
        look = _look(machine, devices)
        if look not in seen:
            seen.add(look)
            yield tuple(devices)


def _by_memory(machine: Machine, host: str) -> list[MachineDevice]:
    there = [place for place in machine.devices if place.host == host]
    return sorted(there, key=lambda place: -(place.memory_bytes or 0))


def _look(machine: Machine, places: Sequence[MachineDevice]) -> tuple[object, ...]:
    """What the costs see of an arrangement."""
    devices = tuple((place.speed, place.memory_bytes) for place in places)
    return devices, tuple(machine.link(a, b) for a, b in pairwise(places))


def _left(machine: Machine, places: Sequence[MachineDevice]) -> tuple[object, ...]:
    """What can still follow: the devices that are left, by their links from the last one and among each other."""
    rest = _kinds_left(machine, places)
    hosts = list(dict.fromkeys(place.host for place, _ in rest))
    ahead = sorted(
        repr((x.speed, x.memory_bytes, machine.link(places[-1], x), hosts.index(x.host), count)) for x, count in rest
    )
    return tuple(ahead), places[-1].host in hosts


def _kinds_left(machine: Machine, places: Sequence[MachineDevice]) -> list[tuple[MachineDevice, int]]:
    """Of the devices that are left, the first of those that nothing tells apart, and how many they are."""
    used = {place.name for place in places}
    rest = [place for place in machine.devices if place.name not in used]
    kinds = [(place.host, place.speed, place.memory_bytes) for place in rest]
    counts, first = Counter(kinds), dict(zip(reversed(kinds), reversed(rest), strict=True))
    return [(first[kind], count) for kind, count in counts.items()]


def _bounded(
    problem: Problem, machine: Machine, found: Sequence[tuple[MachineDevice, ...]], *, until_s: float
) -> tuple[list[tuple[float, Problem]], bool]:
    """Each arrangement that has a partition as a problem, with what its objective is at least, the least first.

    And whether there was the time for all of them; one that has a partition is looked for in any case.
    """
    bounded: list[tuple[float, Problem]] = []
    for places in found:
        if bounded and time.perf_counter() > until_s:
            return sorted(bounded, key=lambda pair: pair[0]), False
        links: tuple[Link, ...] = tuple(machine.link(a, b) for a, b in pairwise(places))
        there = replace(problem, machine_devices=places, links=links)
        largest = smallest_largest(there)
        if largest is not None:
            bounded.append((_at_least_s(there, largest), there))
    return sorted(bounded, key=lambda pair: pair[0]), True


def _anywhere_s(problem: Problem, machine: Machine) -> float:
    """What the objective is at least on any arrangement: the best of all devices everywhere, and free transfers."""
    memories = [place.memory_bytes for place in machine.devices]
    most_bytes = None if None in memories else max(x for x in memories if x is not None)
    speed = max(place.speed for place in machine.devices)
    places = tuple(
        MachineDevice(name=str(i), host="", speed=speed, memory_bytes=most_bytes) for i in range(problem.num_stages)
    )
    ideal = replace(problem, machine_devices=places, links=(FREE_LINK,) * (problem.num_stages - 1))
    largest = smallest_largest(ideal)
    assert largest is not None, "some arrangement has a partition, and this one has more room"
    return _at_least_s(ideal, largest)


def _at_least_s(problem: Problem, largest: Solution) -> float:
    """A load contains half of each transfer of a stage, which may overlap with computing; computing alone may not."""
    if problem.minimize != "step-time":
        return largest.lower_bound_s
    alone = smallest_largest(replace(problem, links=(FREE_LINK,) * (problem.num_stages - 1)))
    assert alone is not None, "there is a partition"
    return problem.num_microbatches * alone.lower_bound_s


def _search(
    bounded: Sequence[tuple[float, Problem]],
    solve: Solve,
    *,
    deadline_s: float,
    else_s: float,
) -> Placed | None:
    """The best of these arrangements; `else_s` bounds those that are not among them, infinite for none."""
    best: Placed | None = None
    best_s, lower_s = float("inf"), else_s
    num_solved = 0
    for bound_s, problem in bounded:
        if best is not None and (bound_s >= best_s or time.perf_counter() > deadline_s):
            lower_s = min(lower_s, bound_s)
            break
        solution = solve(problem)
        assert solution is not None, "an arrangement without a partition is left out"
        num_solved += 1
        lower_s = min(lower_s, solution.lower_bound_s)
        solution_s = goal_s(problem, solution.stages)
        if solution_s < best_s:
            best, best_s = Placed(problem=problem, solution=solution), solution_s
    if best is None:
        return None
    notes = best.solution.notes
    if len(bounded) > 1:
        notes = (*notes, f"{len(bounded)} arrangements of the devices were bounded, {num_solved} of them solved")
    if else_s < float("inf"):
        notes = (
            *notes,
            "the machine has too many arrangements: those that keep each host together were looked at first",
        )
    bound_s = min(best.solution.lower_bound_s, lower_s)
    return replace(best, solution=replace(best.solution, lower_bound_s=bound_s, notes=notes))
