"""The optimizer's step: on copies, of some parameters for all where they are many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gplan.errors import ModelError
from profiler.model.load import model_in_memory
from profiler.timing import optimizer_step
from profiler.timing.clock import CpuClock
from profiler.timing.optimizer_step import measure_step


def test_adam_keeps_two_moments_and_a_counter_for_every_parameter() -> None:
    model = nn.Linear(100, 100)
    found = measure_step(model_in_memory(model, optimizer=torch.optim.Adam), CpuClock())
    assert found.state_bytes == 2 * 4 * 10_100 + 2 * 4
    assert (found.optimizer_name, found.optimizer.num_samples > 0, found.zero_grad.num_samples > 0) == (
        "Adam",
        True,
        True,
    )


def test_the_model_is_not_trained_by_it() -> None:
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    measure_step(model_in_memory(model, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)), CpuClock())
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_some_parameters_stand_for_all_where_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(4)))
    whole = measure_step(model_in_memory(model, optimizer=torch.optim.Adam), CpuClock())
    monkeypatch.setattr(optimizer_step, "MOST_COPIED_BYTES", 2 * 40_000)
    some = measure_step(model_in_memory(model, optimizer=torch.optim.Adam), CpuClock())
    assert some.state_bytes == whole.state_bytes


def test_a_tied_or_frozen_parameter_is_stepped_once_or_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    found = measure_step(model_in_memory(model, optimizer=torch.optim.Adam), CpuClock())
    assert found.state_bytes == 2 * 400 + 4


def test_no_optimizer_costs_nothing() -> None:
    found = measure_step(model_in_memory(nn.Linear(2, 2)), CpuClock())
    assert (found.optimizer_name, found.optimizer.median_s, found.state_bytes) == ("none", 0.0, 0)


def test_an_optimizer_that_cannot_step_alone_is_named() -> None:
    class Closure(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return closure()

    file = model_in_memory(nn.Linear(2, 2), optimizer=lambda p: Closure(p, lr=0.1))
    with pytest.raises(ModelError, match="optimizer of Linear cannot take a step on its own"):
        measure_step(file, CpuClock())


def test_a_tensor_however_small_takes_its_time() -> None:
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(20)))
    found = measure_step(model_in_memory(model, optimizer=torch.optim.Adam), CpuClock())
    assert 0 < found.tensor_s < found.optimizer.high_s


def test_an_optimizer_that_wants_more_than_one_number_of_each_tensor_has_bytes_alone() -> None:
    class Wide(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["params"][0].numel() == 1:
                raise ValueError("too narrow")
            return super().step(closure)

    found = measure_step(model_in_memory(nn.Linear(4, 4), optimizer=Wide), CpuClock())
    assert found.tensor_s == 0.0
    assert found.optimizer.median_s > 0
