"""The public function: what it fills in, what it refuses, what it promises."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from gplan.core import Constraints, Device, Link, Machine, MachineDevice
from gplan.core.errors import NoPlanError, UsageError
from gplan.schedules.registry import canonical, make_schedule, num_stages_of
from gplan.simulation.simulator import simulate
from gplan.strategy_search.planner import balance
from tests.made import make_profile
from tests.partition.problems import in_halves

SIX = make_profile([6, 4, 2, 3, 2, 5], [7, 4, 3, 4, 3, 6], stash_bytes=100, microbatch_sizes=(1, 4))


def test_the_plan_takes_the_largest_profiled_micro_batch_unless_told() -> None:
    assert balance(SIX, num_devices=2, num_microbatches=2).microbatch_size == 4
    assert balance(SIX, num_devices=2, num_microbatches=2, microbatch_size=1).microbatch_size == 1


def test_costs_between_two_profiled_sizes_come_with_a_note() -> None:
    assert "interpolated" in balance(SIX, num_devices=2, num_microbatches=2, microbatch_size=2).notes[0]


def test_the_step_time_of_the_plan_is_the_simulated_one_and_proven() -> None:
    plan = balance(SIX, num_devices=3, num_microbatches=4, schedule="1f1b")
    assert plan.proof.objective_s == plan.proof.lower_bound_s == plan.prediction.step_s == simulate(plan).step_s
    assert plan.proof.gap == 0


@pytest.mark.parametrize("solver", ["dp", "milp"])
def test_the_largest_stage_of_a_known_trap_is_13(solver: str) -> None:
    plan = balance(SIX, num_devices=4, num_microbatches=8, microbatch_size=1, minimize="max-stage", solver=solver)
    assert plan.proof.objective_s == plan.proof.lower_bound_s == 13


def test_1f1b_runs_with_fewer_micro_batches_than_stages() -> None:
    assert balance(SIX, num_devices=4, num_microbatches=2, schedule="1f1b").num_stages == 4


def test_the_memory_of_the_profiled_device_is_the_limit_unless_another_is_given() -> None:
    small = replace(SIX, device=Device(name="small", kind="cpu", memory_bytes=100))
    with pytest.raises(NoPlanError, match=r"fits 100 B per device"):
        balance(small, num_devices=2, num_microbatches=2)
    assert balance(small, num_devices=2, num_microbatches=2, memory_bytes=10**6).memory_limit_bytes == 10**6
    assert balance(SIX, num_devices=2, num_microbatches=2).memory_limit_bytes is None


@pytest.mark.parametrize("solver", ["dp", "milp"])
@pytest.mark.parametrize("minimize", ["max-stage", "step-time"])
def test_every_solver_says_the_same_when_nothing_fits(solver: str, minimize: str) -> None:
    with pytest.raises(NoPlanError, match=r"the smallest memory that fits is --memory 2400B") as caught:
        balance(SIX, num_devices=2, num_microbatches=2, memory_bytes=2399, solver=solver, minimize=minimize)
    assert caught.value.exit_code == 4
    assert balance(SIX, num_devices=2, num_microbatches=2, memory_bytes=2400, solver=solver, minimize=minimize)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_devices": 7}, "asked for 7 stages of a model with 6 layers"),
        ({"num_devices": 0}, "asked for 0 stages; expected 1 to 6"),
        ({"num_microbatches": 0}, "asked for 0 micro-batches; expected at least 1"),
        ({"memory_bytes": 0}, "the memory of each device is 0 bytes; expected at least 1"),
        ({"microbatch_size": 9}, "the profile has micro-batch sizes 1, 4; asked for 9"),
        ({"schedule": "2f2b"}, "schedule '2f2b' is not known; expected one of gpipe, "),
        ({"recompute": "maybe"}, "recompute 'maybe' is not known; expected one of never, always, except-last"),
        ({"minimize": "cost"}, "minimize 'cost' is not known; expected one of step-time, max-stage"),
        (
            {"constraints": Constraints(cut_after=("aa",))},
            "the profile has no layer 'aa'; expected one of its 6 layers, such as a (",
        ),
        ({"constraints": Constraints(cut_after=("zz",))}, "expected one of its 6 layers, such as a, b, c, d, e ("),
        ({"solver": "luck"}, "solver 'luck' is not known; expected one of auto, dp, milp, cbc"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_would_do(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        balance(SIX, **{"num_devices": 2, "num_microbatches": 2, **arguments})
    assert message in str(caught.value)


def test_model_of_a_single_layer_is_named_as_the_cause() -> None:
    with pytest.raises(UsageError, match="the model is a single layer, a, which cannot be cut.*--granularity op"):
        balance(make_profile([1.0]), num_devices=2, num_microbatches=2)


SPLIT = in_halves(SIX)


@pytest.mark.parametrize(
    "schedule", ["eager-1f1b", "interleaved-1f1b:2", "looped-bfs:3", "zb-h1", "zb-v", "interleaved-1f1b"]
)
def test_every_schedule_is_planned_on_as_many_devices_as_asked_for(schedule: str) -> None:
    plan = balance(SPLIT, num_devices=2, num_microbatches=4, microbatch_size=1, schedule=schedule)
    assert (plan.num_devices, plan.num_stages) == (2, num_stages_of(schedule, 2))
    assert plan.schedule == canonical(schedule)
    assert plan.devices == make_schedule(schedule, num_devices=2, num_microbatches=4).devices
    assert plan.proof.objective_s == plan.proof.lower_bound_s == plan.prediction.step_s == simulate(plan).step_s


def test_a_custom_order_is_planned_as_it_is() -> None:
    own = "custom:0F0 0B0 / 1F0 2F0 2B0 1B0"
    plan = balance(SPLIT, num_devices=2, num_microbatches=1, schedule=own)
    assert (plan.schedule, plan.devices, plan.num_devices) == (own, (0, 1, 1), 2)


def test_devices_that_hold_several_stages_share_their_host_with_no_more_others() -> None:
    shared = replace(SPLIT, num_neighbours=3)
    layers = tuple(replace(x, costs=tuple(replace(y, slow_down=1.6) for y in x.costs)) for x in shared.layers)
    shared = replace(shared, layers=layers)
    plans = [balance(shared, num_devices=2, num_microbatches=2, schedule=x) for x in ("gpipe", "looped-bfs:2")]
    alone = [balance(SPLIT, num_devices=2, num_microbatches=2, schedule=x) for x in ("gpipe", "looped-bfs:2")]
    totals = [[sum(stage.cost.forward_s for stage in plan.stages) for plan in some] for some in (plans, alone)]
    assert totals[0] == pytest.approx([1.2 * x for x in totals[1]])


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"schedule": "interleaved-1f1b:4"}, "interleaved-1f1b:4: 2 devices x 4 chunks = 8 stages, the model has 6 layers"),
    ({"schedule": "looped-bfs:9"}, "try a schedule with fewer chunks"),
    ({"schedule": "zb-v", "recompute": "selected"}, "the best layers to recompute on one depend on the others"),
    ({"schedule": "zb-h1", "recompute": "selected"}, "is known only for stages that recompute everything"),
    ({"schedule": "custom:0F0 0B0"}, "asked for 2 devices, but the custom order has 1 device; leave the number out"),
    (
        {"schedule": "custom:0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1", "num_microbatches": 1},
        "asked for 1 micro-batch, but the custom",
    ),
    ({"schedule": "custom:0F0 0B0 / 1B0 1F0"}, "1B0 comes before 1F0"),
    ({"schedule": "custom:1F0 0F0 0B0 1B0 / 2F0 2B0"}, "custom order: "),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_a_schedule_cannot_have_is_refused_with_the_reason(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        balance(
            SPLIT, **{"num_devices": 2, "num_microbatches": 2 if "custom" not in str(arguments) else 1, **arguments}
        )
    assert message in str(caught.value)


def test_halves_that_were_not_measured_are_asked_for() -> None:
    with pytest.raises(UsageError, match="profile again"):
        balance(SIX, num_devices=2, num_microbatches=2, schedule="zb-h1")


def test_a_machine_is_for_one_stage_on_each_device() -> None:
    link = Link(latency_s=0.0, bytes_per_s=1.0)
    machine = Machine(devices=tuple(MachineDevice(name=x, host="h") for x in "ab"), within=link, between=link)
    with pytest.raises(UsageError, match="plan without --machine"):
        balance(SPLIT, num_devices=2, num_microbatches=2, schedule="looped-bfs:2", machine=machine)
    assert balance(SPLIT, num_devices=2, num_microbatches=2, schedule="zb-h1", machine=machine).stages[0].machine_device


def test_a_step_without_any_time_is_nothing_to_balance() -> None:
    with pytest.raises(UsageError, match="takes no time at all"):
        balance(make_profile([0] * 3, [0] * 3), num_devices=1, num_microbatches=2)


def test_balancing_without_the_milp_loads_no_solver_package() -> None:
    program = "import gplan.strategy_search.planner, sys; sys.exit('pulp' in sys.modules or 'highspy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
