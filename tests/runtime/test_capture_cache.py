"""Graphs captured on the CPU and run elsewhere: what they make by themselves is made there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gplan.runtime.capture_cache import move_constants
from profiler.capture.capture import capture
from tests.runtime.plans import pipeline_for, plan_for, small_example


class Positions(nn.Module):
    """Adds the place of every entry, by a tensor that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mix(x)
        return mixed + torch.arange(4, device=x.device)


def test_constants_move_with_graph() -> None:
    chain = capture(Positions(), torch.ones(2, 4))
    stage = chain.stage(0, len(chain)).to("meta")
    move_constants(stage, torch.device("cpu"))
    (mixed,) = (node for node in stage.graph.nodes if "arange" in str(node.target))  # type: ignore[union-attr]
    assert mixed.kwargs["device"] == torch.device("cpu")
    move_constants(stage, torch.device("meta"))
    (out,) = stage(torch.ones(2, 4, device="meta"))
    assert out.is_meta
    assert mixed.kwargs["device"] == torch.device("meta")


def test_old_captures_are_evicted() -> None:
    file = small_example("transformer_lm", num_blocks=1)
    pipe = pipeline_for(file, plan_for(file, num_devices=2))
    inputs, target = next(file.batches(8))
    for length in range(2, 16):
        pipe.eval_step(inputs[:, :length], target[:, :length])
    pipe.step(inputs, target)
    captures, engine = pipe.runner._captures, pipe.runner.engine
    assert len(captures._known) == 9
    assert len(engine._flows) <= 9  # type: ignore[union-attr]
    assert next(iter(captures._known.values())).boundary(0)[0].shape == (2, 16)
