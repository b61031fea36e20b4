"""Failed or interrupted saves: every rank gets the error, and earlier checkpoints stay complete."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.optim import LBFGS
from torch.optim import lr_scheduler as schedules

from gplan.core.errors import RunError, UsageError
from gplan.runtime.checkpoint import storage
from gplan.runtime.checkpoint.folder import newest_complete
from tests.runtime.fake_training import (
    Decay,
    adam,
    in_fresh_processes,
    momentum,
    sgd,
    share,
    training,
)


def save_on_a_full_disk(directory: Path) -> str:
    own = share(momentum)
    earlier = own.save(directory, 1, dist.group.WORLD)
    own.run(range(1))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (900, limits[1]))
    with pytest.raises(RunError) as error:
        own.save(directory, 2, dist.group.WORLD)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = sorted(path.name for path in directory.iterdir())
    assert newest_complete(directory) == earlier
    dist.barrier()
    again = own.save(directory, 2, dist.group.WORLD)
    assert newest_complete(directory) == again
    return f"{error.value} | {left}"


def test_full_disk_on_one_rank(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    num_bytes = 2 * 4 * (4 + 1 + 54)  # parameters and momentum of stage 1
    told = (
        f"the checkpoint of step 2 was not saved: rank 1 (stage 1) could not write its {num_bytes} B to {saved}: "
        f"File too large; mend that or save elsewhere; the last complete one is {saved / 'step-000001'} | ['step-000001']"
    )
    assert in_fresh_processes(2, save_on_a_full_disk, tmp_path, saved) == [told, told]


def save_and_die(directory: Path, victim: int) -> str:
    own = share(momentum)
    own.save(directory, 1, dist.group.WORLD)
    write_data = storage._Writer.write_data

    def dying(*arguments: Any) -> Any:
        written = write_data(*arguments)
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    storage._Writer.write_data = dying  # type: ignore[method-assign]
    with pytest.raises(RunError) as error:
        own.save(directory, 2, dist.group.WORLD)
    return str(error.value)


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_killed_while_saving(tmp_path: Path, victim: int) -> None:
    saved = tmp_path / "saved"
    told = in_fresh_processes(2, save_and_die, tmp_path, saved, victim)
    other = 1 - victim
    assert told[victim] is None
    assert f"rank {other} (stage {other}) lost another rank of the run" in told[other]
    assert f"the last complete one is {saved / 'step-000001'}" in told[other]
    assert newest_complete(saved) == saved / "step-000001"
    parts = [path for path in saved.iterdir() if ".part-" in path.name]
    assert bool(parts) == (victim == 0)  # the rank that cleans up was killed

    training(momentum).save(saved, 2)
    assert sorted(path.name for path in saved.iterdir()) == ["step-000001", "step-000002"]


def test_directory_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"step 1 was not saved: .*(exists|directory).*; no earlier one is in"):
        training(sgd).save(tmp_path / "file", 1)


def test_what_cannot_be_pickled_is_told(tmp_path: Path) -> None:
    own = training(sgd, lambda x: [schedules.LambdaLR(x, Decay())])
    own.state.schedulers[0].lr_lambdas[0].hook = lambda: None
    with pytest.raises(UsageError, match=r"the scheduler holds values that a checkpoint cannot keep \(.*pickle"):
        own.save(tmp_path, 1)
    assert not [*tmp_path.iterdir()]


def test_interrupt_while_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage._Writer, "write_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training(sgd).save(tmp_path, 1)


def test_unsavable_optimizer_on_one_rank(tmp_path: Path) -> None:
    told = in_fresh_processes(2, save_with_lbfgs_on_one, tmp_path, tmp_path / "saved")
    assert told[0] == told[1]
    assert "rank 1 (stage 1): LBFGS keeps one state for all parameters" in told[0]


def save_with_lbfgs_on_one(directory: Path) -> str:
    own = share(sgd if dist.get_rank() == 0 else lambda x: LBFGS(x.values()))
    with pytest.raises(UsageError) as error:
        own.save(directory, 1, dist.group.WORLD)
    return str(error.value)


def test_different_optimizers_refused(tmp_path: Path) -> None:
    told = in_fresh_processes(2, save_with_other_optimizers, tmp_path, tmp_path / "saved")
    assert told == ["rank 0 has the optimizers ['SGD'], rank 1 has ['Adam']; make the same on all ranks"] * 2


def save_with_other_optimizers(directory: Path) -> str:
    with pytest.raises(UsageError) as error:
        share([sgd, adam][dist.get_rank()]).save(directory, 1, dist.group.WORLD)
    return str(error.value)
