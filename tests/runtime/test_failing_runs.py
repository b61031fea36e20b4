"""Failing runs end with their cause and spare earlier checkpoints; see also benchmarks/random_kills.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import gplan
from gplan.core import Plan
from gplan.core.errors import FileError, RunError, UsageError
from gplan.runtime.checkpoint.folder import locked_directory
from gplan.runtime.run.run_options import RunOptions
from gplan_profiler.model.load import ModelFile, model_in_memory
from tests.model_files import load_model_file
from tests.runtime.forked import ForkedProcess, forking, launcher_environments
from tests.runtime.plans import pipeline_for, plan_for, run_virtually
from tests.runtime.ranks import on_ranks

# Rank 1 does what WHAT says when it takes the batch of step 4, so after the checkpoint of 3 steps.
MODEL = """
import os, resource
import torch
from torch import nn

def model():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

def loss(output, target):
    return (output - target).square().mean()

def optimizer(parameters):
    return torch.optim.Adam(parameters)

def batches(batch_size):
    what = os.environ.get("WHAT") if os.environ.get("RANK") == "1" else None
    for step, x in enumerate(torch.randn(40, batch_size, 8)):
        if step == 4 and what == "fill the disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))
        if step == 4 and what == "die":
            os.kill(os.getpid(), 9)
        if step == 4 and what == "raise":
            raise ValueError("as told")
        yield x, x
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model file, and a plan of two stages for it."""
    made = tmp_path_factory.mktemp("failing")
    (made / "model.py").write_text(MODEL)
    gplan.save(plan_for(load_model_file(str(made / "model.py")), num_devices=2), made / "plan.json")
    return made


class Started:
    """A command-line run, forked, in its own working folder, by which its processes are found."""

    def __init__(
        self,
        folder: Path,
        place: Path,
        what: str,
        *,
        num_steps: int = 9,
        by: tuple[str, ...] = ("-m",),
        **environment: str,
    ) -> None:
        self._place = place
        self._temporary = place / "tmp"
        self._temporary.mkdir(exist_ok=True)
        self.checkpoints = place / "checkpoints"
        options = f"run --plan {folder / 'plan.json'} --timeout 20 --save-every 3 --steps {num_steps}".split()
        files = ["--checkpoints", str(self.checkpoints), "--output", str(place / "run.json")]
        with forking():
            self.process = ForkedProcess(
                [sys.executable, *by, "gplan", *options, *files],
                env={**os.environ, "WHAT": what, "TMPDIR": str(self._temporary), **environment},
                cwd=place,
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
            )

    def end(self) -> tuple[int, str]:
        """Exit code and standard error; no process and no temporary folder may be left."""
        _, told = self.process.communicate(timeout=60)
        assert self._running() == []
        assert list(self._temporary.glob("gplan-*")) == []
        return self.process.returncode, told

    def _running(self) -> list[Path]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):  # another user's process, or one that has ended
                if entry.readlink() == self._place:
                    found.append(entry)
        return found

    def saved(self) -> list[str]:
        """The names in the checkpoint folder."""
        return sorted(path.name for path in self.checkpoints.iterdir()) if self.checkpoints.is_dir() else []


def test_full_disk_spares_last_checkpoint(folder: Path, tmp_path: Path) -> None:
    run = Started(folder, tmp_path, "fill the disk")
    code, told = run.end()
    assert code == 5
    assert re.search(
        r"^error: the checkpoint of step 6 was not saved: rank 1 \(stage 1\) could not write .*File too", told
    )
    assert run.saved() == [".lock", "step-000003"]


def test_interrupted_save_leaves_no_parts(folder: Path, tmp_path: Path) -> None:
    run = Started(folder, tmp_path, "nothing", num_steps=10**6)
    deadline_s = time.monotonic() + 60.0
    while not any(".part-" in name for name in run.saved()[1:]) and time.monotonic() < deadline_s:
        time.sleep(0.0005)
    run.process.send_signal(signal.SIGINT)
    _, told = run.end()
    assert re.search(r"interrupted; (go on with --resume \S+step-\d{6}|no checkpoint was saved yet)", told)
    assert all(re.fullmatch(r"\.lock|step-\d{6}", name) for name in run.saved())


def test_torchrun_summary_names_cause(folder: Path, tmp_path: Path) -> None:
    by = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    with patch(f"{subprocess_handler.__name__}.Popen", ForkedProcess):
        code, told = Started(folder, tmp_path, "raise", by=by).end()
    assert code != 0
    cause = (
        r"rank 1: in step 5, taking a batch: batches in .*model.py failed: ValueError: as told \(.*model.py, line \d+\)"
    )
    assert re.search(rf"Root Cause[\s\S]*{cause}", told)


@pytest.mark.parametrize(("what", "told"), [("raise", "ended: .*as told"), ("die", "no longer answers")])
def test_another_host_names_the_one_at_fault(folder: Path, tmp_path: Path, what: str, told: str) -> None:
    runs = [Started(folder, tmp_path, what, **environment) for environment in launcher_environments([0, 1])]
    for run in runs:
        run.process.wait(60)
    (code, text), _ = (run.end() for run in runs)
    assert code == 5
    assert re.search(rf"^error: rank 1 on \S+-1 {told}", text, re.MULTILINE), text


def small(**functions: Callable[..., Any]) -> ModelFile:
    """A model of four layers; `functions` replace its loss, optimizer or batches."""

    def batches(num_samples: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.ones(num_samples, 8), torch.zeros(num_samples, 8)

    working: dict[str, Callable[..., Any]] = {"loss": nn.MSELoss(), "optimizer": torch.optim.SGD, "batches": batches}
    return model_in_memory(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), **{**working, **functions})


class FailingOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> NoReturn:
        raise ValueError("as told")


def leaving(num_samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.ones(num_samples, 8), torch.zeros(num_samples, 8)
    sys.exit(0)


def failing_loss(output: Tensor, _target: Tensor) -> Tensor:
    if not output.requires_grad:
        return output.mean()
    raise ValueError("as told")


@pytest.mark.parametrize(
    ("functions", "told"),
    [
        ({"optimizer": FailingOptimizer}, r"in step 1, optimizer on stage 0: ValueError: as told \(.*, line \d+\)"),
        ({"batches": leaving}, r"in step 2, taking a batch: SystemExit: 0 \(.*, line \d+\)"),
        (
            {"loss": failing_loss},
            r"in step 1, forward of micro-batch 0 on stage 1.*: loss in .* failed: ValueError: as told",
        ),
    ],
)
def test_errors_name_step_and_action(functions: dict[str, Callable[..., Any]], told: str) -> None:
    plan = plan_for(small(), num_devices=2)
    with pytest.raises(RunError, match=told):
        run_virtually(small(**functions), plan, RunOptions(num_steps=3))


def loses_a_rank(plan: Plan) -> str | None:
    pipe = pipeline_for(small(), plan)
    batch = torch.ones(plan.batch_size, 8), torch.zeros(plan.batch_size, 8)
    for _ in range(11):  # in the first ten a step begins with a comparison of the batches
        pipe.step(*batch)
    if dist.get_rank() == 1:
        return None  # and its process ends
    with pytest.raises(RunError) as caught:
        pipe.step(*batch)
    assert caught.value.__cause__ is None
    return str(caught.value)


def test_lost_rank_is_reported() -> None:
    plan = plan_for(small(), num_devices=2)
    began_s = time.monotonic()
    told, _ = on_ranks(2, lambda _rank: loses_a_rank(plan))
    assert re.fullmatch(
        r"in step 12, ((forward|backward) of micro-batch \d on )?stage 0: lost another rank of the run, which was killed or reports the reason in its own output \(.*\)",
        told,
    )
    assert time.monotonic() - began_s < 30.0


def test_checkpoint_folder_is_locked(tmp_path: Path) -> None:
    with (
        locked_directory(tmp_path),
        pytest.raises(FileError, match="another run saves its checkpoints to .* now; name another"),
    ):
        locked_directory(tmp_path).__enter__()
    with locked_directory(tmp_path):
        pass


def test_unwritable_folder_refused_early(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="file cannot hold checkpoints: it is a file; name another folder"):
        run_virtually(
            small(), plan_for(small(), num_devices=2), RunOptions(save_every=1, checkpoints=str(tmp_path / "file"))
        )


def test_interrupt_removes_partial_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), locked_directory(tmp_path):
        (tmp_path / "step-000001").mkdir()
        (tmp_path / ".step-000002.part-1a2b").mkdir()
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-000001"]


def test_existing_checkpoints_not_overwritten(tmp_path: Path) -> None:
    options = RunOptions(num_steps=2, save_every=1, checkpoints=str(tmp_path))
    plan = plan_for(small(), num_devices=1)
    run_virtually(small(), plan, options)
    before = sorted(x.name for x in tmp_path.iterdir())
    with pytest.raises(UsageError, match=r"holds the checkpoints of another run, the newest step-000002: .*--resume"):
        gplan.run(plan, model=small().model, engine="virtual", num_steps=2, save_every=1, checkpoints=tmp_path)
    assert sorted(x.name for x in tmp_path.iterdir()) == before
