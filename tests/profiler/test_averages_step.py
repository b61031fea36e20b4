"""The update of moving averages, which is part of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from gplan.core import StepCost, Timing
from profiler.capture.capture import capture
from profiler.capture.running_norms import RunningNorm
from profiler.measure import measure_profile
from profiler.timing import averages_step
from profiler.timing.averages_step import sample_averages
from tests.profiler.test_measure import OPTIONS, classes, in_memory
from tests.profiler.test_optimizer_step import StatedClock


class Averages:
    """An update takes a second, and a millisecond per channel."""

    def __init__(self, norms: Sequence[RunningNorm]) -> None:
        self._norms = norms

    @contextmanager
    def microbatch(self, norms: Sequence[RunningNorm]) -> Iterator[None]:
        assert norms is self._norms
        yield

    def finish(self) -> float:
        return 1.0 + 1e-3 * sum(x.running_mean.numel() for x in self._norms)


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 10), nn.BatchNorm1d(10), nn.Linear(10, 30), nn.BatchNorm1d(30))


def norms_of(model: nn.Module) -> tuple[RunningNorm, ...]:
    chain = capture(model, torch.randn(8, 4))
    return chain.norms(0, len(chain))


def test_a_fixed_time_and_one_by_channels(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averages_step, "MovingAverages", Averages)
    norms, second, weight = norms_of(model), Timing.exactly(1.0), model.get_parameter("0.weight")
    update = StepCost(optimizer=second, zero_grad=second, optimizer_name="SGD", state_bytes=0, workspace_bytes=0)
    add = sample_averages(norms, StatedClock())
    step, seconds = add(lambda samples, beside=False: samples, (update, {weight: 2.0}))
    assert (step.optimizer.median_s, step.fixed_s) == pytest.approx((1.0 + 1.04, 1.0))
    assert step.zero_grad == second
    means = [model.get_buffer(f"{i}.running_mean") for i in (1, 3)]
    assert [seconds[x] for x in (weight, *means)] == pytest.approx([2.0, 0.01, 0.03])


def test_a_single_norm_has_a_fixed_time_alone(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averages_step, "MovingAverages", Averages)
    add = sample_averages(norms_of(model)[:1], StatedClock())
    step, seconds = add(lambda samples, beside=False: samples, (StepCost.none(), {}))
    assert (step.optimizer.median_s, step.fixed_s, [*seconds.values()]) == (1.01, 1.01, [0.0])


def test_the_model_keeps_its_averages(model: nn.Sequential) -> None:
    model(torch.randn(8, 4))
    norms = norms_of(model)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    sample_averages(norms, StatedClock())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_layers_of_a_profile_have_their_averages() -> None:
    """Those of frozen norms too, which the optimizer leaves alone; norms in evaluation mode do not move theirs."""
    model = nn.Sequential(nn.Linear(4, 4096), *(nn.BatchNorm1d(4096, affine=False) for _ in range(3)))
    model[3].eval()
    found = measure_profile(in_memory(model, lambda n: torch.randn(n, 4), classes), OPTIONS)
    updates_s = [x.update_s or 0.0 for x in found.layers]
    assert updates_s[0] > 0 and updates_s[1] == updates_s[2] > 0 and updates_s[3] == 0
    assert found.step.spread_s == pytest.approx(sum(updates_s))
