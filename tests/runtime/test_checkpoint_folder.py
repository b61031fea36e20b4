"""Checkpoint folders: the newest, leftovers of killed runs, completeness."""

from __future__ import annotations

import hashlib
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gplan.core.errors import FileError, RunError, UsageError
from gplan.runtime.checkpoint import folder
from gplan.runtime.checkpoint.collective import RankGroup
from gplan.runtime.checkpoint.folder import DamagedError, newest_complete, partial_path
from gplan.runtime.checkpoint.loading import load_checkpoint
from gplan.runtime.checkpoint.saving import save_checkpoint
from gplan.runtime.checkpoint.state import RankState
from gplan.runtime.checkpoint.storage import CheckpointReader, write_checkpoint
from tests.runtime.ranks import on_ranks


def state(value: float = 0.0) -> RankState:
    return RankState(model={"x": torch.full((40,), value)}, parameters={})


def save(directory: Path, step: int, value: float = 0.0) -> Path:
    return save_checkpoint(directory, state(value), step=step, progress={}, digest="d", group=None)


def value_in(path: Path) -> float:
    into = state()
    load_checkpoint(path, into, digest="d", group=None)
    return into.model["x"][0].item()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_highest_step_is_newest(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 20):
        save(tmp_path, step)
    assert newest_complete(tmp_path) == loaded_from(tmp_path)[1] == tmp_path / "step-1000000"
    assert names(tmp_path) == ["step-000020", "step-1000000", "step-999999"]


def test_named_checkpoint_is_read(tmp_path: Path) -> None:
    save(tmp_path, 2, 2.0)
    first = save(tmp_path, 1, 1.0)
    assert loaded_from(first) == (1.0, first, "")


def test_empty_directory_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="holds no checkpoint; expected folders such as step-000120"):
        value_in(tmp_path)
    with pytest.raises(FileError, match="is not there"):
        value_in(tmp_path / "nowhere")
    assert newest_complete(tmp_path) is None


def test_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 3, 1.0)
    assert value_in(save(tmp_path, 3, 2.0)) == 2.0
    assert names(tmp_path) == ["step-000003"]


def test_failed_save_keeps_previous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 3, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(folder, "byte_ranges", lambda _: [folder.ByteRange("x", "__7_0.distcp", 0, 1)])
        with pytest.raises(RunError, match=r"is incomplete: __7_0\.distcp is missing"):
            save(tmp_path, 3, 2.0)
    assert names(tmp_path) == ["step-000003"]
    assert value_in(tmp_path) == 1.0


def test_killed_between_renames(tmp_path: Path) -> None:
    save(tmp_path, 2, 2.0)
    save(tmp_path, 3, 3.0).rename(tmp_path / ".step-000003.old")
    assert value_in(tmp_path) == 3.0
    save(tmp_path, 4, 4.0)
    assert names(tmp_path) == ["step-000002", "step-000003", "step-000004"]
    assert value_in(tmp_path / "step-000003") == 3.0


def test_killed_after_renames(tmp_path: Path) -> None:
    save(tmp_path, 3, 1.0).rename(tmp_path / ".step-000003.old")
    save(tmp_path / "new", 3, 2.0).rename(tmp_path / "step-000003")
    assert value_in(tmp_path) == 2.0
    save(tmp_path, 4)
    assert [name for name in names(tmp_path) if "step" in name] == ["step-000003", "step-000004"]
    assert value_in(tmp_path / "step-000003") == 2.0


def test_leftovers_are_removed(tmp_path: Path) -> None:
    for left in (".step-000120.part-ab12", "notes", "step-7", ".step-000120.partial"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "file").write_text("")
    save(tmp_path, 121)
    assert names(tmp_path) == [".step-000120.partial", "notes", "step-000121", "step-7"]


def loaded_from(path: Path) -> tuple[float, Path, str]:
    into = state()
    loaded = load_checkpoint(path, into, digest="d", group=None)
    return into.model["x"][0].item(), loaded.path, loaded.note


def flip(path: Path) -> None:
    """Flip a bit of the values."""
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    place = content.index(torch.full((40,), 3.0).numpy().tobytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_damaged_checkpoints_skipped(tmp_path: Path) -> None:
    first, second, third, fourth = (save(tmp_path, step, float(step)) for step in (1, 2, 3, 4))
    assert loaded_from(tmp_path) == (4.0, fourth, "")
    (fourth / "__0_0.distcp").unlink()
    assert newest_complete(tmp_path) == third
    told = f"{fourth} is incomplete: __0_0.distcp is missing"
    assert loaded_from(tmp_path) == (3.0, third, f"{told}; going on from {third}")
    flip(third)  # which nobody sees before it is read
    told += f"; {third} is damaged: the bytes of __0_0.distcp changed"
    assert loaded_from(tmp_path) == (2.0, second, f"{told}; going on from {second}")
    (second / ".metadata").write_bytes(b"")
    (first / ".metadata").unlink()
    with pytest.raises(FileError) as error:
        loaded_from(tmp_path)
    expected = f"{fourth} is incomplete: __0_0.distcp is missing; none is left to go on from, as 3 older ones cannot be"
    assert str(error.value).startswith(expected)
    with pytest.raises(FileError, match="as 3 older ones cannot be used either"):
        shutil.copytree(third, tmp_path / "step-000000")
        (tmp_path / "step-000000" / "__0_0.distcp").unlink()
        shutil.rmtree(third)
        loaded_from(tmp_path)


def test_named_checkpoint_not_substituted(tmp_path: Path) -> None:
    save(tmp_path, 1)
    second = save(tmp_path, 2)
    (second / "__0_0.distcp").unlink()
    with pytest.raises(FileError, match=r"step-000002 is incomplete: __0_0\.distcp is missing; use another checkpoint"):
        value_in(second)


def test_another_model_not_skipped(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save_checkpoint(tmp_path, state(), step=2, progress={}, digest="another", group=None)
    with pytest.raises(FileError, match="is of a model with digest another"):
        value_in(tmp_path)


def test_a_file_that_was_cut_off_is_told(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(FileError, match=r"incomplete: __0_0\.distcp has .* of .*; use another checkpoint"):
        value_in(tmp_path)


@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_a_damaged_index_is_told(tmp_path: Path, content: bytes | None) -> None:
    index = save(tmp_path, 1) / ".metadata"
    index.write_bytes(index.read_bytes()[:-30] if content is None else content)
    with pytest.raises(FileError, match=r"is damaged: its \.metadata cannot be read"):
        value_in(index.parent)


def sign(path: Path) -> None:
    """Write the checksums of a folder anew, as a stranger can."""
    found = {x.name: hashlib.blake2b(x.read_bytes()).hexdigest() for x in path.iterdir() if x.name != "checksums"}
    text = "".join(f"{digest}  {name}\n" for name, digest in found.items())
    (path / "checksums").write_text(f"{text}{hashlib.blake2b(text.encode()).hexdigest()}  checksums\n")


def test_signed_again_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1, 5.0)
    sign(path)
    assert value_in(path) == 5.0


def test_no_flipped_byte_goes_unnoticed(tmp_path: Path) -> None:
    path, draw = save(tmp_path, 1, 5.0), random.Random(0)
    files = sorted(path.iterdir())
    assert [x.name for x in files] == [".metadata", "__0_0.distcp", "checksums"]
    for file in files:
        whole = file.read_bytes()
        for place in sorted({0, len(whole) - 1, *draw.sample(range(len(whole)), 200)}):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
            with pytest.raises(DamagedError):
                value_in(path)
            assert file.name == "__0_0.distcp" or newest_complete(tmp_path) is None
        file.write_bytes(whole)
    assert value_in(path) == 5.0


def test_every_rank_learns_of_damage(tmp_path: Path) -> None:
    """Each of two ranks checks one of the files."""

    def job(rank: int) -> str:
        own = RankState(model={f"x{rank}": torch.ones(5)}, parameters={})
        path = save_checkpoint(tmp_path, own, step=1, progress={}, digest="d", group=dist.group.WORLD)
        load_checkpoint(path, own, digest="d", group=dist.group.WORLD)
        texts = []
        for file in ("__0_0.distcp", "__1_0.distcp"):
            whole = (path / file).read_bytes()
            if rank == 0:
                (path / file).write_bytes(b"x" + whole[1:])
            dist.barrier()
            with pytest.raises(DamagedError) as caught:
                load_checkpoint(path, own, digest="d", group=dist.group.WORLD)
            texts.append(str(caught.value).partition(" changed")[0].rpartition(" ")[2])
            dist.barrier()
            if rank == 0:
                (path / file).write_bytes(whole)
            dist.barrier()
        return " ".join(texts)

    assert on_ranks(2, job) == ["__0_0.distcp __1_0.distcp"] * 2


class Hostile:
    """Writes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.file, "here")


@pytest.mark.parametrize("place", ["the index", "within the index", "a value"])
def test_a_strangers_folder_runs_no_code(place: str, tmp_path: Path) -> None:
    path, file = save(tmp_path, 1, 5.0), tmp_path / "written"
    index = path / ".metadata"
    if place == "the index":
        index.write_bytes(pickle.dumps(Hostile(file)))
    elif place == "within the index":
        content = pickle.loads(index.read_bytes())
        content.planner_data["more"] = Hostile(file)
        index.write_bytes(pickle.dumps(content))
    else:
        content = {("gplan",): {}, ("progress",): Hostile(file), ("ranks",): []}
        shutil.rmtree(path)
        write_checkpoint(content, partial_path(path, "a"), path, ranks=RankGroup(group=None))
        with pytest.raises(
            FileError, match="progress holds more than tensors and plain values, and to load it could run"
        ):
            CheckpointReader(path).read({("progress",): None})
        return
    sign(path)
    with pytest.raises(
        FileError, match=r"names pathlib\S*.Path.write_text, which no index needs and which could run code"
    ):
        value_in(tmp_path)
    assert newest_complete(tmp_path) is None
    assert not file.exists()


def test_index_of_another_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    path = save(tmp_path, 1, 5.0)
    secret.write_bytes((path / "__0_0.distcp").read_bytes())
    index = pickle.loads((path / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.relative_path = "../secret"
    (path / ".metadata").write_bytes(pickle.dumps(index))
    sign(path)
    with pytest.raises(FileError, match="it names files without a checksum: ../secret"):
        value_in(path)


class Unknown:
    """A class that no checkpoint is read with."""


def test_state_that_cannot_be_kept(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"where": Unknown()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    own = RankState(model={"x": torch.zeros(2)}, parameters={}, schedulers=[Odd()])
    with pytest.raises(
        UsageError, match="the scheduler holds values that a checkpoint cannot keep .*Unknown.*; expected numbers"
    ):
        save_checkpoint(tmp_path, own, step=1, progress={}, digest="d", group=None)


def test_a_parameter_stays_the_one_it_is(tmp_path: Path) -> None:
    path, parameter = save(tmp_path, 1, 5.0), nn.Parameter(torch.zeros(40))
    load_checkpoint(path, RankState(model={"x": parameter}, parameters={"x": parameter}), digest="d", group=None)
    assert parameter.requires_grad and parameter.is_leaf and parameter[0] == 5.0
