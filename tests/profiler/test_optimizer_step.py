"""The optimizer's step on copies of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from gplan.core import StepCost
from gplan.core.errors import ModelError
from gplan_profiler.model.load import ModelFile, model_in_memory
from gplan_profiler.timing import optimizer_step
from gplan_profiler.timing.clock import Clock, CpuClock, Samples
from gplan_profiler.timing.optimizer_step import StepSampler


class StatedClock(CpuClock):
    """Work takes the seconds that it returns."""

    def time(self, samples: Samples, work: Callable[..., Any], *args: Any) -> Any:
        result = work(*args)
        samples.clean_s.append(result if isinstance(result, float) else 0.0)
        return result


class OneSecond(torch.optim.Optimizer):
    """A step takes a second by its clock."""

    seconds = 1.0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> float:  # type: ignore[override]
        return self.seconds


def measured_step(file: ModelFile, clock: Clock) -> tuple[StepCost, tuple[str, ...]]:
    found = sampled(file, clock)
    return found.update()[0], found.notes


def sampled(
    file: ModelFile,
    clock: Clock,
    *,
    shares: Sequence[set[int]] = (),
    work_beside: Callable[[], object] | None = None,
) -> StepSampler:
    """A sampler after one call of `sample`."""
    found = StepSampler(file, clock, shares=shares, work_beside=work_beside)
    found.sample()
    return found


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


@pytest.mark.parametrize("has_work", [True, False])
def test_the_step_is_sampled_beside_a_pass_and_beside_other_steps(
    has_work: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a pass of the neighbours it takes twice as long here, and beside their steps three times."""
    works = list[Callable[[], object]]()
    beside = list[object]()

    class Others:
        are_alive = True

        def __init__(self, work: Callable[[], object]) -> None:
            self.work = work

        @contextmanager
        def running(self) -> Iterator[None]:
            beside.append(self.work)
            seconds = 2.0 if self.work is a_pass else 3.0
            if beside.count(self.work) == 2:
                seconds = 20.0  # other work on the host
            with monkeypatch.context() as patch:
                patch.setattr(OneSecond, "seconds", seconds)
                yield

    @contextmanager
    def recorded(_shares: object, work: Callable[[], object], _parameters: object) -> Iterator[Others]:
        works.append(work)
        yield Others(work)

    def a_pass() -> None: ...

    monkeypatch.setattr(optimizer_step, "neighbours", recorded)
    file = model_in_memory(nn.Linear(4, 4), optimizer=lambda p: OneSecond(p))
    found, _ = sampled(file, StatedClock(), shares=[{0}], work_beside=a_pass if has_work else None).update()
    assert len(works) == 1 + has_work
    assert (found.slow_down, found.update_slow_down) == (2.0 if has_work else 3.0, 3.0)


def test_the_model_is_not_trained_by_it() -> None:
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    sampled(model_in_memory(model, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)), CpuClock())
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


def test_an_optimizer_that_cannot_step_alone_is_named() -> None:
    class Closure(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return closure()

    file = model_in_memory(nn.Linear(2, 2), optimizer=lambda p: Closure(p, lr=0.1))
    with pytest.raises(ModelError, match="optimizer of Linear cannot take a step on its own"):
        sampled(file, CpuClock())


class Counting(CpuClock):
    """A step takes 5 s. Each tensor of more than one element takes 2 s and 1 s for a kB, or 2 s if it has over 20 kB."""

    def time(self, samples: Samples, work: Callable[..., Any], *args: Any) -> Any:
        result = work(*args)
        seconds = 0.0
        if getattr(work, "__name__", "") == "step":
            tensors = [x for group in work.__self__.param_groups for x in group["params"]]  # type: ignore[attr-defined]
            seconds = 5 + sum(2 + x.nbytes / 1000 * (1 + (x.nbytes > 20_000)) for x in tensors if x.numel() > 1)
        samples.clean_s.append(seconds)
        return result


@pytest.mark.parametrize("most_copied", [2**30, 60_000])
def test_a_byte_of_a_large_tensor_has_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch, most_copied: int) -> None:
    monkeypatch.setattr(optimizer_step, "MOST_COPIED_BYTES", most_copied)
    model = nn.Sequential(*(nn.Linear(100, n, bias=False) for n in (100, 25, 25, 25)))
    sampler = sampled(model_in_memory(model, optimizer=torch.optim.Adam), Counting())
    step, updates_s = sampler.update()
    assert step.fixed_s == pytest.approx(5.0)
    assert [updates_s[x] for x in model.parameters()] == pytest.approx([2 + 80, 2 + 10, 2 + 10, 2 + 10])
    assert step.update_s == pytest.approx(5 + 82 + 3 * 12)
    assert not sampler.notes


def test_tensors_that_the_optimizer_rejects_alone_count_by_bytes() -> None:
    """The bias is rejected: the times of both are by bytes."""

    class NeedsAMatrix(OneSecond):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters)
            if all(x.dim() < 2 or x.numel() == 1 for group in self.param_groups for x in group["params"]):
                raise ValueError("nothing to do")

        def step(self, closure: Any = None) -> float:  # type: ignore[override]
            return float(sum(10 if x.dim() < 2 else x.numel() for x in self.param_groups[0]["params"]))

    model = nn.Linear(5, 4)
    sampler = sampled(model_in_memory(model, optimizer=lambda p: NeedsAMatrix(p)), StatedClock())
    step, updates_s = sampler.update()
    assert (step.fixed_s, updates_s[model.weight], updates_s[model.bias]) == pytest.approx((0.0, 25.0, 5.0))
    fixed, note = sampler.notes
    assert fixed.startswith(
        "the fixed time of an update counts as 0, as the optimizer rejects tensors of shape 1 x 1: Value"
    )
    assert note.startswith(
        "the optimizer rejects some tensors without the others, so all times are by bytes: shape 4: ValueError: nothing to do"
    )


def test_the_update_is_that_of_all_times_of_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first a step takes a second and three beside others; later two and two."""
    beside_s = 3.0

    class Others:
        are_alive = True

        @contextmanager
        def running(self) -> Iterator[None]:
            with monkeypatch.context() as patch:
                patch.setattr(OneSecond, "seconds", beside_s)
                yield

    @contextmanager
    def beside(*_: object) -> Iterator[Others]:
        yield Others()

    monkeypatch.setattr(optimizer_step, "neighbours", beside)
    sampler = StepSampler(
        model_in_memory(nn.Linear(4, 4), optimizer=lambda p: OneSecond(p)), StatedClock(), shares=[{0}]
    )
    sampler.sample()
    beside_s = 2.0
    monkeypatch.setattr(OneSecond, "seconds", 2.0)
    sampler.sample()
    found, _ = sampler.update()
    assert (found.optimizer.median_s, found.update_slow_down) == (1.5, (3.0 + 1.0) / 2)


@pytest.mark.parametrize("optimizer", [None, torch.optim.Adam])
def test_nothing_to_update_takes_no_time(optimizer: Any) -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    file = model_in_memory(frozen, optimizer=optimizer) if optimizer else model_in_memory(nn.Linear(4, 4))
    sampler = sampled(file, CpuClock(), shares=[{0}])
    assert sampler.update() == (StepCost.none(origin="measured"), {})
    assert sampler.notes == ()
