"""Recompute layer by layer: how often layers run, what is kept, equal training."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gplan.core import Constraints, Pin, Plan
from gplan.runtime.run.run_options import RunOptions
from gplan.runtime.stage_module import RecomputeSegment, written_buffers
from gplan_profiler.capture.capture import capture, exported
from gplan_profiler.model.load import ModelFile
from gplan_profiler.model.model_reference import SettingValue
from tests.model_files import load_model_file
from tests.runtime.branched_models import branched_file
from tests.runtime.forked import run_forked
from tests.runtime.plans import (
    pipeline_for,
    plan_for,
    recomputing,
    run_virtually,
    scheduled,
    small_example,
    unmeasured_plan,
)

FLOORS = """
import torch
from torch import nn

RUNS = []

class Floor(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.up, self.down = name, nn.Linear(16, 512), nn.Linear(512, 16)
    def forward(self, x):
        RUNS.append(self.name)
        return self.down(torch.tanh(self.up(x)))

def model():
    built = nn.Sequential(*(Floor(str(i)) for i in range(5)))
    built.runs = RUNS
    return built

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)

def loss(output, target):
    return ((output - target) ** 2).mean()

def batches(n):
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(n, 128, 16, generator=generator), torch.randn(n, 128, 16, generator=generator)
"""
ACTIVATION_BYTES = 2 * 128 * 512 * 4  # what a floor keeps of a micro-batch of 2, but for its input


@pytest.fixture
def floors(tmp_path: Path) -> ModelFile:
    """Five equal layers that keep much more than they pass on and count their runs."""
    path = tmp_path / "floors.py"
    path.write_text(FLOORS)
    return load_model_file(str(path))


def runs_of_a_step(file: ModelFile, plan: Plan) -> dict[str, int]:
    """How often each layer's forward runs in one step of the virtual engine."""
    pipe = pipeline_for(file, plan)
    runs: list[str] = file.model.runs  # type: ignore[assignment]
    runs.clear()
    pipe.step(*next(file.batches(plan.batch_size)))
    return Counter(runs)


@pytest.mark.parametrize("selected", [(), ("0", "2", "3"), ("0", "1", "2", "3", "4")])
def test_selected_layers_run_twice(floors: ModelFile, selected: Collection[str]) -> None:
    plan = recomputing(unmeasured_plan(floors, num_devices=2, num_microbatches=3), selected)
    assert runs_of_a_step(floors, plan) == {name: 6 if name in selected else 3 for name in plan.layer_names}


@pytest.mark.parametrize(("schedule", "num_stages"), [("zb-h1", 3), ("zb-v", 4), ("interleaved-1f1b:2", 4)])
def test_recompute_once_per_microbatch(floors: ModelFile, schedule: str, num_stages: int) -> None:
    plan = scheduled(unmeasured_plan(floors, num_devices=num_stages, num_microbatches=3), schedule)
    for again, plan_of_it in (("01234", replace(plan, recompute="always")), ("134", recomputing(plan, "134"))):
        assert runs_of_a_step(floors, plan_of_it) == {x: 6 if x in again else 3 for x in plan.layer_names}


def peak_bytes(file: ModelFile, plan: Plan) -> int:
    (peak,) = run_virtually(file, plan, RunOptions(num_steps=1)).peak_bytes
    return peak


def test_selected_recompute_lowers_peak(floors: ModelFile) -> None:
    plan, num_microbatches = unmeasured_plan(floors, num_devices=1), 4
    never, two, all_five = (peak_bytes(floors, recomputing(plan, "01234"[:n])) for n in (0, 2, 5))
    saved = num_microbatches * ACTIVATION_BYTES  # of one layer
    assert peak_bytes(floors, plan) == pytest.approx(never, rel=0.02)
    assert never - two == pytest.approx(2 * saved, abs=0.5 * saved)
    assert never - all_five == pytest.approx(5 * saved, abs=0.6 * saved)
    whole = peak_bytes(floors, unmeasured_plan(floors, num_devices=1, recompute="always"))
    assert all_five < whole - 2 * ACTIVATION_BYTES  # which has the activations of all five layers at once


def test_recompute_does_not_hold_passing_values(tmp_path: Path) -> None:
    file = load_model_file(branched_file(tmp_path, "towers"))
    rows = torch.randn(2, 8)
    chain = capture(file.model, (rows, rows))
    layer = chain.names.index("a.1")
    segment = RecomputeSegment(chain, layer, layer + 1, chain.stage(layer, layer + 1))
    of_a, of_b = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
    (made,) = (x for x in segment.recomputed(of_a, of_b) if x is not of_b)
    passing = weakref.ref(of_b)
    del of_b
    assert passing() is None
    (found,) = torch.autograd.grad(made.sum(), of_a)
    (expected,) = torch.autograd.grad(file.model.a[1](of_a).sum(), of_a)  # type: ignore[index, operator]
    assert torch.equal(found, expected)


class Slots(torch.autograd.Function):
    """Adds a row of a buffer that it writes into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor) -> Tensor:
        slots[0].add_(1)
        return x + slots[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Buffers(nn.Module):
    """Buffers that are only read, directly or as views, and buffers written in every way."""

    ONLY_READ = ("mask", "table", "scale")

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(4, 4).tril() > 0)
        self.register_buffer("table", torch.randn(9, 4))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("history", torch.zeros(3, 4))
        self.register_buffer("quiet", torch.zeros(4))
        self.register_buffer("slots", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) * self.scale + self.table[: x.shape[0]]
        x = x.masked_fill(self.mask[: x.shape[0]], 0.0)
        self.count += 1
        self.history[1].copy_(x.detach().mean(0))
        with torch.no_grad():
            self.quiet.mul_(0.5).add_(x[0])
        return Slots.apply(x, self.slots) * 2


def test_read_only_buffers_not_restored() -> None:
    layers = exported(Buffers(), torch.randn(4, 4)).stage(0, 1)
    written = {x.data_ptr() for x in written_buffers(layers)}
    found = {name for name, x in layers.named_buffers() if x.data_ptr() not in written}
    assert found == set(Buffers.ONLY_READ)


@pytest.mark.parametrize("is_exported", [True, False])
def test_recompute_restores_buffers(is_exported: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Buffers()), torch.randn(4, 4, requires_grad=True)
    chain = (exported if is_exported else capture)(model, x)
    segment = RecomputeSegment(chain, 0, 1, chain.stage(0, 1))
    before = {name: y.clone() for name, y in segment.named_buffers()}
    (made,) = segment.recomputed(x)
    after = {name: y.clone() for name, y in segment.named_buffers()}
    made.sum().backward()  # type: ignore[no-untyped-call]
    for name, y in segment.named_buffers():
        assert torch.equal(y, after[name])
        assert torch.equal(y, before[name]) == name.endswith(Buffers.ONLY_READ)


@pytest.mark.parametrize(("name", "schedule"), [("transformer_lm", "gpipe"), ("resnet", "1f1b"), ("unet", "1f1b")])
def test_selected_recompute_equals_plain_model(name: str, schedule: str) -> None:
    file = small_example(name)
    plan = unmeasured_plan(file, num_devices=3, schedule=schedule)
    before = {name: x.clone() for name, x in file.model.named_buffers() if name.endswith("batches_tracked")}
    run = run_virtually(file, recomputing(plan, plan.layer_names[::2]), RunOptions(num_steps=2, check=True))
    assert run.check is not None and run.check.passed, run.check
    found = {name: x for name, x in file.model.named_buffers() if name in before}
    assert all(int(x - before[name]) == 2 for name, x in found.items())


@pytest.mark.parametrize(
    ("name", "schedule", "again"),
    [("transformer_lm", "zb-h1", "selected"), ("resnet", "zb-v", "always"), ("unet", "zb-h1", "always")],
)
def test_recompute_with_split_backward(name: str, schedule: str, again: str) -> None:
    file = small_example(name)
    plan = scheduled(unmeasured_plan(file, num_devices=4, num_microbatches=3), schedule)
    plan = replace(plan, recompute="always") if again == "always" else recomputing(plan, plan.layer_names[::2])
    run = run_virtually(file, plan, RunOptions(num_steps=1, check=True))
    assert run.check is not None and run.check.passed, run.check


# a.0 and b.0 change places: the plan's order is not the model's.
TURNED = Constraints(pins=(Pin(layer="b.0", stage=0), Pin(layer="a.0", stage=1)))


def test_dropout_replayed_for_selected_layers(tmp_path: Path) -> None:
    reference = branched_file(tmp_path, "towers")
    plan = plan_for(load_model_file(reference, settings={"dropout": 0.5}), num_devices=2, constraints=TURNED)
    losses = []
    for selected in [(), ("a.0", "b.1"), ("b.0", "a.1", "b.1")]:
        file = load_model_file(reference, settings={"dropout": 0.5})  # whose data begin anew
        losses.append(run_virtually(file, recomputing(plan, selected), RunOptions(num_steps=4)).losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)


def test_torch_engine_replays_dropout(tmp_path: Path) -> None:
    reference = branched_file(tmp_path, "towers")
    settings: dict[str, SettingValue] = {"dropout": 0.5}
    plan = plan_for(load_model_file(reference, settings=settings), num_devices=2, schedule="1f1b", constraints=TURNED)
    losses = [
        run_forked(reference, recomputing(plan, selected), RunOptions(num_steps=3), settings=settings).losses
        for selected in ((), ("a.0", "b.0", "b.1"))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
