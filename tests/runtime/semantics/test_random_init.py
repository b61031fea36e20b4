"""Random values drawn while a model is built equal those of the plain model, on every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gplan
from tests.runtime.semantics.checks import both_engines, built, merged, plain_gradients, plan_of
from tests.runtime.semantics.models import WIDTH, Floor, Subject, subject


class Drawing(nn.Module):
    """Random tensors drawn after some weights: a buffer, one that is not saved, and unregistered ones."""

    kept: Tensor
    unsaved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.floors = nn.ModuleList(Floor() for _ in range(4))
        self.register_buffer("kept", torch.randn(WIDTH))
        self.register_buffer("unsaved", torch.randn(WIDTH), persistent=False)
        self.plain = torch.randn(WIDTH)
        self.several = {"a": [torch.randn(1).expand(WIDTH)]}

    def forward(self, x: Tensor) -> Tensor:
        x = self.floors[0](x) * self.kept + self.unsaved
        x = self.floors[1](x) * self.plain
        x = self.floors[2](x) * self.kept * self.several["a"][0]
        output: Tensor = self.floors[3](x) + self.unsaved * self.plain
        return output


class DrawingChild(nn.Module):
    """An untraced child of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.randn(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.plain


def drawing_row() -> nn.Sequential:
    return nn.Sequential(Floor(), DrawingChild(), Floor(), DrawingChild(), Floor())


@pytest.mark.parametrize("case", [subject(Drawing), subject(drawing_row)], ids=["traced", "row"])
@pytest.mark.parametrize("has_weights", [False, True])
def test_random_tensors_of_lazy_build(case: Subject, has_weights: bool, tmp_path: Path) -> None:
    plan, model = plan_of(case, 2), built(case, seed=5)
    weights = tmp_path / "weights.pt" if has_weights else None
    if weights is not None:
        torch.save(built(case, seed=6).state_dict(), weights)
        model.load_state_dict(torch.load(weights))
    expected, _ = plain_gradients(case, case.batch(8), model=model)

    def script() -> tuple[float, dict[str, Tensor]]:
        torch.manual_seed(os.getpid())
        pipe = gplan.pipeline(case.build, plan, loss=case.loss, weights=weights, seed=5)
        return pipe.step(*case.batch(8)).item(), pipe.state_dict()

    state = model.state_dict()
    for parts in both_engines(2, script).values():
        assert [x for x, _ in parts] == [pytest.approx(expected, rel=1e-5)] * len(parts)
        assert all(torch.equal(x, state[name]) for name, x in merged(y for _, y in parts).items())


class ReadsItsWeights(nn.Module):
    """Cannot be built without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.floors = nn.ModuleList(Floor() for _ in range(4))
        self.scale = 1.0 + abs(float(next(self.parameters()).detach().flatten()[0]))

    def forward(self, x: Tensor) -> Tensor:
        for floor in self.floors:
            x = floor(x) * self.scale
        return x


@pytest.mark.parametrize("build", [drawing_row, ReadsItsWeights])
def test_the_seed_is_that_of_the_script(build: Any) -> None:
    """Without `seed` it is the one of torch.manual_seed; that of the first rank counts, also for dropout."""
    case = subject(build)
    plan = plan_of(case, 2)

    def script() -> tuple[int, dict[str, Tensor]]:
        torch.manual_seed(5 + (dist.get_rank() if dist.is_initialized() else 0))
        pipe = gplan.pipeline(case.build, plan, loss=case.loss)
        return pipe.seed, pipe.state_dict()

    state = built(case, seed=5).state_dict()
    for parts in both_engines(2, script).values():
        assert [seed for seed, _ in parts] == [5] * len(parts)
        assert all(torch.equal(x, state[name]) for name, x in merged(y for _, y in parts).items())
