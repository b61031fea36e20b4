"""Both formats of published profiles: what becomes a layer, what is shared, the precedence, and damaged files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from published import PublishedGraph, read_graph

from gplan.core.errors import FileError


def node(number: int, color: int | None = None, *, backward: bool = False, **given: Any) -> dict[str, Any]:
    fields = {"supportedOnFpga": 1, "cpuLatency": 7.0, "fpgaLatency": 1.0, "size": 10.0, "name": f"n{number}"}
    colors = {} if color is None else {"colorClass": color}
    return {"id": number, **fields, "isBackwardNode": int(backward), **colors, **given}


def edge(source: int, reader: int, cost: float = 2.0) -> dict[str, Any]:
    return {"sourceId": source, "destId": reader, "cost": cost, "size": 1}


def from_json(folder: Path, nodes: list[dict[str, Any]], edges: list[dict[str, Any]]) -> PublishedGraph:
    path = folder / "net.json"
    path.write_text(json.dumps({"maxSizePerFPGA": 1000.0, "maxFPGAs": 6, "nodes": nodes, "edges": edges}))
    return read_graph(path)


def line(name: str, description: str = "Linear(1, 1)", **given: object) -> str:
    fields = {"forward_compute_time": 1.0, "backward_compute_time": 2.0, "activation_size": 4.0, "parameter_size": 8.0}
    values = ", ".join(f"{key}={value}" for key, value in {**fields, **given}.items())
    return f"{name} -- {description} -- {values}"


def from_lines(folder: Path, *lines: str) -> PublishedGraph:
    path = folder / "net.graph.txt"
    path.write_text("\n".join(lines))
    return read_graph(path)


def shared(graph: PublishedGraph) -> dict[str, float]:
    """The time of each value, by the first nodes of its layers."""
    return {" ".join(sorted(graph.nodes[x][0] for x in ends)): moved for ends, moved in graph.shared.items()}


def order(graph: PublishedGraph) -> set[tuple[str, str]]:
    """The precedence by first nodes."""
    return {(graph.nodes[a][0], graph.nodes[b][0]) for a, b in graph.precedence}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with ''; expected dnn-partitioning's JSON"),
        ("a,b\n1,2\n", "begins with .a,b.*1,2.; expected dnn-partitioning's JSON"),
        ("[1, 2]", "begins with '\\[1, 2\\]'; expected"),
        (b"\xff\xfe a", "cannot be read as text: .* position 0"),
        ('{"format": "gplan.plan/7"}', "is not a profile of dnn-partitioning, .*missing required field"),
        ('{"maxSizePerFPGA": 1.0, "nodes": [', "is cut off: Input data was truncated"),
        ('{"nodes": [], "edges": []}', "missing required field `maxSizePerFPGA`"),
        ('{"maxSizePerFPGA": 0, "nodes": [], "edges": []}', r"Expected `float` >= 1.0 - at `\$.maxSizePerFPGA`"),
        ('{"a":' * 100_000, "is not a profile of dnn-partitioning, .*recursion"),
    ],
)
def test_file_of_neither_format_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "given.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(FileError, match=message):
        read_graph(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read as text: .*No such file"):
        read_graph(tmp_path / "nothing.json")


# dnn-partitioning


def test_class_is_a_layer_with_the_times_of_both_passes_and_all_sizes(tmp_path: Path) -> None:
    nodes = [
        node(1, 5, fpgaLatency=3.0, size=100.0), node(2, 5, fpgaLatency=4.0), node(3, 5, backward=True, fpgaLatency=8.0),
        node(4),
    ]  # fmt: skip
    graph = from_json(tmp_path, nodes, [edge(1, 2), edge(2, 4)])
    assert (graph.nodes, graph.compute, graph.num_bytes) == ((("1", "2", "3"), ("4",)), (15.0, 1.0), (120, 10))
    assert (graph.memory_bytes, graph.unit, graph.objective) == (1000, "ms", "device-load")


def test_output_is_one_value_for_all_its_readers(tmp_path: Path) -> None:
    nodes = [node(1, 1), node(2, 1), node(3, 3), node(4, 4)]
    edges = [edge(1, 2, 5.0), edge(1, 3, 5.0), edge(1, 4, 5.0), edge(2, 3, 7.0), edge(3, 4, 0.5)]
    assert shared(from_json(tmp_path, nodes, edges)) == {"1 3 4": 5.0, "1 3": 7.0, "3 4": 0.5}


def test_backward_pass_is_paid_and_does_not_order_layers(tmp_path: Path) -> None:
    nodes = [node(1, 1), node(2, 2), node(3, 1, backward=True), node(4, 2, backward=True)]
    graph = from_json(tmp_path, nodes, [edge(1, 2), edge(2, 4), edge(4, 3, 3.0), edge(1, 3), edge(1, 4)])
    assert (shared(graph), order(graph)) == ({"1 2": 5.0}, {("1", "2")})


def test_backward_reader_need_not_come_after_the_producer(tmp_path: Path) -> None:
    nodes = [node(1, 1), node(2, 2), node(3, 3), node(4, 3, backward=True)]
    graph = from_json(tmp_path, nodes, [edge(1, 2), edge(3, 2), edge(1, 4)])
    assert (shared(graph), order(graph)) == ({"1 2 3": 2.0, "2 3": 2.0}, {("1", "2"), ("3", "2")})


def test_class_of_the_backward_pass_alone_is_ordered_as_its_mirror_image(tmp_path: Path) -> None:
    nodes = [node(1, 1), node(2, 2), node(3, 2, backward=True), node(4, 9, backward=True), node(5, 1, backward=True)]
    graph = from_json(tmp_path, nodes, [edge(1, 2), edge(2, 3), edge(3, 4), edge(4, 5)])
    assert order(graph) >= {("1", "4"), ("4", "2")}


def test_classes_that_need_each_other_are_one_layer(tmp_path: Path) -> None:
    nodes = [node(1, 1), node(2, 2, fpgaLatency=9.0), node(3, 1), node(4, 4)]
    graph = from_json(tmp_path, nodes, [edge(1, 2), edge(2, 3), edge(3, 4)])
    assert (graph.nodes, graph.num_bytes) == ((("1", "2", "3"), ("4",)), (30, 10))


def test_loads_of_random_assignments_are_those_of_the_file(tmp_path: Path) -> None:
    for seed in range(30):
        nodes, edges = _training_graph(random.Random(seed))
        graph, rng = from_json(tmp_path, nodes, edges), random.Random(seed)
        device = [rng.randrange(3) for _ in graph.nodes]
        layer_of = {x: i for i, members in enumerate(graph.nodes) for x in members}
        of = {x["id"]: device[layer_of[str(x["id"])]] for x in nodes}
        crossing = [x for x in edges if of[x["sourceId"]] != of[x["destId"]]]
        for k in range(3):
            paid = {x["sourceId"]: x["cost"] for x in crossing if k in (of[x["sourceId"]], of[x["destId"]])}
            expected = sum(x["fpgaLatency"] for x in nodes if of[x["id"]] == k) + sum(paid.values())
            layers = [i for i, at in enumerate(device) if at == k]
            assert graph.load(layers, "device-load") == pytest.approx(expected, rel=1e-12)
        pairs = {
            (layer_of[str(x["sourceId"])], layer_of[str(x["destId"])])
            for x in edges
            if max(x["sourceId"], x["destId"]) < 6
        }
        assert set(graph.precedence) >= {(a, b) for a, b in pairs if a != b}
        assert _closure(pairs) >= set(graph.precedence)


def _training_graph(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Six layers; node i is the forward and node 11 - i the backward part of class i; outputs read in both passes."""
    nodes = [node(i, min(i, 11 - i), backward=i > 5) for i in range(12)]
    pairs = [(i, j) for i in range(12) for j in range(i + 1, 12) if i + j != 11 and rng.random() < 0.25]
    pairs = [(0, 1), *[x for x in pairs if x != (0, 1)]]
    cost = [float(rng.randint(1, 9)) for _ in range(12)]
    return nodes, [edge(i, j, cost[i]) for i, j in pairs]


def _closure(pairs: set[tuple[int, int]]) -> set[tuple[int, int]]:
    found = set(pairs)
    while True:
        more = {(a, d) for a, b in found for c, d in found if b == c} - found
        if not more:
            return found
        found |= more


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ([node(1), node(2)], [edge(1, 2), edge(2, 1)], r"has a cycle: (n1 \(id 1\) -> n2 \(id 2\) -> n1|n2 \(id 2\) -> n1)"),
        ([node(1)], [edge(1, 1)], r"has a cycle: n1 \(id 1\) -> n1 \(id 1\)"),
        ([node(1), node(1)], [], r"\$.nodes\[1\].id is 1, as of \$.nodes\[0\]"),
        ([node(1), node(2)], [edge(1, 2), edge(1, 9)], r"\$.edges\[1\].destId is 9; expected the id of one of the 2 nodes"),
        ([node(1), node(2)], [edge(8, 2)], r"\$.edges\[0\].sourceId is 8; expected the id"),
        ([node(1), node(2), node(3)], [edge(1, 2), edge(1, 3, 2.5)], r"\$.edges\[1\].cost is 2.5 and 2.0 on an edge before"),
        ([node(1), node(2)], [edge(1, 2, -1.0)], r"Expected `float` >= 0.0 - at `\$.edges\[0\].cost`"),
        ([node(1), node(2, fpgaLatency=float("nan"))], [], "JSON is malformed"),
        ([node(1, size=float("inf"))], [], "JSON is malformed"),
        ([node(1, size=10**40)], [], r"Expected `float` <= 1000000000000000.0 - at `\$.nodes\[0\].size`"),
        ([node(1, size="10")], [], r"Expected `float`, got `str` - at `\$.nodes\[0\].size`"),
        ([{"id": 1}], [], r"missing required field .* - at `\$.nodes\[0\]`"),
        ([node(1, supportedOnFpga=0)], [], r"\$.nodes\[0\].supportedOnFpga is 0, so n1 runs on a CPU only"),
        ([node(1, backward=True), node(2)], [edge(1, 2)], r"\$.edges\[0\] runs from n1 of the backward pass to n2"),
        ([], [], "has no node that takes part in the plan"),
        ([node(1), node(2)], [], "has 2 layers and no edge between them"),
    ],
)  # fmt: skip
def test_damaged_json_is_refused_with_its_place(
    tmp_path: Path, nodes: list[dict[str, Any]], edges: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(FileError, match=message):
        from_json(tmp_path, nodes, edges)


# PipeDream


def test_milliseconds_become_seconds_and_bytes_stay(tmp_path: Path) -> None:
    graph = from_lines(
        tmp_path, line("a", forward_compute_time=1.5, backward_compute_time=250, parameter_size="16.000"), line("b"),
        "\ta -- b",
    )  # fmt: skip
    assert (graph.compute, graph.num_bytes) == ((0.2515, 0.003), (20, 12))
    assert (graph.memory_bytes, graph.unit, graph.objective) == (None, "s", "compute")


def test_output_is_moved_there_and_back_at_one_gigabyte_per_second(tmp_path: Path) -> None:
    graph = from_lines(
        tmp_path, line("a", activation_size="[4.0; 6.0]"), line("b"), line("c"),
        "\ta -- c", "\ta -- b", "\ta -- b", "\tb -- c",
    )  # fmt: skip
    assert shared(graph) == {"a b c": 20e-9, "b c": 8e-9}
    assert order(graph) == {("a", "b"), ("a", "c"), ("b", "c")}


def test_inputs_and_outputs_that_nothing_reads_are_left_out(tmp_path: Path) -> None:
    graph = from_lines(
        tmp_path, line("i", "Input0"), line("a", "LSTM(1)"), line("u", "__getitem__(1)"), line("g", "__getitem__(0)"),
        line("b"), line("j", "InputNorm(3)"), "\ti -- a", "\ta -- u", "\ta -- g", "\tg -- b", "\tb -- j",
    )  # fmt: skip
    assert graph.nodes == (("a",), ("g",), ("b",), ("j",))


def test_stage_ids_behind_the_nodes_are_ignored(tmp_path: Path) -> None:
    graph = from_lines(tmp_path, line("a") + " -- stage_id=0", line("b") + " -- stage_id=1", "\ta -- b")
    assert graph.nodes == (("a",), ("b",))


def test_one_node_needs_no_edge(tmp_path: Path) -> None:
    assert from_lines(tmp_path, line("a")).num_layers == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((line("a"), line("b"), "\ta -- b", "\tb -- a"), "has a cycle: (a -> b -> a|b -> a -> b); expected"),
        ((line("a"), "\ta -- a"), "has a cycle: a -> a"),
        ((line("a"), line("b"), "\ta -- bb"), "line 3: bb is not one of the 2 nodes"),
        ((line("a"), line("b"), line("a")), "line 3: a is there already"),
        ((line("a"), line("b")), "has 2 layers and no edge between them; expected edges: is it cut off?"),
        ((line("i", "Input"),), "has no node that takes part in the plan"),
        ((line("a"), line("b")[:-25], "\ta -- b"), "line 2 is 'b -- Linear.*expected a node, 'node1 -- "),
        ((line("a"), "\ta --"), "line 2 is '\\\\ta --'; expected a node"),
        ((line("a", forward_compute_time=-1.0),), "line 1: forward_compute_time is '-1.0'; expected a number from 0"),
        ((line("a", backward_compute_time="nan"),), "line 1: backward_compute_time is 'nan'; expected a number"),
        ((line("a", parameter_size="inf"),), "line 1: parameter_size is 'inf'; expected a number"),
        ((line("a", parameter_size=""),), "line 1: parameter_size is ''; expected a number"),
        (
            (line("a", activation_size="[1.0; -2.0]"),),
            "line 1: activation_size is '\\[1.0; -2.0\\]'; expected a number",
        ),
        ((line("a", activation_size="[1.0; x]"),), "line 1: activation_size is '\\[1.0; x\\]'; expected a number"),
    ],
)
def test_damaged_lines_are_refused_with_their_place(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(FileError, match=message):
        from_lines(tmp_path, *lines)
