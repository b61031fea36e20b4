"""Captures: constants move with a graph to its device, old captures are evicted, gradients stay on after an error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gplan.core.errors import RunError
from gplan.runtime.capture_cache import set_device
from gplan_profiler.capture.capture import capture
from gplan_profiler.model.load import model_in_memory
from tests.runtime.plans import new_captures, pipeline_for, unmeasured_plan


class Positions(nn.Module):
    """Adds the index of every entry, a tensor created in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mix(x)
        return mixed + torch.arange(4, device=x.device)


def test_constants_move_with_graph() -> None:
    chain = capture(Positions(), torch.ones(2, 4))
    stage = chain.stage(0, len(chain)).to("meta")
    set_device(stage, torch.device("cpu"))
    (mixed,) = (node for node in stage.graph.nodes if "arange" in str(node.target))  # type: ignore[union-attr]
    assert mixed.kwargs["device"] == torch.device("cpu")
    set_device(stage, torch.device("meta"))
    (out,) = stage(torch.ones(2, 4, device="meta"))
    assert out.is_meta
    assert mixed.kwargs["device"] == torch.device("meta")


class Rotated(nn.Module):
    """Moves a buffer to where its inputs are, without gradients, as rotary positions do."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            turned = self.frequencies.double().to(x.device, x.dtype) * x.sum()
        mixed: Tensor = self.mix(x) * turned
        return mixed


def test_copies_move_with_graph() -> None:
    chain = capture(Rotated(), torch.ones(2, 4))
    stage = chain.stage(0, len(chain)).to("meta")
    set_device(stage, torch.device("meta"))
    (out,) = stage(torch.ones(2, 4, device="meta"))
    assert out.is_meta


class Lookup(nn.Module):
    """Looks rows up without gradients, which fails for numbers that are too large."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            rows = self.table(x)
        mixed: Tensor = self.mix(rows)
        return mixed


def test_gradient_mode_restored_after_error() -> None:
    file = model_in_memory(Lookup(), inputs=torch.zeros(2, 5, dtype=torch.int64), loss=nn.functional.mse_loss)
    pipe = pipeline_for(file, unmeasured_plan(file, num_devices=1))
    targets = torch.ones(8, 5, 4)
    with pytest.raises(RunError, match="out of range"):
        pipe.step(torch.full((8, 5), 9), targets)
    assert torch.is_grad_enabled()
    pipe.step(torch.zeros(8, 5, dtype=torch.int64), targets)


def test_old_captures_are_evicted() -> None:
    file = model_in_memory(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), inputs=torch.ones(2, 5, 4), loss=nn.functional.mse_loss
    )
    plan = unmeasured_plan(file, num_devices=2)
    with new_captures() as captures:
        pipe = pipeline_for(file, plan)
        pipe.step(torch.ones(8, 5, 4), torch.ones(8, 5, 4))
        for length in range(6, 20):
            pipe.eval_step(torch.ones(8, length, 4), torch.ones(8, length, 4))
        lengths = {x.boundary(1)[0].shape[1] for x in captures()}
    assert lengths == {5, *range(12, 20)}  # the plan's own and the last eight
