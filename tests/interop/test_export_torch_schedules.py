"""Names of torch's schedules, each made by torch itself and held against the plan's order, action by action."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from gplan.core import Plan
from gplan.interop.export.torch_pipelining import RUNTIME, torch_schedule
from gplan.schedules.registry import num_stages_of
from gplan.simulation.simulator import schedule_of
from tests.interop.planned import planned

OWN = "custom:0F0 0B0 / 1F0 1B0"


def plan_for(schedule: str, num_devices: int, num_microbatches: int) -> Plan:
    stages = [[f"l{i}"] for i in range(num_stages_of(schedule, num_devices))]
    return planned(*stages, schedule=schedule, num_microbatches=num_microbatches)


def orders_of_torch(name: str, *, num_devices: int, num_chunks: int, num_microbatches: int) -> list[list[str]]:
    """What torch's schedule of that name does, rank by rank, made without processes; as its constructor makes it."""
    schedule_class = schedules.get_schedule_class(name)
    orders = []
    for rank in range(num_devices):
        made: Any = object.__new__(schedule_class)
        made._stage, made._stages = SimpleNamespace(stage_index=rank), [None] * num_chunks
        made.pp_group_size, made.n_local_stages, made._n_microbatches = num_devices, num_chunks, num_microbatches
        made.num_stages = made._num_stages = num_devices * num_chunks
        made.number_of_rounds = max(1, num_microbatches // num_devices)
        made.microbatches_per_round = num_microbatches // made.number_of_rounds
        if issubclass(schedule_class, schedules.PipelineScheduleSingle):
            order = made._get_pipeline_order()[rank]
        else:
            order = made._calculate_single_rank_operations(rank)
        orders.append([str(x) for x in order if x is not None and x.is_compute_op])
    return orders


def settings() -> Iterator[tuple[int, int]]:
    """Devices and micro-batches."""
    return ((k, m) for k in range(1, 5) for m in range(1, 13))


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("interleaved-1f1b:2", "Interleaved1F1B"),
        ("interleaved-1f1b:3", "Interleaved1F1B"),
        ("looped-bfs:2", "LoopedBFS"),
        ("zb-h1", "InterleavedZeroBubble"),
    ],
)
def test_where_a_name_is_given_torch_has_the_order_of_the_plan(schedule: str, name: str) -> None:
    named = 0
    for num_devices, num_microbatches in settings():
        plan = plan_for(schedule, num_devices, num_microbatches)
        if torch_schedule(plan).name:
            named += 1
            num_chunks = plan.num_stages // num_devices
            sizes = {"num_devices": num_devices, "num_chunks": num_chunks, "num_microbatches": num_microbatches}
            assert torch_schedule(plan).name == name
            assert orders_of_torch(name, **sizes) == [[str(x) for x in order] for order in schedule_of(plan).orders]
    assert named >= 20


def test_gpipe_of_torch_differs_in_the_order_of_the_backwards_and_says_so() -> None:
    plan = plan_for("gpipe", 3, 4)
    found = orders_of_torch("GPipe", num_devices=3, num_chunks=1, num_microbatches=4)
    assert found[1] == ["1F0", "1F1", "1F2", "1F3", "1B0", "1B1", "1B2", "1B3"]
    assert [str(x) for x in schedule_of(plan).orders[1]] == [*found[1][:4], *reversed(found[1][4:])]
    assert any("starting with the first micro-batch" in x for x in torch_schedule(plan).notes)


def test_zb_v_of_torch_differs_in_the_last_weight_gradients_and_says_so() -> None:
    for num_devices, num_microbatches in ((2, 4), (3, 8), (4, 12)):
        plan = plan_for("zb-v", num_devices, num_microbatches)
        found = orders_of_torch(
            "ZBVZeroBubble", num_devices=num_devices, num_chunks=2, num_microbatches=num_microbatches
        )
        for order, theirs in zip(schedule_of(plan).orders, found, strict=True):
            ours = [str(x) for x in order]
            same = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len({*pair}) == 2), len(ours))
            assert sorted(ours) == sorted(theirs)
            assert all("W" in x for x in ours[same:])
        assert any("orders the last weight gradients" in x for x in torch_schedule(plan).notes)


@pytest.mark.parametrize(
    ("schedule", "num_devices", "num_microbatches"),
    [
        ("eager-1f1b", 2, 4), ("1f1b", 3, 2), ("interleaved-1f1b:2", 2, 3), ("zb-h1", 2, 5), ("zb-h1", 3, 7), (OWN, 2, 1),
    ],
)  # fmt: skip
def test_what_torch_has_no_name_for_is_an_order_in_a_file(
    schedule: str, num_devices: int, num_microbatches: int
) -> None:
    found = torch_schedule(plan_for(schedule, num_devices, num_microbatches))
    assert (found.name, found.class_name, found.is_single) == ("", RUNTIME, False)
    assert "write it with `gplan export --to csv --output gplan.schedule.csv`" in found.notes[0]


@pytest.mark.parametrize(("schedule", "is_split"), [("1f1b", False), ("zb-h1", True), ("zb-v", True)])
def test_a_split_backward_and_torch_compile_do_not_go_together(schedule: str, is_split: bool) -> None:
    notes = torch_schedule(plan_for(schedule, 2, 4)).notes
    assert any("torch.compile" in x for x in notes) == is_split
