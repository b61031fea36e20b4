"""PipeDream's graph.txt (github.com/msr-fiddle/pipedream, graph/graph.py writes and reads it).

Lines `node1 -- description -- forward_compute_time=1.2, backward_compute_time=2.3, activation_size=4.0,
parameter_size=8.0`, with ` -- stage_id=0` behind where its optimizer has been, and, indented, edges `node1 -- node2`.
Milliseconds and bytes; an activation_size `[4.0; 8.0]` is that of several tensors.

As its optimizer does, the model's inputs (sources called Input...) and outputs of tuples that nothing reads (sinks
called __getitem__...) are left out. It plans without transfers between stages what `--minimize max-compute` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from gplan.core import Link
from gplan.core.errors import FileError
from gplan.interop.published.nodes import (
    MS_PER_S,
    GivenGraph,
    GivenLayer,
    check_joined,
    check_no_cycle,
    check_number,
    given_value,
)

_DEFAULT_LINK = Link(latency_s=0.0, bytes_per_s=1e9)  # as of PipeDream's optimizer, --network_bandwidths
_BYTES_PER_PARAMETER = 4  # its profiles are of float32
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NODE = re.compile(
    r"(?P<id>\S+) -- (?P<description>.*) -- " + ", ".join(rf"{x}=(?P<{x}>[^,]*?)" for x in _FIELDS)
    + r"( -- stage_id=\d+)?\s*"
)  # fmt: skip
_EDGE = re.compile(r"\s+(?P<source>\S+) -- (?P<reader>\S+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    parameter_bytes: int


def is_pipedream(text: str) -> bool:
    """Whether a text can be this format: its first line has the parts of a node."""
    return " -- " in text.lstrip().partition("\n")[0]


def pipedream_graph(text: str, *, name: str, link: Link | None) -> GivenGraph:
    """One layer for each node but inputs and unread outputs; `name` is the file's, for errors."""
    nodes, edges = _parsed(text, name)
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(edges)
    check_no_cycle(graph, name=name)
    num_left_out = _leave_out(graph, nodes)
    number = {node: i for i, node in enumerate(graph)}
    values = tuple(
        given_value(
            number[node],
            (number[x] for x in graph.successors(node)),
            num_bytes=nodes[node].activation_bytes,
            gradient_bytes=nodes[node].activation_bytes,
        )
        for node in graph
        if graph.out_degree(node)
    )
    check_joined(len(graph), values, name=name)
    return GivenGraph(
        layers=tuple(_layer(node, nodes[node]) for node in graph),
        values=values,
        link=link or _DEFAULT_LINK,
        granularity="layer",
        memory_bytes=None,
        notes=_notes(num_left_out, link),
    )


def _notes(num_left_out: int, link: Link | None) -> tuple[str, ...]:
    source = (
        "from PipeDream's graph.txt; a layer keeps its output until its backward pass; --minimize max-compute has the "
        "objective of its planner"
    )
    left_out = f"{num_left_out} nodes are left out, as PipeDream does: inputs and outputs that nothing reads"
    no_link = "the file says nothing of the link between devices: 1 GB/s, the default of PipeDream's optimizer; --link"
    return (source, *([left_out] if num_left_out else []), *([no_link] if link is None else []))


def _leave_out(graph: nx.DiGraph[str], nodes: Mapping[str, _Node]) -> int:
    """Take inputs, then unread outputs off the graph; how many they are."""
    num_nodes = len(graph)
    graph.remove_nodes_from([x for x in graph if not graph.in_degree(x) and nodes[x].description.startswith("Input")])
    graph.remove_nodes_from(
        [x for x in graph if not graph.out_degree(x) and nodes[x].description.startswith("__getitem__")]
    )
    return num_nodes - len(graph)


def _layer(name: str, node: _Node) -> GivenLayer:
    return GivenLayer(
        name=name,
        kind=node.description.partition("(")[0].strip(),
        forward_s=node.forward_s,
        backward_s=node.backward_s,
        weight_bytes=node.parameter_bytes,
        gradient_bytes=node.parameter_bytes,
        stash_bytes=node.activation_bytes,
        num_parameters=node.parameter_bytes // _BYTES_PER_PARAMETER,
    )


def _parsed(text: str, name: str) -> tuple[dict[str, _Node], list[tuple[str, str]]]:
    """Nodes by their ids in the order of the file, and edges between them."""
    nodes: dict[str, _Node] = {}
    edges: list[tuple[str, str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{name}, line {number}"
        if match := _EDGE.fullmatch(line):
            edges.append((match["source"], match["reader"], place))
        elif match := _NODE.fullmatch(line):
            if match["id"] in nodes:
                raise FileError(
                    f"{place}: {match['id']} is there already; expected every node to have an id of its own"
                )
            nodes[match["id"]] = _node(match, place)
        elif line.strip():
            raise FileError(
                f"{place} is {line[:80]!r}; expected a node, 'node1 -- description -- forward_compute_time=..., "
                "backward_compute_time=..., activation_size=..., parameter_size=...', or an edge, '<tab>node1 -- node2'"
            )
    for source, reader, place in edges:
        for end in (source, reader):
            if end not in nodes:
                raise FileError(
                    f"{place}: {end} is not one of the {len(nodes)} nodes; expected an edge between two of them"
                )
    return nodes, [(source, reader) for source, reader, _ in edges]


def _node(match: re.Match[str], place: str) -> _Node:
    forward_ms, backward_ms, activation_bytes, parameter_bytes = (
        sum(_numbers(match[field], f"{place}: {field}")) for field in _FIELDS
    )
    return _Node(
        description=match["description"],
        forward_s=forward_ms / MS_PER_S,
        backward_s=backward_ms / MS_PER_S,
        activation_bytes=round(activation_bytes),
        parameter_bytes=round(parameter_bytes),
    )


def _numbers(text: str, place: str) -> Sequence[float]:
    """One number, or several in brackets with semicolons between."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    parts = inner.split(";") if inner is not text else [text]
    try:
        values = [float(x) for x in parts]
    except ValueError as error:
        raise FileError(f"{place} is {text!r}; expected a number, or several as [1.0; 2.0]") from error
    for value in values:
        check_number(value, place=place)
    return values
