"""Published profiles: the optima that their own planners find, row by row, and the command."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from published import read_graph, solve

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("GPLAN_REFERENCE_DATA", ROOT.parent / "shared" / "data")) / "peers"
OBJECTIVES = {"max_device_load": "device-load", "max_stage_seconds_no_communication": "compute"}
GRAPH = (
    "a -- Linear(2, 2) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, parameter_size=16.0\n"
    "b -- ReLU -- forward_compute_time=3.0, backward_compute_time=4.0, activation_size=8.0, parameter_size=0.0\n"
    "\ta -- b\n"
)


def rows() -> list[dict[str, str]]:
    path = DATA / "reference.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def label(row: dict[str, str]) -> str:
    return f"{row['input']}-{row['k']}-{row['memory_limit_bytes']}"


def data(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not there; GPLAN_REFERENCE_DATA names the folder of published profiles")
    return path


def check_row(row: dict[str, str], solver: Any) -> None:
    path, memory = DATA / row["input"], row["memory_limit_bytes"]
    answer = solve(
        read_graph(path), num_devices=int(row["k"]), memory_bytes=int(memory) if memory else None, solver=solver
    )
    if row["optimum"] == "INFEASIBLE":
        assert answer.value is None
        return
    assert answer.value == pytest.approx(float(row["optimum"]), rel=1e-9)
    assert answer.is_proven
    if path.suffix == ".json":
        assert max(file_loads(path, answer.assignment).values()) == pytest.approx(answer.value, rel=1e-9)


def file_loads(path: Path, device: Mapping[str, int]) -> dict[int, float]:
    """The load of each device, from the nodes and edges of a file of dnn-partitioning."""
    file = json.loads(path.read_text())
    of = {x["id"]: device[str(x["id"])] for x in file["nodes"]}
    loads = sums(of, {x["id"]: x["fpgaLatency"] for x in file["nodes"]})
    cost = {x["sourceId"]: x["cost"] for x in file["edges"]}
    ends = [(x["sourceId"], x["destId"]) for x in file["edges"]]
    return {
        k: load + sum(cost[a] for a in {a for a, b in ends if (of[a] == k) != (of[b] == k)})
        for k, load in loads.items()
    }


def sums(device: Mapping[int, int], amount: Mapping[int, float]) -> dict[int, float]:
    return {k: sum(amount[x] for x in amount if device[x] == k) for k in set(device.values())}


@pytest.mark.skipif(not rows(), reason=f"{DATA} is not there; GPLAN_REFERENCE_DATA names its parent folder")
@pytest.mark.parametrize("row", rows(), ids=label)
def test_published_optimum(row: dict[str, str]) -> None:
    check_row(row, "dp")


@pytest.mark.parametrize(
    "row", [x for x in rows() if int(x["k"]) == 4 and "bert_l-3" not in x["input"]], ids=label
)  # fmt: skip
def test_published_optimum_by_milp(row: dict[str, str]) -> None:
    check_row(row, "milp")


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [
        ("dnn-partitioning/bert24_inference.json", 32),
        ("dnn-partitioning/bert24_training.json", 32),
        ("dnn-partitioning/bert_l-3_inference.json", 128),
        ("dnn-partitioning/resnet50_training.json", 177),
    ],
)
def test_dnn_partitioning_files_keep_their_sums(name: str, num_layers: int) -> None:
    path = data(name)
    file, graph = json.loads(path.read_text()), read_graph(path)
    assert (graph.num_layers, graph.memory_bytes, graph.unit) == (num_layers, 17185374208, "ms")
    assert sorted(chain(*graph.nodes)) == sorted(str(x["id"]) for x in file["nodes"])
    assert sum(graph.compute) == pytest.approx(sum(x["fpgaLatency"] for x in file["nodes"]), rel=1e-12)
    assert sum(graph.num_bytes) == sum(x["size"] for x in file["nodes"])
    color = {x["id"]: x.get("colorClass", -1 - x["id"]) for x in file["nodes"]}
    outward = {x["sourceId"]: x["cost"] for x in file["edges"] if color[x["sourceId"]] != color[x["destId"]]}
    assert sum(graph.shared.values()) == pytest.approx(sum(outward.values()), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "num_layers", "compute_s"),
    [
        ("pipedream/gnmt.graph.txt", 37, 0.089416),
        ("pipedream/resnet50.graph.txt", 176, 0.443419),
        ("pipedream/vgg16.graph.txt", 40, 0.672535),
    ],
)
def test_pipedream_files_keep_their_sums(name: str, num_layers: int, compute_s: float) -> None:
    graph = read_graph(data(name))
    assert (graph.num_layers, graph.memory_bytes, graph.unit) == (num_layers, None, "s")
    assert sum(graph.compute) == pytest.approx(compute_s, rel=1e-9)


def test_contraction_makes_a_published_row_infeasible() -> None:
    """bert24_training at K = 8 with a fifth of all memory each: node31 takes no time,
    so that planner ties it to node30; apart from that rule there is a plan."""
    path = data("dnn-partitioning/bert24_training.json")
    nodes = json.loads(path.read_text())["nodes"]
    first_nodes = (1, 8, 12, 16, 20, 24, 28, 31)
    stage = {x["id"]: sum(x["colorClass"] >= y for y in first_nodes) - 1 for x in nodes}
    assert max(sums(stage, {x["id"]: x["size"] for x in nodes}).values()) <= 729929837
    assert sum(x["size"] for x in nodes if x["colorClass"] in (30, 31)) > 729929837
    loads = file_loads(path, {str(node): k for node, k in stage.items()})
    assert max(loads.values()) == pytest.approx(33.6368125, rel=1e-12)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "published.py"), *arguments],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip


def test_command_prints_json(tmp_path: Path) -> None:
    path = tmp_path / "net.graph.txt"
    path.write_text(GRAPH)
    found = json.loads(command(str(path), "--k", "2", "--json").stdout)
    assert list(found) == ["value", "unit", "proven", "seconds", "assignment"]
    assert (found["value"], found["unit"], found["proven"]) == (0.007, "s", True)
    assert found["assignment"] == {"a": 0, "b": 1}
    done = command(str(path), "--k", "2", "--memory", "20", "--objective", "device-load", "--solver", "milp", "--json")
    assert (done.returncode, json.loads(done.stdout)["value"]) == (0, "INFEASIBLE")


def test_command_refuses_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "net.graph.txt"
    path.write_text(GRAPH.replace("\ta -- b", "\ta -- c"))
    done = command(str(path), "--k", "2", "--json")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"error: {path}, line 3: c is not one of the 2 nodes; expected an edge between two of them\n"


def test_command_refuses_no_devices(tmp_path: Path) -> None:
    path = tmp_path / "net.graph.txt"
    path.write_text(GRAPH)
    done = command(str(path), "--k", "0")
    assert (done.returncode, done.stderr) == (2, "error: asked for 0 devices; expected at least 1\n")
