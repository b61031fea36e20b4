from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gplan.errors import FileError, RunError
from gplan.execute.checkpoint import State, folder, latest, load_checkpoint, newest_intact, save_checkpoint


def state(value: float = 0.0) -> State:
    return State(model={"x": torch.full((40,), value)}, parameters={})


def save(directory: Path, step: int, value: float = 0.0) -> Path:
    return save_checkpoint(directory, state(value), step=step, progress={}, digest="d", group=None)


def value_in(path: Path) -> float:
    into = state()
    load_checkpoint(path, into, digest="d", group=None)
    return into.model["x"][0].item()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_latest_is_that_of_the_highest_step(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 20):
        save(tmp_path, step)
    assert latest(tmp_path) == tmp_path / "step-1000000"
    assert names(tmp_path) == ["step-000020", "step-1000000", "step-999999"]


def test_a_checkpoint_is_the_latest_of_itself(tmp_path: Path) -> None:
    save(tmp_path, 2)
    first = save(tmp_path, 1)
    assert latest(first) == first


def test_a_directory_without_checkpoints_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="holds no checkpoint; expected folders such as step-000120"):
        latest(tmp_path)
    with pytest.raises(FileError, match="is not there"):
        latest(tmp_path / "nowhere")
    with pytest.raises(FileError, match="holds no checkpoint"):
        value_in(tmp_path)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 3, 1.0)
    assert value_in(save(tmp_path, 3, 2.0)) == 2.0
    assert names(tmp_path) == ["step-000003"]


def test_a_checkpoint_that_fails_does_not_replace_that_of_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 3, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(folder, "_lack", lambda *_: "__7_0.distcp is missing")
        with pytest.raises(RunError, match=r"is incomplete: __7_0\.distcp is missing"):
            save(tmp_path, 3, 2.0)
    assert names(tmp_path) == ["step-000003"]
    assert value_in(latest(tmp_path)) == 1.0


def test_a_run_killed_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 2, 2.0)
    save(tmp_path, 3, 3.0).rename(tmp_path / ".step-000003.old")
    assert value_in(latest(tmp_path)) == 3.0
    save(tmp_path, 4, 4.0)
    assert names(tmp_path) == ["step-000002", "step-000003", "step-000004"]
    assert value_in(tmp_path / "step-000003") == 3.0


def test_a_run_killed_after_the_two_renames_leaves_one_that_the_next_save_removes(tmp_path: Path) -> None:
    save(tmp_path, 3, 1.0).rename(tmp_path / ".step-000003.old")
    save(tmp_path / "new", 3, 2.0).rename(tmp_path / "step-000003")
    assert value_in(latest(tmp_path)) == 2.0
    save(tmp_path, 4)
    assert [name for name in names(tmp_path) if "step" in name] == ["step-000003", "step-000004"]
    assert value_in(tmp_path / "step-000003") == 2.0


def test_leftovers_of_a_killed_run_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for left in (".step-000120.part-ab12", "notes", "step-7", ".step-000120.partial"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "file").write_text("")
    save(tmp_path, 121)
    assert names(tmp_path) == [".step-000120.partial", "notes", "step-000121", "step-7"]


def test_an_incomplete_checkpoint_is_told_with_the_newest_that_is_whole(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    (second / "__0_0.distcp").unlink()
    assert newest_intact(tmp_path) == first
    with pytest.raises(FileError) as error:
        latest(tmp_path)
    assert str(error.value) == (
        f"{second} is incomplete: __0_0.distcp is missing; use another checkpoint; to go on from an older one name {first}"
    )
    with pytest.raises(FileError, match=r"is incomplete: __0_0\.distcp is missing"):
        value_in(second)


def test_a_file_that_was_cut_off_is_told(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(FileError, match=r"incomplete: __0_0\.distcp has .* of .*; no older one is intact"):
        latest(tmp_path)


@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_a_damaged_index_is_told(tmp_path: Path, content: bytes | None) -> None:
    index = save(tmp_path, 1) / ".metadata"
    index.write_bytes(index.read_bytes()[:-30] if content is None else content)
    with pytest.raises(FileError, match=r"is damaged: its \.metadata cannot be read"):
        value_in(index.parent)


def test_checksums_are_written_also_where_the_process_has_turned_them_off(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = save(tmp_path, 1, 5.0)
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert value_in(path) == 5.0


def test_a_parameter_stays_the_one_it_is(tmp_path: Path) -> None:
    path, parameter = save(tmp_path, 1, 5.0), nn.Parameter(torch.zeros(40))
    load_checkpoint(path, State(model={"x": parameter}, parameters={"x": parameter}), digest="d", group=None)
    assert parameter.requires_grad and parameter.is_leaf and parameter[0] == 5.0
