"""Replicas on a machine of hosts that are alike: each pipeline on one host, sums of gradients between hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gplan.core import HostLink, Link, Machine, MachineDevice
from gplan.core.errors import NoPlanError, UsageError
from gplan.evaluate.explain import explain
from gplan.evaluate.replanning import reprice
from gplan.strategy_search.planner import balance
from tests.made import make_profile

WITHIN, BETWEEN = Link(latency_s=0.1, bytes_per_s=8.0), Link(latency_s=0.5, bytes_per_s=1.0)
PROFILE = make_profile([2.0, 3.0, 4.0, 3.0], output_bytes=[4, 4, 4, 4], weight_bytes=[8, 8, 8, 8])


def machine(*counts: int, **traits: Any) -> Machine:
    names = [(f"host{i}", f"host{i}:{j}") for i, count in enumerate(counts) for j in range(count)]
    devices = tuple(MachineDevice(name=name, host=host, memory_bytes=10**6) for host, name in names)
    return Machine(devices=(*devices[:-1], replace(devices[-1], **traits)), within=WITHIN, between=BETWEEN)


def planned(hosts: Machine, total_devices: int, **dials: Any) -> Any:
    given = {"num_devices": 2, "num_microbatches": 4, "batch_size": 8, "schedule": "1f1b", **dials}
    return balance(PROFILE, total_devices=total_devices, machine=hosts, **given)


@pytest.mark.parametrize("sharding", ["none", "optimizer"])
def test_pipelines_have_the_links_within_a_host_and_sums_those_between(sharding: str) -> None:
    plan = planned(machine(2, 2), 4, sharding=sharding)
    assert (plan.num_replicas, plan.num_devices) == (2, 2)
    within, between = (
        balance(
            replace(PROFILE, link=link), num_devices=2, total_devices=4, num_microbatches=4, batch_size=8, schedule="1f1b",
            sharding=sharding, constraints=plan.constraints,
        )
        for link in (WITHIN, BETWEEN)
    )  # fmt: skip
    assert [x.all_reduce_s for x in plan.stage_costs] == [x.all_reduce_s for x in between.stage_costs]
    assert [x.activation_s for x in plan.stage_costs] == [x.activation_s for x in within.stage_costs]
    assert within.prediction.step_s < plan.prediction.step_s < between.prediction.step_s
    assert plan.notes[0] == "every pipeline is on one host, and gradients of replicas cross the links between hosts"
    assert plan.device.memory_bytes == 10**6


def test_a_plan_is_priced_again_with_its_links() -> None:
    plan = planned(machine(2, 2), 4)
    assert reprice(plan, PROFILE, engine="torch").prediction.step_s == plan.prediction.step_s
    options = explain(plan, PROFILE, options_s=2.0).options
    assert options[0].outcome is not None
    assert options[0].outcome.step_s == pytest.approx(plan.prediction.step_s)
    assert {x.reason for x in options if x.kind in ("more devices", "fewer devices")} == {
        "replicas fill their hosts; balance with another --k"
    }


def test_devices_of_one_host_have_its_link_alone() -> None:
    plan = planned(machine(4, 4), 4)
    assert plan.link == replace(WITHIN, replica_link=WITHIN)
    assert not any("between hosts" in x for x in plan.notes)


def test_pipelines_are_no_longer_than_a_host_and_fill_it() -> None:
    plan = planned(machine(4, 4), 8, num_devices="auto", num_microbatches="auto", sharding="auto")
    assert 4 % plan.num_devices == 0
    assert all(8 % x.num_replicas == 0 and x.num_replicas > 1 for x in plan.frontier)


def test_the_slowest_link_between_hosts_counts() -> None:
    slow = Link(latency_s=2.0, bytes_per_s=0.25)
    hosts = replace(machine(1, 1, 1), links=(HostLink(hosts=("host0", "host2"), link=slow),))
    dials: dict[str, Any] = {"num_devices": 1, "schedule": "gpipe"}
    assert planned(hosts, 2, **dials).link.replica_link == BETWEEN
    assert planned(hosts, 3, batch_size=12, **dials).link.replica_link == slow


@pytest.mark.parametrize(
    ("hosts", "total_devices", "dials", "message"),
    [
        (machine(2, 2), 3, {}, "the machine has 2 hosts of 2 devices; expected 1 to 2, or a multiple up to 4"),
        (machine(2, 2), 8, {}, "the machine has 2 hosts of 2 devices"),
        (machine(4, 4), 8, {"num_devices": 3}, "each replica is on one host, and 3 does not divide its 4 devices"),
        (machine(2, 1), 2, {}, "hosts that are alike.*host0: 2 devices of speed 1, host1: 1 device of speed 1"),
        (machine(2, 2, speed=0.5), 4, {}, "host1: 2 devices of speed 0.5"),
        (machine(2, 2), 0, {}, "expected 1 to 2, or a multiple up to 4"),
        (machine(2, 2), 4, {"num_devices": 0}, "asked for 0"),
        (machine(4, 4), 8, {"num_devices": 2, "batch_size": 4}, "none of .* is allowed"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned(hosts: Machine, total_devices: int, dials: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(hosts, total_devices, **dials)


def test_the_memory_is_that_of_the_machine() -> None:
    """The least of a device."""
    assert planned(machine(2, 2, memory_bytes=10**5), 4).device.memory_bytes == 10**5
    with pytest.raises(NoPlanError):
        planned(machine(2, 2, memory_bytes=1), 4)


@pytest.mark.parametrize("num_devices", [3, 6])
def test_pipelines_on_a_part_of_one_host(num_devices: int) -> None:
    layers = make_profile([1.0] * 8)
    plan = balance(
        layers, machine=machine(8, 8), total_devices=6, num_devices=num_devices, num_microbatches=6, schedule="1f1b", batch_size=36 // num_devices,
    )  # fmt: skip
    assert plan.num_devices * plan.num_replicas == 6
