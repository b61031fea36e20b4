"""The module at fault is the first, innermost one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from profiler.model.data import first_difference, first_not_finite


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(-x.abs())


def test_the_module_that_first_gives_nan_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), Log()), nn.Linear(2, 2))
    assert first_not_finite(model, lambda: model(torch.ones(1, 2))) == "1.1 (Log)"


def test_the_module_that_draws_random_numbers_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Noise(), nn.Linear(2, 2))
    assert first_difference(model, lambda: model(torch.ones(1, 2))) == "1 (Noise)"


def test_a_model_without_fault_has_no_suspect_and_keeps_no_hooks() -> None:
    model = nn.Linear(2, 2)
    assert first_not_finite(model, lambda: model(torch.ones(1, 2))) is None
    assert first_difference(model, lambda: model(torch.ones(1, 2))) is None
    assert not model._forward_hooks
