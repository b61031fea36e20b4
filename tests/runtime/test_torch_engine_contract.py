"""Contract of torch.distributed.pipelining's private API: each name that the adapter uses exists and behaves as
expected.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from gplan.core import Schedule
from gplan.runtime.capture_cache import CapturedModel
from gplan.runtime.random_streams import RandomStreams
from gplan.runtime.stage_module import LayerInfo, StageModule, StagePass
from gplan.runtime.torch_engine import EnginePass, TorchEngine, _torch_orders, advance_receives
from gplan.schedules.registry import make_schedule
from gplan_profiler.capture.capture import capture
from gplan_profiler.host.heartbeat import Heartbeat
from tests.runtime.ranks import on_ranks


class Double(nn.Module):
    """y = w x, w being 2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


def alone(name: str, *, num_stages: int) -> tuple[list[float], list[float], list[str], int]:
    """Losses, gradients, actions and receive buffers of a step on one rank: y = w1 w2 .. x, all w 2, x = 1, 2, 3."""
    module = nn.Sequential(*(Double() for _ in range(num_stages)))
    chain = capture(module, torch.ones(1))
    cpu = torch.device("cpu")
    notes = tuple(LayerInfo(str(i), i, None) for i in range(num_stages))
    stages = list[StageModule]()
    for i in range(num_stages):
        stage = StageModule(i, module[i].parameters(), RandomStreams(0, cpu), Heartbeat())
        stage.begin(StagePass(segments=(chain.stage(i, i + 1),), layers=notes, num_microbatches=3, recompute="never"))
        stages.append(stage)
    assert dist.group.WORLD is not None
    engine = TorchEngine(stages, device=cpu, group=dist.group.WORLD)
    work = EnginePass(
        captured=CapturedModel(chain, tuple(range(num_stages + 1)), notes),
        schedule=make_schedule(name, num_devices=1, num_microbatches=3),
        inputs=(torch.tensor([1.0, 2.0, 3.0]),),
        loss_fn=lambda outputs, _: outputs[0].sum(),
    )
    losses = [float(x) for x in engine.run(work)]
    gradients = [float(x.grad) for x in module.parameters() if x.grad is not None]
    num_buffers = sum(len(engine.buffers(i)) for i in range(num_stages))
    return losses, gradients, [str(x.action) for x in engine.recorder.take()], num_buffers


def lowered(name: str, *, num_devices: int, num_microbatches: int) -> tuple[Schedule, dict[int, list[_Action]]]:
    """A schedule and its actions in torch's runtime, with sends and receives."""
    schedule = make_schedule(name, num_devices=num_devices, num_microbatches=num_microbatches)
    orders = _add_send_recv(_torch_orders(schedule), schedule.devices.__getitem__, schedule.num_stages)  # type: ignore[arg-type]
    return schedule, orders


def test_action_fields() -> None:
    assert _Action._fields[:3] == ("stage_index", "computation_type", "microbatch_index")
    assert [_ComputationType[x].value for x in ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT")] == [
        "F", "B", "I", "W"
    ]  # fmt: skip


def test_runtime_accepts_orders_without_communication() -> None:
    parameters = inspect.signature(_PipelineScheduleRuntime._prepare_schedule_with_comms).parameters
    assert parameters["format"].default == "compute_only"
    assert "scale_grads" in inspect.signature(_PipelineScheduleRuntime.__bases__[0].__init__).parameters


def test_stage_learns_microbatch_first() -> None:
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        assert list(inspect.signature(getattr(PipelineStage, name)).parameters)[1].endswith("_chunk_id")


def test_overridden_signatures() -> None:
    for owner, name, expected in (
        (PipelineStage, "backward_one_chunk", ["bwd_chunk_id", "loss", "full_backward", "last_backward"]),
        (PipelineStage, "backward_maybe_with_nosync", ["backward_type", "bwd_kwargs", "last_backward"]),
        (PipelineStage, "_retrieve_recv_grads", ["bwd_chunk_id"]),
        (PipelineStage, "perform_reduce_grad", ["grad_scale_factor"]),
        (_PipelineScheduleRuntime, "_assert_unsharded", ["stage"]),
        (
            _PipelineScheduleRuntime,
            "_maybe_compute_loss",
            ["stage", "output", "target_mbs", "mb_index", "loss_kwargs"],
        ),
        (_PipelineScheduleRuntime, "_maybe_get_loss", ["stage", "mb_index"]),
    ):
        assert list(inspect.signature(getattr(owner, name)).parameters)[1:] == expected
    assert [*inspect.signature(stage_backward).parameters][:3] == ["stage_output", "output_grads", "input_values"]


def test_gathered_parameters_stay_the_same_tensors() -> None:
    def job(_rank: int) -> list[bool]:
        module = nn.Linear(3, 3)
        fully_shard(module, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"), reshard_after_forward=True)  # type: ignore[arg-type]
        assert isinstance(module, FSDPModule)
        module.unshard()
        gathered, freed = module.weight, []
        for _ in range(2):
            module.reshard()
            freed.append(gathered.untyped_storage().nbytes() == 0 and module.weight is not gathered)
            module.unshard()
        return [*freed, module.weight is gathered, gathered.untyped_storage().nbytes() > 0]

    assert on_ranks(2, job) == [[True] * 4] * 2


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b:3", "zb-h1", "zb-v"])
def test_receive_order_is_send_order(name: str) -> None:
    schedule, orders = lowered(name, num_devices=3, num_microbatches=5)
    pairs = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}
    for receiver, theirs in orders.items():
        received = [x for x in advance_receives(theirs) if x.computation_type.name.startswith("RECV")]
        for sender, own in orders.items():
            sent = [
                (
                    pairs[x.computation_type.name][0],
                    x.stage_index + pairs[x.computation_type.name][1],
                    x.microbatch_index,
                )
                for x in own
                if x.computation_type.name in pairs
            ]
            found = [(x.computation_type.name, x.stage_index, x.microbatch_index) for x in received]
            source = {x: schedule.devices[x[1] - pairs["SEND" + x[0][4:]][1]] for x in found}
            to_receiver = [x for x in sent if schedule.devices[x[1]] == receiver]
            assert [x for x in found if source[x] == sender] == to_receiver


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b:2", "zb-h1", "zb-v"])
def test_receives_are_posted_early(name: str) -> None:
    _, orders = lowered(name, num_devices=2, num_microbatches=6)
    for theirs in orders.values():
        order = advance_receives(theirs)
        assert sorted(map(str, order)) == sorted(map(str, theirs))
        assert [x for x in order if x not in _received(order)] == [x for x in theirs if x not in _received(theirs)]
        begun = {str(x): i for i, x in enumerate(order)}
        computing = [x for x in order if x.computation_type.name in ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT")]
        for place, action in enumerate(computing):
            kind = "RECV_F" if action.computation_type.name == "FORWARD" else "RECV_B"
            awaited = f"{action.stage_index}{kind}{action.microbatch_index}"
            if awaited in begun:
                assert begun[awaited] < begun[str(computing[max(0, place - 2)])]


def test_evaluation_receives_everything() -> None:
    _, orders = lowered("1f1b", num_devices=2, num_microbatches=4)
    forwards = [x for x in orders[1] if x.computation_type.name in ("FORWARD", "RECV_F", "SEND_F")]
    assert [str(x) for x in advance_receives(forwards)] == [
        "1RECV_F0", "1RECV_F1", "1RECV_F2", "1RECV_F3", "1F0", "1F1", "1F2", "1F3"
    ]  # fmt: skip


def test_unneeded_receive_is_kept() -> None:
    order = [_Action.from_str(x) for x in ("1RECV_F0", "1F0", "1RECV_B7")]
    assert advance_receives(order) == order


def test_receives_outstanding() -> None:
    _, orders = lowered("gpipe", num_devices=2, num_microbatches=20)
    order = advance_receives(orders[1])
    assert [x.computation_type.name for x in order[:14]] == ["RECV_F"] * 13 + ["FORWARD"]


def _received(order: Sequence[_Action]) -> list[_Action]:
    return [x for x in order if x.computation_type.name.startswith("RECV")]


def test_no_sends_within_a_rank() -> None:
    schedule, orders = lowered("zb-v", num_devices=2, num_microbatches=2)
    assert schedule.devices == (0, 1, 1, 0)
    sent = {(x.stage_index, x.computation_type.name) for x in orders[1] if x.computation_type.name.startswith("SEND")}
    assert sent == {(1, "SEND_B"), (2, "SEND_F")}


def test_orders_become_torch_actions() -> None:
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=3)
    orders = _torch_orders(schedule)
    assert [str(x) for x in orders[0]] == [str(x) for x in schedule.orders[0]]
    assert set(orders) == {0, 1}


def test_single_stage_loss_and_gradient() -> None:
    ((losses, gradients, actions, num_buffers),) = on_ranks(1, lambda _rank: alone("gpipe", num_stages=1))
    assert (losses, gradients, num_buffers) == ([2.0, 4.0, 6.0], [6.0], 0)
    assert actions == ["0F0", "0F1", "0F2", "0B2", "0B1", "0B0"]


def test_same_rank_stages_have_no_buffers() -> None:
    order = "0F2 1F2 0F0 0F1 1F1 1F0 1I0 1B2 0I0 1I1 0B2 0B1 1W1 1W0 0W0"
    ((losses, gradients, actions, num_buffers),) = on_ranks(1, lambda _rank: alone(f"custom:{order}", num_stages=2))
    assert (losses, gradients, num_buffers) == ([4.0, 8.0, 12.0], [12.0, 12.0], 0)
    assert " ".join(actions) == order


def named_actions(_rank: int) -> tuple[list[str], list[str]]:
    """The actions that torch names in a step without and with a profiler."""
    named: list[str] = []
    naming = vars(schedules)["record_function"]

    def actions(name: str) -> AbstractContextManager[object]:
        named.append(name)
        return naming(name)

    vars(schedules)["record_function"] = actions
    alone("gpipe", num_stages=1)
    without = list(named)
    assert vars(schedules)["record_function"] is actions
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        alone("gpipe", num_stages=1)
    return without, named


def test_actions_named_for_profiler() -> None:
    ((without, named),) = on_ranks(1, named_actions)
    assert without == []
    assert [x for x in named if x[-2:-1] in "FB"] == ["PP:0F0", "PP:0F1", "PP:0F2", "PP:0B2", "PP:0B1", "PP:0B0"]
