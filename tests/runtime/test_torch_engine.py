"""The torch engine: what a step computes and records."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gplan.runtime.capture_cache import CapturedModel
from gplan.runtime.pass_state import EnginePass
from gplan.runtime.random_streams import RandomStreams
from gplan.runtime.stage_module import LayerInfo, StageModule, StagePass
from gplan.runtime.torch_engine import TorchEngine
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


def alone(name: str, *, num_stages: int) -> tuple[list[float], list[float], list[str]]:
    """Losses, gradients and actions of a step on one rank: y = w1 w2 .. x, all w 2, x = 1, 2, 3."""
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
    return losses, gradients, [str(x.action) for x in engine.recorder.take()]


def test_single_stage_loss_and_gradient() -> None:
    ((losses, gradients, actions),) = on_ranks(1, lambda _rank: alone("gpipe", num_stages=1))
    assert (losses, gradients) == ([2.0, 4.0, 6.0], [6.0])
    assert actions == ["0F0", "0F1", "0F2", "0B2", "0B1", "0B0"]


def test_stages_of_one_rank() -> None:
    order = "0F2 1F2 0F0 0F1 1F1 1F0 1I0 1B2 0I0 1I1 0B2 0B1 1W1 1W0 0W0"
    ((losses, gradients, actions),) = on_ranks(1, lambda _rank: alone(f"custom:{order}", num_stages=2))
    assert (losses, gradients) == ([4.0, 8.0, 12.0], [12.0, 12.0])
    assert " ".join(actions) == order


def named_actions(_rank: int) -> list[str]:
    """The ranges of actions in a profile of a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        alone("gpipe", num_stages=1)
    return [x.name for x in profile.events() or () if x.name.startswith("PP:")]


def test_actions_named_for_profiler() -> None:
    (named,) = on_ranks(1, named_actions)
    assert sorted(named) == ["PP:0B0", "PP:0B1", "PP:0B2", "PP:0F0", "PP:0F1", "PP:0F2"]
