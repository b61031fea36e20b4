"""The update of moving averages, which is part of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from profiler import measure
from profiler.capture.capture import capture
from profiler.capture.moving_averages import RunningNorm
from profiler.measure import measure_profile
from profiler.timing import averages_step
from profiler.timing.averages_step import time_averages
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


def seconds_of(model: nn.Module) -> tuple[float, list[float]]:
    return time_averages(capture(model, torch.randn(8, 4)), StatedClock())


def test_a_fixed_time_and_one_by_channels(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averages_step, "MovingAverages", Averages)
    fixed_s, by_layer = seconds_of(model)
    assert (fixed_s, by_layer) == (pytest.approx(1.0), pytest.approx([0.0, 0.01, 0.0, 0.03]))


def test_norms_in_evaluation_mode_do_not_move(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single one that does takes a fixed time alone."""
    monkeypatch.setattr(averages_step, "MovingAverages", Averages)
    model[3].eval()
    assert seconds_of(model) == (1.01, [0.0] * 4)
    model[1].eval()
    assert seconds_of(model) == (0.0, [0.0] * 4)


def test_the_model_keeps_its_averages(model: nn.Sequential) -> None:
    model(torch.randn(8, 4))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    seconds_of(model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_layers_of_a_profile_have_their_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of frozen norms too, which the optimizer leaves alone."""

    monkeypatch.setattr(measure, "time_averages", lambda *_, **__: (10.0, [0.0, 2.0, 3.0]))
    model = nn.Sequential(nn.Linear(4, 8), *(nn.BatchNorm1d(8, affine=False) for _ in range(2)))
    found = measure_profile(in_memory(model, lambda n: torch.randn(n, 4), classes), OPTIONS)
    updates_s = [x.update_s or 0.0 for x in found.layers]
    assert updates_s[1:] == [2.0, 3.0]
    assert found.step.fixed_part_s == pytest.approx(10.0, abs=1.0)
    assert found.step.spread_s == pytest.approx(5.0, abs=0.1)
