"""Weights from files: formats, bytes read, and messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gplan.core.errors import FileError
from gplan_profiler.model.weight_files import read_weights

safetensors = pytest.importorskip("safetensors.torch")

STATE = {
    "first.weight": torch.randn(5, 3),
    "first.bias": torch.randn(5).bfloat16(),
    "norm.count": torch.tensor(7),
    "norm.mask": torch.tensor([True, False, True]),
    "second.weight": torch.randn(2, 3, 4, 4).half(),
    "empty": torch.empty(0, 4, dtype=torch.float64),
    "small": torch.randn(6).to(torch.float8_e4m3fn),
}


def write_sharded(folder: Path, save: Callable[[Mapping[str, Tensor], Path], None], kind: str) -> None:
    halves = [dict(list(STATE.items())[i::2]) for i in range(2)]
    files = [f"part-{i}{Path(kind).suffix}" for i in range(2)]
    for half, file in zip(halves, files, strict=True):
        save(half, folder / file)
    weight_map = {name: file for half, file in zip(halves, files, strict=True) for name in half}
    (folder / f"{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def checkpoints(folder: Path) -> dict[str, Path]:
    """The same state in every format."""
    places = {name: folder / name for name in ("one", "several", "bin", "bins")}
    for place in places.values():
        place.mkdir()
    safetensors.save_file(STATE, places["one"] / "model.safetensors", metadata={"format": "pt"})
    write_sharded(places["several"], safetensors.save_file, "model.safetensors")
    torch.save(STATE, places["bin"] / "pytorch_model.bin")
    write_sharded(places["bins"], torch.save, "pytorch_model.bin")
    files = {
        "safetensors": places["one"] / "model.safetensors",
        "torch": folder / "state.pt",
        "under": folder / "x.ckpt",
    }
    torch.save(STATE, files["torch"])
    torch.save({"epoch": 3, "state_dict": STATE, "optimizer": {"lr": 0.1}}, files["under"])
    index = places["several"] / "model.safetensors.index.json"
    return places | files | {"index": index}


FORMATS = ["one", "several", "bin", "bins", "safetensors", "torch", "under", "index"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("names", [list(STATE), ["small", "first.bias"], []], ids=["all", "some", "none"])
def test_every_format_is_read(tmp_path: Path, form: str, names: list[str]) -> None:
    found = read_weights(checkpoints(tmp_path)[form], names, what="tiny")
    assert list(found) == names
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (STATE[name].dtype, STATE[name].shape)
        assert torch.equal(tensor.float(), STATE[name].float())


def test_what_is_read_is_memory_of_its_own(tmp_path: Path) -> None:
    path = checkpoints(tmp_path)["torch"]
    first, again = (read_weights(path, ["first.weight"], what="tiny")["first.weight"] for _ in range(2))
    first.zero_()
    assert torch.equal(again, STATE["first.weight"])


def test_strided_tensors_of_a_torch_file(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    views = {"turned": whole.t(), "rows": whole[2:4], "column": whole[:, 1], "whole": nn.Parameter(whole)}
    torch.save(views, tmp_path / "x.pt")
    found = read_weights(tmp_path / "x.pt", ["column", "turned", "whole", "rows"], what="tiny")
    assert all(torch.equal(found[name], views[name]) and found[name].stride() == views[name].stride() for name in views)
    assert not any(tensor.requires_grad for tensor in found.values())


def bytes_read() -> int:
    """By this process so far, from files that are read, not mapped (proc(5), rchar)."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc/self/io")
@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_only_what_is_asked_for_is_read(tmp_path: Path, name: str) -> None:
    large = {f"layers.{i}.weight": torch.full((2**20,), float(i)) for i in range(8)}  # 4 MiB each
    (safetensors.save_file if name.endswith("safetensors") else torch.save)(large, tmp_path / name)
    before = bytes_read()
    found = read_weights(tmp_path / name, ["layers.5.weight"], what="tiny")
    assert 2**22 <= bytes_read() - before < 2**22 + 2**18
    assert torch.equal(found["layers.5.weight"], large["layers.5.weight"])


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.model."])
def test_names_behind_one_prefix_are_found(tmp_path: Path, prefix: str) -> None:
    torch.save({prefix + name: x for name, x in STATE.items()} | {"other.x": torch.ones(1)}, tmp_path / "x.pt")
    found = read_weights(tmp_path / "x.pt", ["first.bias", "second.weight"], what="tiny")
    assert torch.equal(found["second.weight"], STATE["second.weight"])


def test_names_behind_two_prefixes_are_refused(tmp_path: Path) -> None:
    torch.save({f"{who}.{name}": x for who in ("student", "teacher") for name, x in STATE.items()}, tmp_path / "x.pt")
    with pytest.raises(FileError, match=r"tiny with several prefixes, student\. and teacher\.; save"):
        read_weights(tmp_path / "x.pt", list(STATE), what="tiny")


def test_names_that_are_missing_are_listed_and_counted(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "x.pt")
    with pytest.raises(
        FileError,
        match=r"x.pt lacks 4 of 5 weights of tiny: c, d, e and 1 more; it has a and b; expected the state_dict",
    ):
        read_weights(tmp_path / "x.pt", list("acdef"), what="tiny")


class Anything:
    """What a file of weights does not hold."""


def write_wrong(folder: Path) -> dict[str, Path]:
    files = {
        x: folder / x for x in ("absent.pt", "text.pt", "text.safetensors", "x.index.json", "object.pt", "list.pt")
    }
    files["text.pt"].write_text("no weights here"), files["text.safetensors"].write_text("no weights here")
    files["x.index.json"].write_text('{"weights": 1}')
    torch.save({"a": Anything()}, files["object.pt"]), torch.save([torch.ones(1)], files["list.pt"])
    files["empty folder"] = folder / "empty"
    files["empty folder"].mkdir()
    files["damaged"] = folder / "damaged.safetensors"
    safetensors.save_file({"a": torch.ones(99)}, files["damaged"])
    files["damaged"].write_bytes(files["damaged"].read_bytes()[:-90])
    files["shard"] = folder / "model.safetensors.index.json"
    files["shard"].write_text('{"weight_map": {"a": "lost.safetensors"}}')
    safetensors.save_file({"b": torch.ones(1)}, folder / "other.safetensors")
    files["torch shard"] = folder / "pytorch_model.bin.index.json"
    files["torch shard"].write_text('{"weight_map": {"a": "lost.bin"}}')
    files["wrong shard"] = folder / "wrong.index.json"
    files["wrong shard"].write_text('{"weight_map": {"a": "other.safetensors"}}')
    return files


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent.pt", "absent.pt is not there; expected a .safetensors file, a torch checkpoint or a folder"),
        ("text.pt", "text.pt is neither a checkpoint of torch .* save it with torch.save"),
        ("text.safetensors", "text.safetensors is not a safetensors file"),
        ("x.index.json", 'x.index.json is not an index of weights; expected JSON with a "weight_map"'),
        ("object.pt", "object.pt contains objects other than weights"),
        ("list.pt", "list.pt has a list without weights by name"),
        ("empty folder", "has no weights; expected one of model.safetensors, .*pytorch_model.bin"),
        ("damaged", "a of .*damaged.safetensors ends after 306 of 396 bytes"),
        ("shard", "lost.safetensors cannot be read: No such file"),
        ("torch shard", "lost.bin cannot be read: No such file"),
        ("wrong shard", "there is no a of .*other.safetensors, which its index lists"),
    ],
)
def test_what_is_no_checkpoint_is_answered_with_what_is(tmp_path: Path, name: str, told: str) -> None:
    with pytest.raises(FileError, match=told):
        read_weights(write_wrong(tmp_path)[name], ["a"], what="tiny")
