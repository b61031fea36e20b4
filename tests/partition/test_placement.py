"""Stages on the devices of a machine, against every order of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.core import HostLink, Link, Machine, MachineDevice
from gplan.core.errors import NoPlanError, UsageError
from gplan.partition import placement as placement_module
from gplan.partition.batch_simulation import goal_s
from gplan.partition.placement import arrangements, best_placement
from gplan.partition.problem import Problem
from gplan.partition.solve import solve
from gplan.strategy_search.planner import balance
from tests.made import make_profile
from tests.partition.problems import make_problem

FAST, SLOW = Link(latency_s=0.0, bytes_per_s=8.0), Link(latency_s=1.0, bytes_per_s=1.0)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Up to four devices on up to three hosts."""
    places = [
        MachineDevice(
            name=f"device{i}",
            host=draw(st.sampled_from(["a", "b", "c"])),
            speed=draw(st.sampled_from([1.0, 1.0, 0.5])),
            memory_bytes=draw(st.sampled_from([None, None, 60])),
        )
        for i in range(draw(st.integers(3, 4)))
    ]
    special = (HostLink(hosts=("a", "b"), link=FAST),) if draw(st.booleans()) else ()
    return Machine(devices=tuple(places), within=FAST, between=SLOW, links=special)


def on(problem: Problem, machine: Machine, places: tuple[MachineDevice, ...]) -> Problem:
    return replace(problem, machine_devices=places, links=tuple(machine.link(x, y) for x, y in pairwise(places)))


@settings(max_examples=15, deadline=None)
@given(machines(), st.lists(st.integers(1, 9), min_size=5, max_size=6), st.sampled_from(["max-stage", "step-time"]))
def test_no_order_of_the_devices_is_better(machine: Machine, seconds: list[int], minimize: str) -> None:
    num_stages = 3 if len(machine.devices) == 3 else 2
    problem = make_problem(
        seconds,
        num_stages=num_stages,
        minimize=minimize,
        output_bytes=[9, 1, 5, 2, 7, 3][: len(seconds)],
        weight_bytes=5,
    )
    every = [on(problem, machine, places) for places in permutations(machine.devices, num_stages)]
    solved = [(x, solution) for x in every if (solution := solve(x)) is not None]
    best_s = min((goal_s(x, solution.stages) for x, solution in solved), default=None)
    placed = best_placement(problem, machine, solve)
    assert (placed is None) == (best_s is None)
    if placed is not None:
        assert goal_s(placed.problem, placed.solution.stages) == pytest.approx(best_s)
        assert placed.solution.lower_bound_s == pytest.approx(best_s)


def test_devices_that_are_alike_are_not_told_apart() -> None:
    alike = Machine(devices=tuple(MachineDevice(name=str(i), host="a") for i in range(8)), within=FAST, between=SLOW)
    assert len(list(arrangements(alike, 8))) == 1
    two_hosts = Machine(
        devices=tuple(MachineDevice(name=str(i), host="ab"[i % 2]) for i in range(4)), within=FAST, between=SLOW
    )
    looks = {tuple(x.host == y.host for x, y in pairwise(places)) for places in arrangements(two_hosts, 4)}
    assert looks == {(True, False, True), (False, True, False), (False, False, False)}
    assert len(list(arrangements(two_hosts, 4))) == 3


def test_the_slow_link_carries_the_small_cut() -> None:
    profile = make_profile([1, 1, 1, 1], output_bytes=[8, 1, 8, 0])
    places = tuple(MachineDevice(name=name, host=name[0]) for name in ("a0", "b0", "a1", "b1"))
    machine = Machine(devices=places, within=FAST, between=Link(latency_s=0.0, bytes_per_s=1.0))
    plan = balance(profile, num_devices=4, num_microbatches=8, machine=machine)
    places = tuple(stage.machine_device for stage in plan.stages if stage.machine_device)
    between_hosts = [x.host != y.host for x, y in pairwise(places)]
    assert between_hosts == [False, True, False]
    assert [stage.cost.activation_bytes for stage in plan.stages] == [8, 1, 8, 0]


def test_the_slow_device_gets_the_small_stage() -> None:
    machine = Machine(
        devices=(MachineDevice(name="slow", host="a", speed=0.5), MachineDevice(name="fast", host="a")),
        within=FAST,
        between=SLOW,
    )
    plan = balance(make_profile([1] * 6), num_devices=2, num_microbatches=8, minimize="max-stage", machine=machine)
    assert {stage.machine_device.name: stage.num_layers for stage in plan.stages if stage.machine_device} == {
        "slow": 2,
        "fast": 4,
    }


def test_fewer_devices_than_stages_are_refused() -> None:
    machine = Machine(devices=(MachineDevice(name="only", host="a"),), within=FAST, between=SLOW)
    with pytest.raises(UsageError, match=r"the machine has 1 devices; 2 stages need as many \(try --k 1\)"):
        balance(make_profile([1, 1]), num_devices=2, num_microbatches=1, machine=machine)


def test_a_machine_whose_devices_are_too_small_says_so() -> None:
    machine = Machine(devices=(MachineDevice(name="only", host="a", memory_bytes=10),), within=FAST, between=SLOW)
    with pytest.raises(NoPlanError, match=r"2 layers into 1 stage fits the machine's devices \(10 B per device\)"):
        balance(make_profile([1, 1], weight_bytes=100), num_devices=1, num_microbatches=1, machine=machine)


def test_small_machine_error_names_memory_and_stages() -> None:
    sizes = (2500, 2500, 9000, 600)
    devices = tuple(MachineDevice(name=str(i), host="a", memory_bytes=x) for i, x in enumerate(sizes))
    machine = Machine(devices=devices, within=FAST, between=SLOW)

    def error(num_layers: int, num_devices: int) -> str:
        profile = make_profile([1] * num_layers, stash_bytes=2000)
        with pytest.raises(NoPlanError) as caught:
            balance(profile, num_devices=num_devices, num_microbatches=1, machine=machine)
        return str(caught.value)

    assert "fits the machine's devices (600 B to 8.79 KiB per device)" in error(6, 1)
    assert "the smallest memory per device that fits is --memory 12000B, for stage 0 (layers: a … f (6))" in error(6, 1)
    assert "--k 3 --microbatches 1 fits" in error(6, 1)
    assert "no number of stages fits the machine" in error(8, 4)


def test_of_too_many_arrangements_those_that_keep_hosts_together_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_module, "MOST_ARRANGEMENTS", 2)
    places = tuple(MachineDevice(name=f"{h}{i}", host=h, memory_bytes=100 + i) for h in "abc" for i in range(2))
    machine = Machine(devices=places, within=FAST, between=SLOW)
    plan = balance(make_profile([1] * 8, output_bytes=1), num_devices=6, num_microbatches=4, machine=machine)
    hosts = [stage.machine_device.host for stage in plan.stages if stage.machine_device]
    assert sum(x != y for x, y in pairwise(hosts)) == 2
    assert any("too many arrangements" in note for note in plan.notes)
    assert 0 < plan.proof.lower_bound_s < plan.proof.objective_s


def test_arrangements_that_were_not_bounded_in_time_are_noted() -> None:
    places = tuple(MachineDevice(name=x, host=x, memory_bytes=10_000 + ord(x)) for x in "abc")
    machine = Machine(devices=places, within=FAST, between=SLOW)
    plan = balance(make_profile([1] * 6), num_devices=3, num_microbatches=4, machine=machine, time_limit_s=1e-9)
    assert "the time was up before all arrangements of the devices were bounded" in plan.notes
    assert not any("too many arrangements" in note for note in plan.notes)


def test_equal_hosts_and_memories_are_not_told_apart() -> None:
    places = tuple(MachineDevice(name=f"{h}{i}", host=f"h{h}", memory_bytes=10) for h in range(12) for i in range(8))
    machine = Machine(devices=places, within=FAST, between=SLOW)
    assert len(list(placement_module.host_by_host(machine, 16))) == 1
    problem = make_problem([1.0] * 16, num_stages=16, weight_bytes=100)
    assert placement_module.fits_machine(problem, machine, deadline_s=0.0) is False


def test_a_device_without_a_limit_comes_before_those_with_one() -> None:
    places = tuple(MachineDevice(name=str(x), host="a", memory_bytes=x) for x in (5, None, 9))
    machine = Machine(devices=places, within=FAST, between=SLOW)
    assert [[x.name for x in places] for places in placement_module.host_by_host(machine, 3)] == [["None", "9", "5"]]


def test_links_among_unused_devices_tell_arrangements_apart() -> None:
    places = tuple(MachineDevice(name=f"h{i}", host=f"h{i}") for i in range(5))
    fast = [HostLink(hosts=pair, link=FAST) for pair in (("h0", "h2"), ("h1", "h3"), ("h1", "h4"))]
    machine = Machine(devices=places, within=FAST, between=SLOW, links=tuple(fast))
    for found in (placement_module.host_by_host(machine, 3), arrangements(machine, 3)):
        assert {("h3", "h1", "h4"), ("h4", "h1", "h3")} & {tuple(x.host for x in places) for places in found}
