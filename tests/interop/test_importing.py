"""Files of other planners: told apart by content, refused with a place where they are damaged,
and the published ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import pytest

import gplan
from gplan.cli import main
from gplan.core import Profile
from gplan.core.errors import FileError
from gplan.interop.published.importing import import_profile

DATA = Path(os.environ.get("GPLAN_REFERENCE_DATA", Path(__file__).parents[3] / "shared" / "data")) / "peers"
GRAPH = (
    "a -- Linear(2, 2) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, parameter_size=16.0\n"
    "b -- ReLU -- forward_compute_time=3.0, backward_compute_time=4.0, activation_size=8.0, parameter_size=0.0\n"
    "\ta -- b\n"
)


def data(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not there; GPLAN_REFERENCE_DATA names the folder of published profiles")
    return path


def imported(text: str | bytes, folder: Path) -> Profile:
    path = folder / "given.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return import_profile(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with ''; expected dnn-partitioning's JSON"),
        ("a,b\n1,2\n", "begins with .a,b.*1,2.; expected dnn-partitioning's JSON"),
        ("[1, 2]", "begins with '\\[1, 2\\]'; expected"),
        (b"\xff\xfe a", "is not text: byte 0"),
        ('{"format": "gplan.plan/2"}', "is a file of gplan, gplan.plan/2; it needs no import"),
    ],
)
def test_a_file_of_neither_format_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(FileError, match=message):
        imported(text, tmp_path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read: No such file"):
        import_profile(tmp_path / "nothing.json")


def gplan_exits(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


def test_the_verb_writes_a_profile_and_prints_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.graph.txt").write_text(GRAPH)
    assert gplan_exits("import", "net.graph.txt", "--link", "2GB/s,5us") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "net.graph.txt, micro-batch size 1"
    assert [line.split()[0] for line in printed[2:4]] == ["b", "a"]
    profile = gplan.load(Path("gplan.profile.json"))
    assert (profile.link.bytes_per_s, profile.link.latency_s) == (2e9, 5e-6)


def test_the_verb_prints_the_profile_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.graph.txt").write_text(GRAPH)
    assert gplan_exits("import", "net.graph.txt", "--json", "--output", "net.json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path("net.json").read_text())


def test_a_damaged_file_is_one_message_and_no_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.graph.txt").write_text(GRAPH.replace("\ta -- b", "\ta -- c"))
    assert gplan_exits("import", "net.graph.txt") == 3
    assert capsys.readouterr().err.startswith("error: net.graph.txt, line 3: c is not one of the 2 nodes")
    assert not Path("gplan.profile.json").exists()


@pytest.mark.parametrize(
    ("name", "num_layers", "granularity"),
    [
        ("dnn-partitioning/bert24_inference.json", 32, "layer"),
        ("dnn-partitioning/bert24_training.json", 32, "layer"),
        ("dnn-partitioning/bert_l-3_inference.json", 128, "op"),
        ("dnn-partitioning/resnet50_training.json", 177, "layer"),
    ],
)
def test_published_dnn_partitioning_files_keep_their_sums(name: str, num_layers: int, granularity: str) -> None:
    path = data(name)
    file, profile = json.loads(path.read_text()), import_profile(path)
    assert (len(profile.layers), profile.granularity) == (num_layers, granularity)
    assert len({x.name for x in profile.layers}) == num_layers
    assert profile.device.memory_bytes == 17185374208
    assert sum(profile.one_stage_s(0)) == pytest.approx(sum(x["fpgaLatency"] for x in file["nodes"]) / 1000, rel=1e-12)
    assert sum(x.weight_bytes for x in profile.layers) == sum(x["size"] for x in file["nodes"])
    color = {x["id"]: x.get("colorClass", -1 - x["id"]) for x in file["nodes"]}
    outward = {x["sourceId"]: x["cost"] for x in file["edges"] if color[x["sourceId"]] != color[x["destId"]]}
    assert len(profile.values) == len(outward)
    assert sum(x.transfer_s or 0.0 for x in profile.values) == pytest.approx(sum(outward.values()) / 1000, rel=1e-12)
    assert len(profile.notes) == 2


@pytest.mark.parametrize(
    ("name", "num_layers", "parameter_bytes", "compute_s"),
    [
        ("pipedream/gnmt.graph.txt", 37, 775063808, 0.089416),
        ("pipedream/resnet50.graph.txt", 176, 102228128, 0.443419),
        ("pipedream/vgg16.graph.txt", 40, 553430176, 0.672535),
    ],
)
def test_published_pipedream_files_keep_their_sums(
    name: str, num_layers: int, parameter_bytes: int, compute_s: float
) -> None:
    profile = import_profile(data(name))
    assert len(profile.layers) == num_layers
    assert (
        sum(x.weight_bytes for x in profile.layers) == sum(x.gradient_bytes for x in profile.layers) == parameter_bytes
    )
    assert sum(profile.one_stage_s(0)) == pytest.approx(compute_s, rel=1e-9)
    assert not {x.kind for x in profile.layers} & {"Input", "Input0"}


def test_the_row_that_its_planner_calls_infeasible_has_a_plan_by_the_rules_of_its_objective() -> None:
    """bert24_training at K = 8 with a fifth of all memory each: node31 takes no time,
    so that planner ties it to node30."""
    file = json.loads(data("dnn-partitioning/bert24_training.json").read_text())
    first_nodes = (1, 8, 12, 16, 20, 24, 28, 31)
    stage = {x["id"]: sum(x["colorClass"] >= y for y in first_nodes) - 1 for x in file["nodes"]}
    sizes = _sums(stage, {x["id"]: x["size"] for x in file["nodes"]})
    assert max(sizes.values()) <= 729929837
    assert sum(x["size"] for x in file["nodes"] if x["colorClass"] in (30, 31)) > 729929837
    is_backward = {x["id"]: x["isBackwardNode"] for x in file["nodes"]}
    ends = [(x["sourceId"], x["destId"]) for x in file["edges"]]
    assert all(stage[a] <= stage[b] for a, b in ends if not is_backward[a])
    loads = _sums(stage, {x["id"]: x["fpgaLatency"] for x in file["nodes"]})
    cost = {x["sourceId"]: x["cost"] for x in file["edges"]}
    for device in loads:
        loads[device] += sum(cost[a] for a in {a for a, b in ends if (stage[a] == device) != (stage[b] == device)})
    assert max(loads.values()) == pytest.approx(33.6368125, rel=1e-12)


def _sums(stage: Mapping[int, int], amount: Mapping[int, float]) -> dict[int, float]:
    return {k: sum(amount[x] for x in amount if stage[x] == k) for k in set(chain(stage.values()))}
