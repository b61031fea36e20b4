"""dnn-partitioning's JSON: classes to layers, outputs to values, what must come before what, and damaged files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gplan.core import Link, Profile
from gplan.core.errors import FileError, UsageError
from gplan.interop.published.importing import import_profile


def node(number: int, color: int | None = None, *, backward: bool = False, **given: Any) -> dict[str, Any]:
    fields = {"supportedOnFpga": 1, "cpuLatency": 7.0, "fpgaLatency": 1.0, "size": 10.0, "name": f"n{number}"}
    colors = {} if color is None else {"colorClass": color}
    return {"id": number, **fields, "isBackwardNode": int(backward), **colors, **given}


def edge(source: int, reader: int, cost: float = 2.0) -> dict[str, Any]:
    return {"sourceId": source, "destId": reader, "cost": cost, "size": 1}


def written(folder: Path, nodes: list[dict[str, Any]], edges: list[dict[str, Any]], **given: Any) -> Path:
    content = {"maxSizePerFPGA": 1000.0, "maxFPGAs": 6, "maxCPUs": 1, "nodes": nodes, "edges": edges, **given}
    path = folder / "net.json"
    path.write_text(json.dumps(content))
    return path


def imported(folder: Path, nodes: list[dict[str, Any]], edges: list[dict[str, Any]]) -> Profile:
    return import_profile(written(folder, nodes, edges))


def names(profile: Profile) -> list[str]:
    return [x.name for x in profile.layers]


def named_values(profile: Profile) -> set[tuple[str, str, float, bool]]:
    """Producer, consumers, milliseconds and whether it is a gradient."""
    found = names(profile)
    return {
        (found[x.producer or 0], " ".join(found[y] for y in x.consumers), 1000 * (x.transfer_s or 0.0), x.is_gradient)
        for x in profile.values
    }


def test_a_class_is_a_layer_with_the_times_of_both_passes_and_all_sizes(tmp_path: Path) -> None:
    nodes = [
        node(1, 5, fpgaLatency=3.0, size=100.0), node(2, 5, fpgaLatency=4.0), node(3, 5, backward=True, fpgaLatency=8.0),
        node(4),
    ]  # fmt: skip
    profile = imported(tmp_path, nodes, [edge(1, 2), edge(2, 4)])
    first = profile.layers[0]
    assert (first.costs[0].forward.median_s, first.costs[0].backward.median_s) == (0.007, 0.008)
    assert (first.weight_bytes, first.gradient_bytes, first.costs[0].stash_bytes) == (120, 0, 0)
    assert (names(profile), profile.device.memory_bytes, profile.granularity) == (["n2", "n4"], 1000, "op")


def test_an_output_is_one_value_for_all_its_readers_elsewhere(tmp_path: Path) -> None:
    nodes = [node(1, 1), node(2, 1), node(3, 3), node(4, 4)]
    edges = [edge(1, 2, 5.0), edge(1, 3, 5.0), edge(1, 4, 5.0), edge(2, 3, 7.0), edge(3, 4, 0.5)]
    assert named_values(imported(tmp_path, nodes, edges)) == {
        ("n1", "n3 n4", 5.0, False), ("n1", "n3", 7.0, False), ("n3", "n4", 0.5, False),
    }  # fmt: skip


def test_the_backward_pass_runs_against_the_order_of_the_layers(tmp_path: Path) -> None:
    nodes = [node(1, 1), node(2, 2), node(3, 1, backward=True), node(4, 2, backward=True)]
    profile = imported(tmp_path, nodes, [edge(1, 2), edge(2, 4), edge(4, 3, 3.0), edge(1, 3), edge(1, 4)])
    assert named_values(profile) == {("n1", "n2", 2.0, False), ("n2", "n1", 3.0, True)}
    assert profile.precedence == ((0, 1),)


def test_a_reader_of_the_backward_pass_is_in_the_value_of_the_forward_pass(tmp_path: Path) -> None:
    nodes = [node(1, 1), node(2, 2), node(3, 3), node(4, 3, backward=True)]
    profile = imported(tmp_path, nodes, [edge(1, 2), edge(2, 3), edge(1, 4)])
    assert ("n1", "n2 n3", 2.0, False) in named_values(profile)
    assert len(profile.notes) == 2


def test_a_reader_of_the_backward_pass_need_not_come_after_the_producer(tmp_path: Path) -> None:
    """n3 is beside n1; that its backward pass reads n1 puts neither before the other, and n1 is still paid once."""
    nodes = [node(1, 1), node(2, 2), node(3, 3), node(4, 3, backward=True)]
    profile = imported(tmp_path, nodes, [edge(1, 2), edge(3, 2), edge(1, 4)])
    place = {name: i for i, name in enumerate(names(profile))}
    assert set(profile.precedence) == {(place["n1"], place["n2"]), (place["n3"], place["n2"])}
    assert named_values(profile) == {
        ("n1", "n3 n2", 2.0, True) if place["n3"] < place["n2"] else ("n1", "n2 n3", 2.0, True),
        ("n1", "n2", 0.0, False),
        ("n3", "n2", 2.0, False),
    }
    assert profile.notes[-1].startswith("1 outputs of the forward pass are read in the backward pass")


def test_a_class_of_the_backward_pass_alone_is_ordered_as_its_mirror_image(tmp_path: Path) -> None:
    nodes = [node(1, 1), node(2, 2), node(3, 2, backward=True), node(4, 9, backward=True), node(5, 1, backward=True)]
    profile = imported(tmp_path, nodes, [edge(1, 2), edge(2, 3), edge(3, 4), edge(4, 5)])
    assert names(profile) == ["n1", "n4", "n2"] or names(profile) == ["n1", "n2", "n4"]
    place = {name: i for i, name in enumerate(names(profile))}
    assert {(place["n1"], place["n4"]), (place["n4"], place["n2"])} <= set(profile.precedence)


def test_classes_that_need_each_other_are_one_layer(tmp_path: Path) -> None:
    nodes = [node(1, 1), node(2, 2, fpgaLatency=9.0), node(3, 1), node(4, 4)]
    profile = imported(tmp_path, nodes, [edge(1, 2), edge(2, 3), edge(3, 4)])
    assert (names(profile), profile.layers[0].weight_bytes) == (["n2", "n4"], 30)
    assert profile.notes[-1].startswith("1 colour classes are in the layers of others")


def test_layers_of_one_name_are_told_apart(tmp_path: Path) -> None:
    profile = imported(
        tmp_path, [node(1, name="add"), node(2, name="add"), node(3, name=None)], [edge(1, 2), edge(2, 3)]
    )
    assert names(profile) == ["add (1)", "add (2)", "node 3"]


def test_the_cost_of_any_assignment_is_that_of_the_file(tmp_path: Path) -> None:
    """Random training graphs, random devices: each pays once for every producer that it shares with another."""
    for seed in range(30):
        nodes, edges = _training_graph(random.Random(seed))
        profile, rng = imported(tmp_path, nodes, edges), random.Random(seed)
        device = {x.name: rng.randrange(3) for x in profile.layers}
        device_of_node = {x["id"]: device[_layer_name(x, nodes)] for x in nodes}
        assert _paid_ms(profile, device) == pytest.approx(_paid_in_file_ms(edges, device_of_node), rel=1e-12)
        forward = {x["id"] for x in nodes if not x["isBackwardNode"]}
        pairs = {
            (_layer_name(nodes[x["sourceId"]], nodes), _layer_name(nodes[x["destId"]], nodes))
            for x in edges
            if {x["sourceId"], x["destId"]} <= forward
        }
        found = names(profile)
        assert {(found[a], found[b]) for a, b in profile.precedence} >= {(a, b) for a, b in pairs if a != b}
        assert _closure(pairs) >= {(found[a], found[b]) for a, b in profile.precedence}


def _training_graph(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Six layers; node i is the forward and node 11 - i the backward part of class i; outputs read in both passes."""
    nodes = [node(i, min(i, 11 - i), backward=i > 5) for i in range(12)]
    pairs = [(i, j) for i in range(12) for j in range(i + 1, 12) if i + j != 11 and rng.random() < 0.25]
    pairs = [(0, 1), *[x for x in pairs if x != (0, 1)]]
    cost = [float(rng.randint(1, 9)) for _ in range(12)]
    return nodes, [edge(i, j, cost[i]) for i, j in pairs]


def _layer_name(one: dict[str, Any], nodes: list[dict[str, Any]]) -> str:
    return str(next(x["name"] for x in nodes if x["colorClass"] == one["colorClass"]))


def _paid_ms(profile: Profile, device: dict[str, int]) -> list[float]:
    found, paid = names(profile), [0.0, 0.0, 0.0]
    for value in profile.values:
        at = {device[found[x]] for x in value.consumers} | {device[found[value.producer or 0]]}
        for x in at if len(at) > 1 else ():
            paid[x] += 1000 * (value.transfer_s or 0.0)
    return paid


def _paid_in_file_ms(edges: list[dict[str, Any]], device: dict[int, int]) -> list[float]:
    crossing = [x for x in edges if device[x["sourceId"]] != device[x["destId"]]]
    return [
        sum({x["sourceId"]: x["cost"] for x in crossing if k in (device[x["sourceId"]], device[x["destId"]])}.values())
        for k in range(3)
    ]


def _closure(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    found = set(pairs)
    while True:
        more = {(a, d) for a, b in found for c, d in found if b == c} - found
        if not more:
            return found
        found |= more


def test_a_link_is_refused_where_transfers_have_their_seconds(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="gives the seconds of every transfer, so a link changes nothing; leave out --link"
    ):
        import_profile(written(tmp_path, [node(1)], []), link=Link(latency_s=0.0, bytes_per_s=1.0))


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ([node(1), node(2)], [edge(1, 2), edge(2, 1)], r"has a cycle: (n1 \(id 1\) -> n2 \(id 2\) -> n1|n2 \(id 2\) -> n1)"),
        ([node(1)], [edge(1, 1)], r"has a cycle: n1 \(id 1\) -> n1 \(id 1\)"),
        ([node(1), node(1)], [], r"\$.nodes\[1\].id is 1, as of \$.nodes\[0\]"),
        ([node(1), node(2)], [edge(1, 2), edge(1, 9)], r"\$.edges\[1\].destId is 9; expected the id of one of the 2 nodes"),
        ([node(1), node(2)], [edge(8, 2)], r"\$.edges\[0\].sourceId is 8; expected the id"),
        ([node(1), node(2), node(3)], [edge(1, 2), edge(1, 3, 2.5)], r"\$.edges\[1\].cost is 2.5 and 2.0 on an edge before"),
        ([node(1), node(2)], [edge(1, 2, -1.0)], r"\$.edges\[0\].cost is -1.0; expected a number from 0 to 1e\+15"),
        ([node(1), node(2, fpgaLatency=float("nan"))], [], r"\$.nodes\[1\].fpgaLatency is nan; expected a number"),
        ([node(1, size=float("inf"))], [], r"\$.nodes\[0\].size is inf; expected a number"),
        ([node(1, size=10**40)], [], r"\$.nodes\[0\].size is 1e\+40; expected a number"),
        ([node(1, size="10")], [], r"Expected `float`, got `str` - at `\$.nodes\[0\].size`"),
        ([{"id": 1}], [], r"missing required field .* - at `\$.nodes\[0\]`"),
        ([node(1, supportedOnFpga=0)], [], r"\$.nodes\[0\].supportedOnFpga is 0, so n1 runs on a CPU only"),
        ([node(1, backward=True), node(2)], [edge(1, 2)], r"\$.edges\[0\] runs from n1 of the backward pass to n2"),
        ([], [], "has no node that takes part in the plan"),
        ([node(1), node(2)], [], "has 2 layers and no edge between them"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_with_its_place(
    tmp_path: Path, nodes: list[dict[str, Any]], edges: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(FileError, match=message):
        imported(tmp_path, nodes, edges)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"maxSizePerFPGA": 1.0, "nodes": [', "is cut off or is not JSON: .* in line 1, column 35; expected the JSON"),
        ('{"nodes": [], "edges": []}', "missing required field `maxSizePerFPGA`"),
        ('{"maxSizePerFPGA": 0, "nodes": [], "edges": []}', r"\$.maxSizePerFPGA is 0.0; expected a number from 1 to"),
        ('{"a":' * 100_000, "is nested too deeply"),
    ],
)
def test_a_file_that_is_cut_off_or_lacks_a_part_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "net.json"
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        import_profile(path)
