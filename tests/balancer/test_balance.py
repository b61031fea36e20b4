"""The public function: what it fills in, what it refuses, what it promises."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from gplan.balancer import balance
from gplan.errors import NoPlanError, UsageError
from gplan.nouns import Device, Link, Machine, Place
from gplan.simulator import simulate
from tests.made import make_profile

SIX = make_profile([6, 4, 2, 3, 2, 5], [7, 4, 3, 4, 3, 6], stash_bytes=100, microbatch_sizes=(1, 4))


def test_the_plan_takes_the_largest_profiled_micro_batch_unless_told() -> None:
    assert balance(SIX, num_stages=2, num_microbatches=2).microbatch_size == 4
    assert balance(SIX, num_stages=2, num_microbatches=2, microbatch_size=1).microbatch_size == 1


def test_costs_between_two_profiled_sizes_come_with_a_note() -> None:
    assert "interpolated" in balance(SIX, num_stages=2, num_microbatches=2, microbatch_size=2).notes[0]


def test_the_step_time_of_the_plan_is_the_simulated_one_and_proven() -> None:
    plan = balance(SIX, num_stages=3, num_microbatches=4, schedule="1f1b")
    assert plan.proof.objective_s == plan.proof.lower_bound_s == plan.prediction.step_s == simulate(plan).step_s
    assert plan.proof.gap == 0


@pytest.mark.parametrize("solver", ["dp", "milp"])
def test_the_largest_stage_of_a_known_trap_is_13(solver: str) -> None:
    plan = balance(SIX, num_stages=4, num_microbatches=8, microbatch_size=1, minimize="max-stage", solver=solver)
    assert plan.proof.objective_s == plan.proof.lower_bound_s == 13


def test_1f1b_runs_with_fewer_micro_batches_than_stages() -> None:
    assert balance(SIX, num_stages=4, num_microbatches=2, schedule="1f1b").num_stages == 4


def test_the_memory_of_the_profiled_device_is_the_limit_unless_another_is_given() -> None:
    small = replace(SIX, device=Device(name="small", kind="cpu", memory_bytes=100))
    with pytest.raises(NoPlanError, match=r"fits 100 B per device"):
        balance(small, num_stages=2, num_microbatches=2)
    assert balance(small, num_stages=2, num_microbatches=2, memory_bytes=10**6).memory_limit_bytes == 10**6
    assert balance(SIX, num_stages=2, num_microbatches=2).memory_limit_bytes is None


@pytest.mark.parametrize("solver", ["dp", "milp"])
@pytest.mark.parametrize("minimize", ["max-stage", "step-time"])
def test_every_solver_says_the_same_when_nothing_fits(solver: str, minimize: str) -> None:
    with pytest.raises(NoPlanError, match=r"the smallest memory that does is 2.34 KiB \(2400 bytes\)") as caught:
        balance(SIX, num_stages=2, num_microbatches=2, memory_bytes=2399, solver=solver, minimize=minimize)
    assert caught.value.exit_code == 4
    assert balance(SIX, num_stages=2, num_microbatches=2, memory_bytes=2400, solver=solver, minimize=minimize)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_stages": 7}, "asked for 7 stages of a model with 6 layers"),
        ({"num_stages": 0}, "asked for 0 stages; expected 1 to 6"),
        ({"num_microbatches": 0}, "asked for 0 micro-batches; expected at least 1"),
        ({"memory_bytes": 0}, "the memory of each device is 0 bytes; expected at least 1"),
        ({"microbatch_size": 9}, "the profile has micro-batch sizes 1, 4; asked for 9"),
        ({"schedule": "2f2b"}, "schedule '2f2b' is not known; expected one of gpipe, 1f1b"),
        ({"recompute": "maybe"}, "recompute 'maybe' is not known; expected one of never, always, except-last"),
        ({"minimize": "cost"}, "minimize 'cost' is not known; expected one of step-time, max-stage"),
        ({"solver": "luck"}, "solver 'luck' is not known; expected one of auto, dp, milp, cbc"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_would_do(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        balance(SIX, **{"num_stages": 2, "num_microbatches": 2, **arguments})
    assert message in str(caught.value)


def test_a_step_without_any_time_is_nothing_to_balance() -> None:
    with pytest.raises(UsageError, match="takes no time at all"):
        balance(make_profile([0] * 3, [0] * 3), num_stages=1, num_microbatches=2)


def test_direct_transfers_are_between_devices_that_are_alike() -> None:
    link = Link(latency_s=0.0, bytes_per_s=1.0)
    machine = Machine(places=tuple(Place(name=x, host="h") for x in "ab"), within=link, between=link)
    with pytest.raises(UsageError, match="expected no --machine"):
        balance(SIX, num_stages=2, num_microbatches=2, minimize="max-device-load", machine=machine)


def test_balancing_without_the_milp_loads_no_solver_package() -> None:
    program = "import gplan.balancer, sys; sys.exit('pulp' in sys.modules or 'highspy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
