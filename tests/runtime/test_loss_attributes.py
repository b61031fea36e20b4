"""Losses that read attributes which the forward sets on modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gplan
from gplan.core.errors import ModelError
from gplan_profiler.model.load import model_in_memory
from tests.runtime.plans import plan_for


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.aux: Any = torch.zeros(())
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu()
        self.aux = y.pow(2).mean()
        self.losses.append(self.aux)
        return x + y


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def read_aux(model: nn.Module) -> Tensor:
    return torch.stack([x.aux for x in model.modules() if isinstance(x, Block)]).sum()


def read_losses(model: nn.Module) -> Tensor:
    return torch.stack([y for x in model.modules() if isinstance(x, Block) for y in x.losses]).sum()


@pytest.mark.parametrize(("read", "name"), [(read_aux, "aux"), (read_losses, "losses")])
@pytest.mark.parametrize("make", [Blocks, lambda: nn.Sequential(Block(), Block(), nn.Linear(8, 5))])
def test_loss_that_reads_an_attribute_of_the_forward_is_refused(
    make: Callable[[], nn.Module], read: Callable[[nn.Module], Tensor], name: str
) -> None:
    model, inputs = make(), torch.randn(4, 8)
    plan = plan_for(model_in_memory(model, inputs=inputs), num_devices=2)
    pipe = gplan.pipeline(model, plan, loss=lambda output, y: cross_entropy(output, y) + read(model), inputs=inputs)
    with pytest.raises(ModelError, match=f"the loss reads the attribute {name} of Block"):
        pipe.step(torch.randn(plan.batch_size, 8), torch.randint(5, (plan.batch_size,)))


def test_attributes_that_the_loss_does_not_read_are_accepted() -> None:
    model, inputs = Blocks(), torch.randn(4, 8)
    plan = plan_for(model_in_memory(model, inputs=inputs), num_devices=2)
    pipe = gplan.pipeline(model, plan, loss=cross_entropy, inputs=inputs)
    x, y = torch.randn(plan.batch_size, 8), torch.randint(5, (plan.batch_size,))
    assert float(pipe.step(x, y)) == pytest.approx(float(cross_entropy(model(x), y).detach()), rel=1e-5)
