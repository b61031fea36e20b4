"""Which device of a machine gets which stage, over all arrangements that differ, the most promising first.

Arrangements with the same speeds, memories and links count once. Each gets a lower bound from its minimax stage time,
which takes milliseconds; those that could beat the best plan are solved in the order of their bounds, until none is
left or the time is up, in which case the bound of the best unsolved one enters the proof. Exact, with two exceptions:
of more than `MOST_ARRANGEMENTS` only those that keep the devices of a host together are tried, and the time may be up
before all are bounded. The bound then assumes the best device everywhere and free transfers, and a note says so.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, islice, pairwise

from gplan.core import Link, Machine, MachineDevice
from gplan.core.errors import UsageError
from gplan.core.machine import FREE_LINK
from gplan.partition.batch_simulation import goal_s
from gplan.partition.memory_feasibility import any_fits
from gplan.partition.minimax import smallest_largest
from gplan.partition.problem import Problem, Solution

MOST_ARRANGEMENTS = 5040

_SECONDS = 20.0

Solve = Callable[[Problem], Solution | None]
"""Finds the best partition of a problem with given devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A problem with its arrangement of devices, and its best partition."""

    problem: Problem
    solution: Solution


def best_placement(
    problem: Problem,
    machine: Machine,
    solve: Solve,
    *,
    time_limit_s: float | None = None,
) -> Placed | None:
    """The best arrangement and partition; None if none fits the memory. The default time limit is 20 s.

    Raises UsageError if the machine has fewer devices than stages.
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
    unseen = ""  # why there are other arrangements; "" if there are none
    if not is_all:
        unseen = "the machine has too many arrangements: those that keep each host together were looked at first"
    elif not has_bounded_all:
        unseen = "the time was up before all arrangements of the devices were bounded"
    lower_s = _relaxed_bound_s(problem, machine) if unseen else float("inf")
    best, best_s, num_solved = None, float("inf"), 0
    for bound_s, arranged in bounded:
        if best is not None and (bound_s >= best_s or time.perf_counter() > deadline_s):
            lower_s = min(lower_s, bound_s)
            break
        solution = solve(arranged)
        assert solution is not None, "infeasible arrangements are left out"
        num_solved += 1
        lower_s = min(lower_s, solution.lower_bound_s)
        solution_s = goal_s(arranged, solution.stages)
        if solution_s < best_s:
            best, best_s = Placed(problem=arranged, solution=solution), solution_s
    if best is None:
        return None
    notes = best.solution.notes
    if len(bounded) > 1:
        notes = (*notes, f"{len(bounded)} arrangements of the devices were bounded, {num_solved} of them solved")
    if unseen:
        notes = (*notes, unseen)
    bound_s = min(best.solution.lower_bound_s, lower_s)
    return replace(best, solution=replace(best.solution, lower_bound_s=bound_s, notes=notes))


def fits_machine(problem: Problem, machine: Machine, *, deadline_s: float) -> bool | None:
    """Whether any partition fits the memory of some devices of a machine; None if the time is not enough.

    Raises TooManyCandidates if too many stages might fit.
    """
    if len({x.memory_bytes for x in machine.devices}) == 1:  # every arrangement has the same memories
        return any_fits(replace(problem, machine_devices=machine.devices[: problem.num_stages]))
    seen: set[tuple[int | None, ...]] = set()
    for devices in arrangements(machine, problem.num_stages):
        memories = tuple(device.memory_bytes for device in devices)
        if seen and time.perf_counter() > deadline_s:
            return None
        if memories in seen:
            continue
        seen.add(memories)
        if any_fits(replace(problem, machine_devices=devices)):
            return True
    return False


def arrangements(machine: Machine, num_stages: int) -> Iterator[tuple[MachineDevice, ...]]:
    """Every ordered choice of devices that differs in speeds, memories or links from those before it."""
    return _differing(machine, num_stages, lambda chosen: ((device,) for device, _ in _unused_devices(machine, chosen)))


def host_by_host(machine: Machine, num_stages: int) -> Iterator[tuple[MachineDevice, ...]]:
    """Arrangements that visit each host once, its devices by falling memory, in every order of the hosts that differs."""
    hosts: dict[str, list[MachineDevice]] = {x.host: [] for x in machine.devices}
    for device in sorted(machine.devices, key=lambda x: -(math.inf if x.memory_bytes is None else x.memory_bytes)):
        hosts[device.host].append(device)

    def unused(chosen: tuple[MachineDevice, ...]) -> Iterator[Sequence[MachineDevice]]:
        visited = {device.host for device in chosen}
        return (devices for host, devices in hosts.items() if host not in visited)

    return _differing(machine, num_stages, unused)


def _differing(
    machine: Machine,
    num_stages: int,
    next_devices: Callable[[tuple[MachineDevice, ...]], Iterable[Sequence[MachineDevice]]],
) -> Iterator[tuple[MachineDevice, ...]]:
    """Arrangements grown by groups of devices, without those that differ in nothing from one before."""
    seen: set[object] = set()

    def grow(chosen: tuple[MachineDevice, ...]) -> Iterator[tuple[MachineDevice, ...]]:
        if len(chosen) == num_stages:
            yield chosen
            return
        for devices in next_devices(chosen):
            longer = (*chosen, *devices)[:num_stages]
            figures = tuple((device.speed, device.memory_bytes) for device in longer)
            links = tuple(machine.link(a, b) for a, b in pairwise(longer))
            key = figures, links, _rest_key(machine, longer)
            if key not in seen:
                seen.add(key)
                yield from grow(longer)

    return grow(())


def _rest_key(machine: Machine, devices: Sequence[MachineDevice]) -> tuple[object, ...]:
    """Everything about the unused devices that costs can depend on: links to the last device and among them, and hosts."""
    rest = _unused_devices(machine, devices)
    on_host = {device.host: device for device, _ in rest}
    hosts = list(on_host)
    ahead = sorted(
        repr((x.speed, x.memory_bytes, machine.link(devices[-1], x), hosts.index(x.host), count)) for x, count in rest
    )
    pairs = combinations_with_replacement(on_host.values(), 2) if machine.links else ()
    return tuple(ahead), devices[-1].host in hosts, tuple(machine.link(*pair) for pair in pairs)


def _unused_devices(machine: Machine, devices: Sequence[MachineDevice]) -> list[tuple[MachineDevice, int]]:
    """One of each group of equal unused devices, and the size of the group."""
    used = {device.name for device in devices}
    rest = [device for device in machine.devices if device.name not in used]
    kinds = [(device.host, device.speed, device.memory_bytes) for device in rest]
    counts, first = Counter(kinds), dict(zip(reversed(kinds), reversed(rest), strict=True))
    return [(first[kind], count) for kind, count in counts.items()]


def _bounded(
    problem: Problem, machine: Machine, found: Sequence[tuple[MachineDevice, ...]], *, until_s: float
) -> tuple[list[tuple[float, Problem]], bool]:
    """A problem for each feasible arrangement, by rising lower bound, and whether there was time for all arrangements.

    If any arrangement is feasible, at least one is returned whatever the time.
    """
    bounded: list[tuple[float, Problem]] = []
    for devices in found:
        if bounded and time.perf_counter() > until_s:
            return sorted(bounded, key=lambda pair: pair[0]), False
        links: tuple[Link, ...] = tuple(machine.link(a, b) for a, b in pairwise(devices))
        arranged = replace(problem, machine_devices=devices, links=links)
        largest = smallest_largest(arranged)
        if largest is not None:
            bounded.append((_lower_bound_s(arranged, largest), arranged))
    return sorted(bounded, key=lambda pair: pair[0]), True


def _relaxed_bound_s(problem: Problem, machine: Machine) -> float:
    """A lower bound for every arrangement: the best device for each stage, and free transfers."""
    memories = [device.memory_bytes for device in machine.devices]
    most_bytes = None if None in memories else max(x for x in memories if x is not None)
    speed = max(device.speed for device in machine.devices)
    devices = tuple(
        MachineDevice(name=str(i), host="", speed=speed, memory_bytes=most_bytes) for i in range(problem.num_stages)
    )
    ideal = replace(problem, machine_devices=devices, links=(FREE_LINK,) * (problem.num_stages - 1))
    largest = smallest_largest(ideal)
    assert largest is not None, "some arrangement is feasible, and this one has more memory"
    return _lower_bound_s(ideal, largest)


def _lower_bound_s(problem: Problem, largest: Solution) -> float:
    """A lower bound of an arrangement's objective, from its minimax solution; for a step, of computation alone."""
    if problem.minimize != "step-time":
        return largest.lower_bound_s
    compute = smallest_largest(replace(problem, links=(FREE_LINK,) * (problem.num_stages - 1)))
    assert compute is not None, "there is a partition"
    return problem.num_microbatches * compute.lower_bound_s
