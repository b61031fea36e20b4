"""Random numbers that depend on their shape alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gplan_profiler.model.random_draws import DrawsByShape


@pytest.mark.parametrize(
    "draw",
    [
        lambda size: torch.rand(size),
        lambda size: torch.zeros(size).normal_(),
        lambda size: torch.randint(0, 100, size),
        lambda size: torch.normal(0.0, 1.0, size),
        lambda size: torch.randperm(size[0]),
    ],
    ids=["rand", "normal_", "randint", "normal", "randperm"],
)
def test_each_shape_has_numbers_of_its_own(draw: Callable[[tuple[int, ...]], Tensor]) -> None:
    with torch.random.fork_rng(devices=[]), DrawsByShape():
        first, longer = draw((20,)), draw((40,))
        again = draw((20,))
    assert torch.equal(first, again)
    assert not torch.equal(first, longer[:20])
