"""The optimizer's step on copies of parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gplan.core import StepCost
from gplan.core.errors import ModelError
from profiler.model.load import ModelFile, model_in_memory
from profiler.timing import optimizer_step
from profiler.timing.clock import Clock, CpuClock, Samples
from profiler.timing.optimizer_step import sample_step


def measured_step(file: ModelFile, clock: Clock) -> tuple[StepCost, tuple[str, ...]]:
    sampled, notes = sample_step(file, clock)
    return sampled(lambda samples: samples), notes


def test_adam_state_per_parameter() -> None:
    model = nn.Linear(100, 100)
    found, _ = measured_step(model_in_memory(model, optimizer=torch.optim.Adam), CpuClock())
    assert found.state_bytes == 2 * 4 * 10_100 + 2 * 4
    assert (found.optimizer_name, found.optimizer.num_samples > 0, found.zero_grad.num_samples > 0) == (
        "Adam",
        True,
        True,
    )


@pytest.mark.parametrize(("is_list", "expected"), [(False, (0, 2.0)), (True, (52_000, 0.0))])
def test_workspace_of_one_tensor_or_of_all(is_list: bool, expected: tuple[int, float]) -> None:
    """Adam makes two tensors like the one it updates, or one like each where it updates them as a list."""
    model = nn.ModuleList(nn.Linear(100, n, bias=False) for n in (100, 20, 10))
    found, _ = measured_step(model_in_memory(model, optimizer=partial(torch.optim.Adam, foreach=is_list)), CpuClock())
    by_bytes, largest = expected
    assert (found.workspace_bytes / 52_000, found.largest_workspace) == pytest.approx(
        (by_bytes / 52_000, largest), abs=0.01
    )


def test_the_model_is_not_trained_by_it() -> None:
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    sample_step(model_in_memory(model, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)), CpuClock())
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_some_parameters_stand_for_all_where_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(4)))
    whole, _ = measured_step(model_in_memory(model, optimizer=torch.optim.Adam), CpuClock())
    monkeypatch.setattr(optimizer_step, "MOST_COPIED_BYTES", 2 * 40_000)
    some, _ = measured_step(model_in_memory(model, optimizer=torch.optim.Adam), CpuClock())
    assert some.state_bytes == whole.state_bytes


def test_tied_and_frozen_parameters_in_the_step() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    found, _ = measured_step(model_in_memory(model, optimizer=torch.optim.Adam), CpuClock())
    assert found.state_bytes == 2 * 400 + 4


def test_no_optimizer_costs_nothing() -> None:
    found, _ = measured_step(model_in_memory(nn.Linear(2, 2)), CpuClock())
    assert (found.optimizer_name, found.optimizer.median_s, found.state_bytes) == ("none", 0.0, 0)


def test_an_optimizer_that_cannot_step_alone_is_named() -> None:
    class Closure(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return closure()

    file = model_in_memory(nn.Linear(2, 2), optimizer=lambda p: Closure(p, lr=0.1))
    with pytest.raises(ModelError, match="optimizer of Linear cannot take a step on its own"):
        sample_step(file, CpuClock())


class Counting(CpuClock):
    """A step takes 5 s, 2 s for each tensor and 1 s for every 400 bytes."""

    def time(self, samples: Samples, work: Callable[..., Any], *args: Any) -> Any:
        result = work(*args)
        seconds = 0.0
        if getattr(work, "__name__", "") == "step":
            tensors = [x for group in work.__self__.param_groups for x in group["params"]]  # type: ignore[attr-defined]
            seconds = 5 + 2 * len(tensors) + sum(x.numel() for x in tensors) // 100
        samples.add_clean(seconds, at_s=0.0)
        return result


@pytest.mark.parametrize("most_copied", [2**30, 2 * 40_000])
def test_tensors_and_bytes_take_their_own_times(monkeypatch: pytest.MonkeyPatch, most_copied: int) -> None:
    monkeypatch.setattr(optimizer_step, "MOST_COPIED_BYTES", most_copied)
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(4)))
    found, notes = measured_step(model_in_memory(model, optimizer=torch.optim.Adam), Counting())
    assert found.tensor_s == pytest.approx(2.0)
    bytes_s = 4 * 100 + 5 * (1 if most_copied > 2**20 else 2)  # what is taken once grows with them
    assert found.optimizer.median_s == pytest.approx(bytes_s + 4 * 2)
    assert not notes


def test_all_times_are_brought_to_one_speed() -> None:
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(4)))
    sampled, _ = sample_step(model_in_memory(model, optimizer=torch.optim.Adam), Counting())
    usual, slow = sampled(lambda x: x), sampled(lambda x: x.divided(lambda at_s: np.full(len(at_s), 2.0)))
    assert usual.tensor_s > 0
    assert (slow.tensor_s, slow.update_s) == pytest.approx((usual.tensor_s / 2, usual.update_s / 2))


def test_optimizer_that_rejects_small_tensors() -> None:
    class Wide(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["params"][0].numel() == 1:
                raise ValueError("too narrow")
            return super().step(closure)

    found, notes = measured_step(model_in_memory(nn.Linear(4, 4), optimizer=Wide), CpuClock())
    assert found.tensor_s == 0.0
    assert found.optimizer.median_s > 0
    (note,) = notes
    assert note.startswith(
        "update times are divided by bytes alone, as the optimizer rejects small tensors: ValueError: too narrow"
    )
