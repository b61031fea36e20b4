"""The search on a machine: the best of all settings; and plans move as the link between hosts slows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from gplan.core import Constraints, Link, Machine, MachineDevice, Plan
from gplan.core.errors import UsageError
from gplan.core.machine import FREE_LINK
from gplan.strategy_search.planner import balance
from tests.made import make_profile
from tests.searching import search_machine

# Outputs shrink from layer to layer, as in a convolutional model.
PROFILE = make_profile([2, 2, 2, 2, 2, 2], output_bytes=[32, 16, 8, 4, 2, 1], microbatch_sizes=(1, 2, 4, 8))


def hosts(bytes_per_s: float) -> Machine:
    link = Link(latency_s=0.5, bytes_per_s=bytes_per_s)
    return Machine(devices=tuple(MachineDevice(name=x, host=x) for x in "ab"), within=link, between=link)


def searched(bytes_per_s: float, **options: Any) -> Plan:
    return search_machine(
        PROFILE, hosts(bytes_per_s), num_devices=2, num_microbatches="auto", recompute="never", batch_size=8, **options
    )


def at_setting(number: int, act: Callable[[], None]) -> Callable[[str, float], None]:
    """A progress that acts before the setting with this number, from 1, and before all that follow."""
    calls = count()  # the first is for all bounds

    def progress(_text: str, _share: float) -> None:
        if next(calls) >= number:
            act()

    return progress


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("bytes_per_s", [1e9, 4.0, 0.5])
def test_no_setting_is_better(bytes_per_s: float) -> None:
    found = searched(bytes_per_s)
    for num_microbatches in (1, 2, 4, 8):
        for schedule in ("gpipe", "1f1b"):
            if schedule == "1f1b" and num_microbatches < 2:
                continue
            plan = balance(
                PROFILE, num_devices=2, num_microbatches=num_microbatches, microbatch_size=8 // num_microbatches,
                schedule=schedule, machine=hosts(bytes_per_s),
            )  # fmt: skip
            assert plan.prediction.step_s >= found.prediction.step_s * (1 - 1e-9)
    assert found.proof.is_proven
    assert len(found.rivals) == 5


def test_the_plan_moves_as_the_link_slows() -> None:
    cuts = [searched(x).cuts[0] for x in (1e9, 4.0, 0.5)]
    assert cuts == sorted(cuts) and cuts[0] < cuts[-1]


def test_schedules_with_chunks_are_refused() -> None:
    with pytest.raises(UsageError, match="no setting has one stage on each of at most 2 devices"):
        search_machine(PROFILE, hosts(1.0), num_devices=2, num_microbatches=4, schedule="looped-bfs:2")


@pytest.mark.slow
def test_a_setting_that_was_not_planned_in_time_is_open() -> None:
    found = search_machine(
        PROFILE, hosts(1.0), num_devices=2, num_microbatches=4, recompute="never", batch_size=8, time_limit_s=1.0,
        progress=at_setting(1, lambda: time.sleep(1.1)),
    )  # fmt: skip
    counts = re.search(r"the time was up: (\d+) of (\d+) settings are still open", found.notes[-1])
    assert counts is not None and 0 < int(counts[1]) <= int(counts[2])
    assert not found.proof.is_proven and found.proof.lower_bound_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("speeds", [(4.0, 1.0, 1.0), (0.5, 0.25, 0.5)])
def test_the_bound_covers_what_was_not_planned(speeds: tuple[float, ...]) -> None:
    devices = tuple(MachineDevice(name=str(i), host=str(i), speed=x) for i, x in enumerate(speeds))
    machine = Machine(devices=devices, within=FREE_LINK, between=Link(latency_s=0.5, bytes_per_s=8.0))
    dials: dict[str, Any] = {"num_devices": "auto", "num_microbatches": "auto", "batch_size": 8, "recompute": "never"}
    whole = search_machine(PROFILE, machine, **dials)
    stopped = search_machine(PROFILE, machine, **dials, progress=at_setting(2, interrupt))
    assert whole.proof.is_proven
    assert 0 < stopped.proof.lower_bound_s <= whole.prediction.step_s * (1 + 1e-9)


@pytest.mark.slow
def test_a_pipeline_of_fewer_devices_is_looked_at() -> None:
    devices = tuple(MachineDevice(name=str(x), host="a", speed=x) for x in (1.0, 0.01))
    link = Link(latency_s=0.0, bytes_per_s=1e9)
    machine = Machine(devices=devices, within=link, between=link)
    plan = search_machine(PROFILE, machine, num_devices="auto", num_microbatches="auto", batch_size=8)
    assert (plan.num_devices, plan.proof.is_proven) == (1, True)
    cut = search_machine(
        PROFILE,
        machine,
        num_devices="auto",
        num_microbatches=2,
        batch_size=8,
        constraints=Constraints(cut_after=("b",)),
    )
    assert (cut.num_devices, cut.cuts) == (2, (2,))
    assert cut.rivals[0].label == "without constraints"


def test_an_interrupt_keeps_what_was_planned() -> None:
    found = searched(1.0, progress=at_setting(3, interrupt))
    assert found.prediction.step_s >= searched(1.0).prediction.step_s
    assert re.search(
        r"the search was interrupted: \d+ of \d+ settings (is|are) still open, the bound is of all", found.notes[-1]
    )
    assert 0 < found.proof.lower_bound_s < found.prediction.step_s
