"""PipeDream's graph.txt (github.com/msr-fiddle/pipedream, graph/graph.py writes and reads it).

Lines `node1 -- description -- forward_compute_time=1.2, backward_compute_time=2.3, activation_size=4.0,
parameter_size=8.0`, with ` -- stage_id=0` behind where its optimizer has been, and, indented, edges `node1 -- node2`.
Milliseconds and bytes; an activation_size `[4.0; 8.0]` is that of several tensors.

As in PipeDream's optimizer, the model's inputs (sources called Input...) and outputs of tuples that nothing reads (sinks
called __getitem__...) are left out, transfers run at 1 GB/s, and a node takes its activations and its parameters in
memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from gplan.core.errors import FileError
from published.graph import LARGEST, PublishedGraph, check_no_cycle

_MS_PER_S = 1000.0
_BYTES_PER_S = 1e9  # the default of --network_bandwidths
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NODE = re.compile(
    r"(?P<id>\S+) -- (?P<description>.*) -- " + ", ".join(rf"{x}=(?P<{x}>[^,]*?)" for x in _FIELDS)
    + r"( -- stage_id=\d+)?\s*"
)  # fmt: skip
_EDGE = re.compile(r"\s+(?P<source>\S+) -- (?P<reader>\S+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    description: str
    compute_s: float
    activation_bytes: int
    num_bytes: int  # with the parameters


def pipedream_graph(text: str, *, name: str) -> PublishedGraph:
    """One layer for each node but inputs and unread outputs; `name` is the file's, for errors."""
    nodes, edges = _parsed(text, name)
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(edges)
    check_no_cycle(graph, name=name)
    _leave_out(graph, nodes)
    number = {node: i for i, node in enumerate(graph)}
    shared: dict[tuple[int, ...], float] = {}
    for node in graph:
        if graph.out_degree(node):
            ends = tuple(sorted({number[node], *(number[x] for x in graph.successors(node))}))
            there_and_back_s = 2 * nodes[node].activation_bytes / _BYTES_PER_S
            shared[ends] = shared.get(ends, 0.0) + there_and_back_s
    return PublishedGraph(
        nodes=tuple((node,) for node in graph),
        compute=tuple(nodes[node].compute_s for node in graph),
        num_bytes=tuple(nodes[node].num_bytes for node in graph),
        shared=shared,
        precedence=tuple((number[a], number[b]) for a, b in graph.edges),
        unit="s",
        memory_bytes=None,
        objective="compute",
    )


def _leave_out(graph: nx.DiGraph[str], nodes: Mapping[str, _Node]) -> None:
    """Remove inputs, then unread outputs."""
    graph.remove_nodes_from([x for x in graph if not graph.in_degree(x) and nodes[x].description.startswith("Input")])
    graph.remove_nodes_from(
        [x for x in graph if not graph.out_degree(x) and nodes[x].description.startswith("__getitem__")]
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
                raise FileError(f"{place}: {match['id']} is there already; expected unique ids")
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
        compute_s=(forward_ms + backward_ms) / _MS_PER_S,
        activation_bytes=round(activation_bytes),
        num_bytes=round(activation_bytes) + round(parameter_bytes),
    )


def _numbers(text: str, place: str) -> Sequence[float]:
    """One number, or several in brackets with semicolons between."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        values = [float(x) for x in (inner.split(";") if inner is not text else [text])]
    except ValueError:
        values = []
    if not values or not all(0 <= x <= LARGEST for x in values):
        raise FileError(f"{place} is {text!r}; expected a number from 0 to {LARGEST:g}, or several as [1.0; 2.0]")
    return values
