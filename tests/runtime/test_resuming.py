"""Resuming: from a checkpoint, without one, and under a plan with another batch size."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gplan
from gplan.cli import main
from gplan.core import Run
from gplan.core.errors import FileError
from gplan.files import json_files
from gplan.runtime.pipeline import Pipeline
from gplan.runtime.run.run_options import RunOptions
from tests.model_files import load_model_file
from tests.runtime.plans import run_virtually, unmeasured_plan
from tests.runtime.semantics.checks import both_engines, plan_of
from tests.runtime.semantics.models import row, subject

ROW = subject(row)

COUNTING = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))

def loss(output, target):
    return ((output - target) ** 2).mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.0)

def batches(batch_size):
    seen = 0
    while True:
        yield torch.arange(seen, seen + batch_size).float()[:, None], torch.zeros(batch_size, 1)
        seen += batch_size
"""


def opened(num_devices: int = 2) -> Pipeline:
    return gplan.pipeline(ROW.build, plan_of(ROW, num_devices), loss=ROW.loss)


def test_resume_without_checkpoint_starts(tmp_path: Path) -> None:
    """A run killed in its first save leaves a partial checkpoint or an empty folder."""
    (tmp_path / "killed" / ".step-000010.part-1a2b").mkdir(parents=True)
    (tmp_path / "empty").mkdir()

    def script() -> list[tuple[dict[str, object], int]]:
        pipe = opened()
        return [(dict(pipe.load(tmp_path / x, must_exist=False)), pipe.num_steps) for x in ("killed", "empty", "none")]

    for parts in both_engines(2, script).values():
        assert all(part == [({}, 0)] * 3 for part in parts)
    with pytest.raises(FileError, match="holds no checkpoint; expected folders such as step-000120"):
        opened().load(tmp_path / "killed")


def test_damaged_checkpoint_refused(tmp_path: Path) -> None:
    opened().save(tmp_path)
    (tmp_path / "step-000000" / ".metadata").write_bytes(b"")
    with pytest.raises(FileError, match="is damaged"):
        opened().load(tmp_path, must_exist=False)


def test_different_batch_size_warns(tmp_path: Path) -> None:
    first = opened()
    for _ in range(3):
        first.step(*ROW.batch(8))
    first.save(tmp_path, progress={"epoch": 3})
    told = "step-000003 was saved with mini-batches of 8 samples, the plan has {}: after 3 steps it has used 24 samples; .* go on after {}"
    for number, size, found in (
        (8, 16, "48, so that 24 samples are skipped"),
        (2, 4, "12, so that 12 samples come again"),
    ):
        other = gplan.pipeline(ROW.build, plan_of(ROW, 2, num_microbatches=number), loss=ROW.loss)
        with pytest.warns(UserWarning, match=told.format(size, found)):
            assert other.load(tmp_path) == {"epoch": 3}


def losses(inputs: Tensor) -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
    return float((model(inputs[:, None]) ** 2).mean().detach())


@pytest.mark.parametrize(
    ("num_microbatches", "first", "told"),
    [
        (2, 24, "the plan has 4: the data go on at batch 7 of that size$"),
        (8, 16, "at batch 2 .*, so that 8 samples come again"),
    ],
    ids=["half", "twice"],
)
def test_data_continue_at_same_sample(tmp_path: Path, num_microbatches: int, first: int, told: str) -> None:
    (tmp_path / "model.py").write_text(COUNTING)
    file, saved = load_model_file(str(tmp_path / "model.py")), tmp_path / "saved"
    before, after = (unmeasured_plan(file, num_devices=2, num_microbatches=m) for m in (4, num_microbatches))
    run_virtually(file, before, RunOptions(num_steps=3, save_every=3, checkpoints=str(saved)))
    with pytest.warns(UserWarning, match=f"was saved with mini-batches of 8 samples, .*{told}"):
        run = run_virtually(file, after, RunOptions(num_steps=4, resume=str(saved)))
    assert len(run.notes) > 0
    assert run.losses == (pytest.approx(losses(torch.arange(first, first + after.batch_size).float())),)


def test_resume_true_on_first_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(COUNTING)
    plan, kept = unmeasured_plan(load_model_file(str(tmp_path / "model.py")), num_devices=2), str(tmp_path / "saved")
    json_files.save(plan, tmp_path / "plan.json")
    command = ["run", "--plan", f"{tmp_path}/plan.json", "--engine", "virtual", "--output", f"{tmp_path}/run.json"]
    for num_steps, num_taken, told in ((2, 2, True), (3, 1, False)):
        with warnings.catch_warnings(record=True) as caught, pytest.raises(SystemExit) as ended:
            warnings.simplefilter("always")
            main([*command, "--steps", str(num_steps), "--save-every", "2", "--checkpoints", kept, "--resume"])
        assert any("yet: the run began with the first step" in str(x.message) for x in caught) is told
        assert ended.value.code == 0
        assert "no checkpoint is in" not in capsys.readouterr().out  # the warning is not repeated as a note
        assert len(json_files.load(Run, tmp_path / "run.json").losses) == num_taken
    with pytest.raises(SystemExit) as ended:
        main([*command, "--resume", str(tmp_path / "elsewhere")])
    assert ended.value.code == 3
    assert "elsewhere is not there" in capsys.readouterr().err


DRAWING = COUNTING.replace("torch.arange(seen, seen + batch_size).float()[:, None]", "torch.rand(batch_size, 1)")


def test_data_continue_by_the_seed_of_the_run_that_saved(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(DRAWING)
    file, saved = load_model_file(str(tmp_path / "model.py")), tmp_path / "saved"
    plan = unmeasured_plan(file, num_devices=2)
    whole = run_virtually(file, plan, RunOptions(num_steps=6, seed=7))
    run_virtually(file, plan, RunOptions(num_steps=3, seed=7, save_every=3, checkpoints=str(saved)))
    rest = run_virtually(file, plan, RunOptions(num_steps=6, resume=str(saved)))
    assert rest.losses == whole.losses[3:]
