"""`gplan run` with several stages per device, split backwards and a custom order, and resuming under them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from gplan.core import ActionKind, Plan, Run
from gplan.core.errors import FileError
from gplan.runtime.run.launch import run_plan
from gplan.runtime.run.run_options import RunOptions
from gplan.simulation.simulator import schedule_of
from tests.model_files import load_model_file
from tests.runtime.forked import run_forked
from tests.runtime.plans import plan_for, run_virtually, scheduled

MODEL = """
import torch
from torch import nn

def model():
    table, head = nn.Embedding(5, 6), nn.Linear(6, 5)
    head.weight = table.weight
    return nn.Sequential(table, nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Tanh(), nn.Linear(8, 6)), head)

loss = nn.functional.cross_entropy

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

def batches(n):
    generator = torch.Generator().manual_seed(0)
    while True:
        yield tuple(torch.randint(0, 5, (n,), generator=generator) for _ in range(2))
"""
OWN = (
    "custom:0F0 0F1 0F2 3F0 3B0 0F3 3F1 0B0 3I1 3F2 0I1 3W1 3B2 3F3 0W1 0B2 3B3 0B3 /"
    " 1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2I1 1I1 2W1 1W1 1F3 2F3 2B2 1B2 2B3 1B3"
)
STEPS = 4


@cache
def planned(folder: Path) -> Plan:
    return plan_for(load_model_file(reference(folder)), num_devices=4)


def reference(folder: Path) -> str:
    path = folder / "model.py"
    if not path.exists():
        path.write_text(MODEL)
    return str(path)


def quiet(_index: int, _loss: float) -> None:
    """No progress."""


def assert_follows_its_schedule(run: Run) -> None:
    """Devices, transfers and optimizers are right, and every device ran its order."""
    plan, timeline = run.plan, run.timeline
    assert (timeline.num_devices, len(run.peak_bytes)) == (2, 2)
    for device, order in enumerate(schedule_of(plan).orders):
        spans = [x.action for x in sorted(timeline.spans, key=lambda x: x.start_s) if x.device == device]
        assert [x for x in spans if x.kind is not ActionKind.OPTIMIZER] == list(order)
        assert [x.stage for x in spans if x.kind is ActionKind.OPTIMIZER] == [plan.stages_of(device)[0].index]
    assert {(x.source, x.target) for x in timeline.transfers} == {(0, 1), (1, 0)}
    assert all(x.action.kind is not ActionKind.WEIGHT_GRADIENT for x in timeline.transfers)


def test_resume_under_other_schedules(tmp_path: Path) -> None:
    name, checkpoints = reference(tmp_path), str(tmp_path / "saved")
    plan = planned(tmp_path)
    whole = run_virtually(load_model_file(name), plan, RunOptions(num_steps=STEPS)).losses
    first = RunOptions(num_steps=2, check=True, save_every=1, checkpoints=checkpoints)
    begun = run_forked(name, scheduled(plan, "zb-v"), first)
    assert begun.check is not None and begun.check.passed, begun.check
    then = RunOptions(num_steps=3, resume=checkpoints, save_every=1, checkpoints=checkpoints)
    middle = run_forked(name, scheduled(plan, OWN), then)
    last = RunOptions(num_steps=STEPS, resume=checkpoints)
    ended = run_virtually(load_model_file(name), scheduled(plan, "interleaved-1f1b:2"), last)
    assert [*begun.losses, *middle.losses, *ended.losses] == pytest.approx(whole, rel=1e-5)
    for run in (begun, middle, ended):
        assert_follows_its_schedule(run)


@pytest.mark.parametrize("schedule", ["zb-v", "looped-bfs:2", OWN])
def test_virtual_engine_chunks(tmp_path: Path, schedule: str) -> None:
    plan = scheduled(planned(tmp_path), schedule)
    run = run_virtually(load_model_file(reference(tmp_path)), plan, RunOptions(num_steps=2, check=True))
    assert run.check is not None and run.check.passed, run.check
    assert_follows_its_schedule(run)


def test_misplaced_stages_refused(tmp_path: Path) -> None:
    plan = scheduled(planned(tmp_path), "interleaved-1f1b:2")
    for wrong in (replace(plan, schedule="zb-v"), replace(plan, schedule="looped-bfs:4")):
        with pytest.raises(FileError, match="cannot run: .*balance again"):
            run_plan(wrong, reference(tmp_path), "virtual", RunOptions(), settings={}, functions={}, report=quiet)
