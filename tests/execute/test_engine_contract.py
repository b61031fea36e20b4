"""What the adapter uses of torch.distributed.pipelining's private side: each thing is there and does what we rely on."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from gplan.execute.engine import _torch_orders
from gplan.schedules import make_schedule

ALONE = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from gplan.execute.captured import Captured
from gplan.execute.engine import PassWork, TorchEngine
from gplan.execute.randomness import Draws
from gplan.execute.stage import LayerNote, StageModule, StageWork
from gplan.execute.whereabouts import Whereabouts
from gplan.schedules import make_schedule
from profiler.capture.model import capture

class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))
    def forward(self, x):
        return x * self.w

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
module = nn.Sequential(Double())
chain = capture(module, torch.ones(1))
cpu = torch.device("cpu")
stage = StageModule(0, module.parameters(), Draws(0, cpu), Whereabouts())
notes = (LayerNote("0", 0, None),)
stage.begin(StageWork(pieces=(chain.stage(0, 1),), layers=notes, num_microbatches=3, recompute="never"))
engine = TorchEngine(stage, stage, num_stages=1, device=cpu, group=dist.group.WORLD)
losses = engine.run(PassWork(
    captured=Captured(chain, (0, 1), notes), schedule=make_schedule("gpipe", num_devices=1, num_microbatches=3),
    inputs=(torch.tensor([1.0, 2.0, 3.0]),), at_end=lambda outputs, _: outputs[0].sum(),
))
actions = [str(x.action) for x in engine.recorder.take()]
print(json.dumps([float(sum(losses)), float(module[0].w.grad), actions, len(engine.buffers(0))]))
"""


def test_actions_are_stage_kind_and_micro_batch() -> None:
    assert _Action._fields[:3] == ("stage_index", "computation_type", "microbatch_index")
    assert {_ComputationType.FORWARD, _ComputationType.FULL_BACKWARD} <= set(_ComputationType)


def test_the_runtime_takes_orders_without_communication() -> None:
    parameters = inspect.signature(_PipelineScheduleRuntime._prepare_schedule_with_comms).parameters
    assert parameters["format"].default == "compute_only"
    assert "scale_grads" in inspect.signature(_PipelineScheduleRuntime.__bases__[0].__init__).parameters


def test_a_stage_is_told_its_micro_batch_first() -> None:
    for name in ("forward_one_chunk", "backward_one_chunk"):
        assert list(inspect.signature(getattr(PipelineStage, name)).parameters)[1].endswith("_chunk_id")


def test_our_orders_become_torchs_actions_one_for_one() -> None:
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=3)
    orders = _torch_orders(schedule)
    assert [str(x) for x in orders[0]] == [str(x) for x in schedule.orders[0]]
    assert set(orders) == {0, 1}


def test_one_stage_alone_gives_loss_gradient_and_the_schedules_actions(tmp_path: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, f"{tmp_path}/store"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    loss, gradient, actions, num_buffers = json.loads(done.stdout)
    assert (loss, gradient, num_buffers) == (12.0, 6.0, 0)
    assert actions == ["0F0", "0F1", "0F2", "0B2", "0B1", "0B0"]
