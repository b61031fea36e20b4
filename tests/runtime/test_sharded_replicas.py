"""Sharded replicas: losses, gradient norms and weights of the plain model, on four ranks, and their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gplan
from gplan.core import Constraints, Link, Plan, Profile, RecomputeMode
from gplan.core.checks import Sharding
from gplan.core.errors import UsageError
from gplan.runtime.sharded_replicas import check_optimizer
from gplan.runtime.sharded_tensors import local_tensor
from gplan_profiler.measure import ProfileOptions, measure_profile
from gplan_profiler.model.load import model_in_memory
from tests.memo import memoized
from tests.runtime.plans import scheduled
from tests.runtime.ranks import on_ranks

WIDTH, NUM_CLASSES, MICROBATCH_SIZE, NUM_MICROBATCHES = 6, 9, 2, 4
NUM_ROWS = 16
MOST_NORM = 0.05


class Mix(nn.Module):
    """A linear layer with parameters without dimensions and without entries, one unused, and one that some rows use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.unused, self.sometimes = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x)) * self.scale + self.empty.sum()
        return y + self.sometimes if float(x.detach().sum()) > 0.0 else y


def build() -> nn.Sequential:
    """An embedding that is tied to the head, layers between, and a frozen one; dimensions that two does not divide."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, NUM_CLASSES)
    model = nn.Sequential(
        nn.Embedding(NUM_CLASSES, WIDTH), Mix(), nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.ReLU(), Mix(), head
    )
    head.weight = model.get_parameter("0.weight")
    return model


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        inputs, targets = (torch.randint(0, NUM_CLASSES, (NUM_ROWS,), generator=generator) for _ in range(2))
        yield inputs, targets


@memoized
def profile() -> Profile:
    link = Link(latency_s=0.0, bytes_per_s=1e9)
    options = ProfileOptions(microbatch_sizes=(MICROBATCH_SIZE,), link=link, budget_s=0.01, contention=0)
    inputs, _ = next(batches())
    return measure_profile(model_in_memory(build(), inputs=inputs, loss=F.cross_entropy), options)


def planned(
    sharding: Sharding, schedule: str = "gpipe", *, num_replicas: int = 2, recompute: RecomputeMode = "never"
) -> Plan:
    """A plan for four ranks; the tied weights are on the first and on the last stage."""
    num_stages = {"interleaved-1f1b:2": 4, "zb-v": 4}.get(schedule, 4 // num_replicas)
    cuts = {1: (), 2: ("2",), 4: ("0", "1", "4")}[num_stages]
    plan = gplan.balance(
        profile(),
        num_devices=num_stages,
        num_microbatches=NUM_ROWS // MICROBATCH_SIZE // num_replicas,
        constraints=Constraints(cut_after=cuts),
    )
    return replace(scheduled(plan, schedule), num_replicas=num_replicas, sharding=sharding, recompute=recompute)


@memoized
def plain() -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """(loss, gradient norm) of three steps of the plain model, each in micro-batches; and its weights after them."""
    model, data, found = build(), batches(), []
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=0.05)
    for _ in range(3):
        inputs, targets = (torch.split(x, MICROBATCH_SIZE) for x in next(data))
        parts = [F.cross_entropy(model(x), y) for x, y in zip(inputs, targets, strict=True)]
        loss = torch.stack(parts).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found, model.state_dict()


Outcome = tuple[list[tuple[float, float]], dict[str, Tensor], list[float]]
"""Losses and norms of steps, the model's weights on rank 0, and `Training.held`."""


class Training:
    """A pipeline with its optimizer and data."""

    def __init__(self, plan: Plan) -> None:
        self.pipe = gplan.pipeline(build, plan, loss=F.cross_entropy, timeout_s=30.0)
        self.optimizer = torch.optim.AdamW([x for x in self.pipe.parameters() if x.requires_grad], lr=0.05)
        self.data = batches()

    def steps(self, number: int) -> list[tuple[float, float]]:
        """(loss, gradient norm) of some steps; the second one's gradients come in two parts."""
        return [self.step(self.pipe.num_steps == 1) for _ in range(number)]

    def step(self, in_parts: bool) -> tuple[float, float]:
        inputs, targets = next(self.data)
        if in_parts:
            parts = [self.pipe.step(x, y, scale=0.5) for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True)]
            self.pipe.num_steps -= 1
            loss = sum(map(float, parts)) / 2
        else:
            loss = float(self.pipe.step(inputs, targets))
        norm = float(self.pipe.clip_grad_norm_(MOST_NORM))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def save(self, place: Path) -> None:
        self.pipe.save(place, optimizer=self.optimizer)

    def resume(self, place: Path) -> None:
        self.pipe.load(place, optimizer=self.optimizer)
        for _ in range(self.pipe.num_steps):
            next(self.data)

    def held(self) -> list[float]:
        """Shares of trained parameters and of the optimizer's state that are here."""
        trained = [x for x in self.pipe.parameters() if x.requires_grad and x.dim()]
        state = [x for entries in self.optimizer.state.values() for x in entries.values() if x.dim()]
        return [
            sum(local_tensor(x).numel() for x in found) / sum(x.numel() for x in found) for found in (trained, state)
        ]


def plans() -> dict[str, Plan]:
    return {
        "optimizer gpipe": planned("optimizer"),
        "weights 1f1b, recomputing": planned("weights", "1f1b", recompute="always"),
        "weights interleaved": planned("weights", "interleaved-1f1b:2"),
        "optimizer zb-v": planned("optimizer", "zb-v"),
        "weights of 4 replicas": planned("weights", num_replicas=4, recompute="always"),
        "whole": planned("none", "1f1b"),
        "optimizer of 4 replicas": planned("optimizer", num_replicas=4),
        "4 stages": planned("none", num_replicas=1),
    }


SAVED = ("weights 1f1b, recomputing", "whole")
RESUMED = (
    ("weights 1f1b, recomputing", "optimizer of 4 replicas"),
    ("weights 1f1b, recomputing", "4 stages"),
    ("whole", "weights interleaved"),
)


def test_training_and_resuming(tmp_path: Path) -> None:
    planned_runs = plans()

    def job(_rank: int) -> dict[str, Outcome]:
        found: dict[str, Outcome] = {}
        for name in [x for x in planned_runs if x not in ("optimizer of 4 replicas", "4 stages")]:
            run = Training(planned_runs[name])
            done = run.steps(2)
            if name in SAVED:
                run.save(tmp_path / name)
                run.pipe.eval_step(*next(batches()))
            found[name] = [*done, *run.steps(1)], run.pipe.full_state_dict(), run.held()
        for saved, name in RESUMED:
            run = Training(planned_runs[name])
            run.resume(tmp_path / saved)
            found[name] = run.steps(1), run.pipe.full_state_dict(), run.held()
        return found

    expected, weights = plain()
    for rank, every in enumerate(on_ranks(4, job)):
        for name, (found, state, _) in every.items():
            assert found == [pytest.approx(x, rel=1e-5) for x in expected[-len(found) :]], name
            for key, tensor in state.items():
                torch.testing.assert_close(tensor, weights[key], rtol=1e-4, atol=1e-6)
            assert state.keys() == (weights.keys() if rank == 0 else set())
        for name, most in (("optimizer gpipe", 0.54), ("weights interleaved", 0.54), ("optimizer of 4 replicas", 0.34)):
            assert max(every[name][2]) < most  # not a half, as dimensions are odd
        assert every["whole"][2] == [1.0, 1.0]


def test_what_ranks_refuse() -> None:
    plan = planned("weights")

    def job(_rank: int) -> str:
        run = Training(plan)
        inputs, targets = next(run.data)
        with pytest.raises(UsageError, match=r"wrapped for replicas already \(DistributedDataParallel\)"):
            gplan.pipeline(nn.parallel.DistributedDataParallel(build()), plan, loss=F.cross_entropy)
        with pytest.raises(UsageError) as caught:
            run.pipe.step(inputs[:5], targets[:5])
        return str(caught.value)

    assert {x.split(":")[0] for x in on_ranks(4, job)} == {"the replicas would run 2 and 1 micro-batches of 5 samples"}


def test_refusals() -> None:
    plan = planned("optimizer")
    with pytest.raises(UsageError, match="LBFGS keeps one state for all parameters, which replicas cannot divide"):
        check_optimizer(torch.optim.LBFGS([torch.zeros(1)]), plan)
    with pytest.raises(UsageError, match="Adafactor works on whole matrices, which replicas cannot divide"):
        check_optimizer(torch.optim.Adafactor([torch.zeros(1)]), plan)
    with pytest.raises(UsageError, match="the virtual engine does not divide"):
        gplan.run(plan, model=build(), engine="virtual", loss=F.cross_entropy)
    with pytest.raises(UsageError, match="zb-h1 splits backwards, whose second half needs weights"):
        gplan.balance(
            profile(), num_devices=2, num_microbatches=4, num_replicas=2, schedule="zb-h1", sharding="weights"
        )
