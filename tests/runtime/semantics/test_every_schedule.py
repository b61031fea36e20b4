"""Every schedule, and a custom order, gives the plain model's loss and gradients with both engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core import Plan
from gplan.schedules.registry import num_stages_of
from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import Chain
from gplan_profiler.model.model_reference import describe_inputs
from tests.memo import memoized
from tests.runtime.plans import scheduled
from tests.runtime.semantics.checks import (
    assert_same,
    both_engines,
    built,
    gradients_of,
    merged,
    plain_gradients,
    plan_of,
)
from tests.runtime.semantics.models import NUM_CLASSES, WIDTH, Floor, Subject, sum_loss, token_subject
from tests.scheduled import ONE_OF_EACH

NUM_MICROBATCHES = 4

# Devices with unlike numbers of stages, forwards out of order, some backwards in halves and others whole.
OWN = (
    "custom:0F1 0F0 3F1 4F1 4B1 0F2 0F3 3F0 4F0 4I0 3F2 4F2 3F3 4F3 3B1 3I0 0B1 4W0 4B3 4B2 3W0 3B3 3B2 0I0 0B3 0W0 0B2 /"
    "1F1 2F1 1F0 2F0 1F2 2F2 1F3 2F3 2I1 1I1 2B0 1B0 1W1 2W1 2B3 1I3 2I2 2W2 1B2 1W3"
)


class Woven(nn.Module):
    """Ten layers with features that make a backward hard to split.

    The embedding is the head too; tokens are embedded again in the middle, where no gradient arrives; one layer is
    frozen, two share weights, one uses its weights twice, one has none and returns a view; skips cross all.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.late = (nn.Embedding(NUM_CLASSES, WIDTH) for _ in range(2))
        self.floors = nn.ModuleList(Floor(dropout=dropout) for _ in range(5))
        self.twice, self.turn = Twice(), Turn()
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.head.weight = self.embedding.weight
        self.floors[3].mix = self.floors[0].mix
        self.floors[1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.embedding(tokens)
        second = self.floors[0](first)
        third = self.twice(self.floors[1](second))
        late = self.late(tokens)
        fourth = self.floors[2](third) * first + late
        fifth = self.floors[3](self.turn(fourth).mT) + second
        output: Tensor = self.head(self.floors[4](fifth) + late)
        return output


class Twice(nn.Module):
    """A layer that uses its weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.mix(torch.tanh(self.mix(x)))
        return output


class Turn(nn.Module):
    """A layer without parameters that returns a view."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x).mT


def normed_row() -> nn.Sequential:
    """Frozen first layers, batch norms, a layer without parameters and one that returns a view."""
    norms = [nn.BatchNorm1d(WIDTH) for _ in range(2)]
    model = nn.Sequential(Floor(), Floor(), norms[0], Floor(), nn.Tanh(), Floor(), norms[1], Turn(), Floor())
    model[:2].requires_grad_(False)
    return model


def squares(generator: torch.Generator, num_samples: int) -> Tensor:
    """Samples of WIDTH rows."""
    return torch.randn(num_samples, WIDTH, WIDTH, generator=generator)


CAPTURED: dict[Any, Chain] = {}
WOVEN, DROPPING = token_subject(Woven), token_subject(lambda: Woven(dropout=0.5))
NORMED = Subject(build=normed_row, inputs=squares, targets=squares, loss=sum_loss)


@dataclass(frozen=True)
class Seen:
    """Results of a pipeline on one process."""

    losses: tuple[float, ...]  # of a whole mini-batch, of a small one, and in evaluation
    gradients: dict[str, Tensor]  # of both steps
    buffers: dict[str, Tensor]
    output: Tensor | None


@memoized
def model_of(case: Subject) -> tuple[nn.Module, dict[str, Tensor]]:
    """One model for all pipelines, and its initial state."""
    model = built(case)
    return model, {name: x.clone() for name, x in model.state_dict().items()}


@pytest.fixture(autouse=True)
def one_capture_for_all_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture each model once per kind of input, as capturing takes most of the time."""

    def capture_once(model: nn.Module, inputs: Any, **options: Any) -> Chain:
        key = (model, describe_inputs(inputs), *options.values())
        if key not in CAPTURED:
            CAPTURED[key] = capture(model, inputs, **options)
        return CAPTURED[key]

    monkeypatch.setattr("gplan.runtime.capture_cache.capture", capture_once)


def seen(case: Subject, plan: Plan) -> Seen:
    """Two steps, the second with fewer and smaller micro-batches, and an evaluation."""
    model, state = model_of(case)
    model.zero_grad()
    model.load_state_dict(state)
    pipe = gplan.pipeline(model, plan, loss=case.loss)
    losses = (pipe.step(*case.batch(8)), pipe.step(*case.batch(5, seed=1)), pipe.eval_step(*case.batch(7)))
    return Seen(
        losses=tuple(x.item() for x in losses),
        gradients=gradients_of(pipe),
        buffers={name: x.clone() for name, x in pipe.state_dict().items() if "running" in name},
        output=pipe.predict(case.batch(7)[0]),
    )


@memoized
def expected(case: Subject) -> Seen:
    """Results of one stage on one device."""
    return seen(case, plan_of(case, 1))


@memoized
def cut(case: Subject, num_stages: int) -> Plan:
    """A plan; the woven model is cut after its late embedding, where no input leads to a weight."""
    return plan_of(case, num_stages, cut_after=["late"] if "late" in layers(case) and num_stages > 1 else [])


def layers(case: Subject) -> tuple[str, ...]:
    return plan_of(case, 1).layer_names


def assert_as_expected(case: Subject, parts: list[Seen], *, what: str) -> None:
    """All processes have the same losses, and together the expected gradients, averages and outputs."""
    wanted = expected(case)
    assert [x.losses for x in parts] == [pytest.approx(wanted.losses, rel=1e-5)] * len(parts), what
    assert_same(merged(x.gradients for x in parts), wanted.gradients, what=what)
    assert_same(merged(x.buffers for x in parts), wanted.buffers, what=what)
    (output,) = [x.output for x in parts if x.output is not None]
    assert wanted.output is not None
    torch.testing.assert_close(output, wanted.output)


def test_one_stage_equals_plain_model() -> None:
    model = built(WOVEN)
    losses = [plain_gradients(WOVEN, WOVEN.batch(n, seed=seed), model=model)[0] for n, seed in ((8, 0), (5, 1))]
    found = expected(WOVEN)
    assert found.losses[:2] == pytest.approx(losses, rel=1e-5)
    assert_same(found.gradients, {name: x.grad for name, x in model.named_parameters() if x.grad is not None})


@pytest.mark.parametrize(("num_devices", "schedule"), [(4, x) for x in ONE_OF_EACH] + [(2, "zb-v"), (2, OWN)])
def test_every_schedule_equals_one_device(num_devices: int, schedule: str) -> None:
    cases = [(WOVEN, "never"), (DROPPING, "always"), (NORMED, "never"), (NORMED, "always")]
    num_stages = num_stages_of(schedule, num_devices)
    plans = [replace(scheduled(cut(case, num_stages), schedule), recompute=recompute) for case, recompute in cases]
    for case, _ in cases:
        expected(case)
    found = both_engines(num_devices, lambda: [seen(case, plan) for (case, _), plan in zip(cases, plans, strict=True)])
    for engine, by_rank in found.items():
        for (case, recompute), parts in zip(cases, zip(*by_rank, strict=True), strict=True):
            assert_as_expected(case, list(parts), what=f"{engine}, {case.build.__name__}, recompute {recompute}:")
