"""The JSON of dnn-partitioning (github.com/msr-fiddle/dnn-partitioning; its README describes the fields).

An object with `maxSizePerFPGA` (bytes of an accelerator), `nodes` (`id`, `fpgaLatency`, `isBackwardNode`, `colorClass`,
`size`, `supportedOnFpga`) and `edges` (`sourceId`, `destId`, `cost`). The format has no unit of time; its layer graphs
hold the numbers of PipeDream's profiles, which are milliseconds. Other fields, those about CPUs among them, play no
part.

Its planner minimises what `--minimize max-device-load` does. It first joins a node without time to its only neighbour
in the forward pass; here such a node stays a layer, so a plan may fit into less memory than that planner finds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import networkx as nx

from gplan.core import Link
from gplan.core.errors import FileError, UsageError
from gplan.interop.published.nodes import (
    ColourClasses,
    Edge,
    GivenGraph,
    Node,
    check_joined,
    check_no_cycle,
    check_number,
)

_NO_LINK = Link(latency_s=0.0, bytes_per_s=1e9)  # never used: every transfer has its seconds, and no bytes
_COST_TOLERANCE = 1e-6  # the planner's own, in the file's unit


class _File(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    max_size: float = msgspec.field(name="maxSizePerFPGA")
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def is_dnn_partitioning(text: str) -> bool:
    """Whether a text can be this format: it is the beginning of a JSON object."""
    return text.lstrip().startswith("{")


def dnn_partitioning_graph(text: str, *, name: str, link: Link | None) -> GivenGraph:
    """One layer for each colour class, one value for each node that other layers read; `name` is the file's,
    for errors."""
    if link is not None:
        raise UsageError(f"{name} gives the seconds of every transfer, so a link changes nothing; leave out --link")
    file = _parsed(text, name)
    _check(file, name)
    classes = ColourClasses(nodes=file.nodes, edges=file.edges)
    layers, values = classes.layers(), classes.values()
    check_joined(len(layers), values, name=name)
    return GivenGraph(
        layers=layers,
        values=values,
        link=_NO_LINK,
        granularity="op" if classes.has_operators else "layer",
        memory_bytes=int(file.max_size),
        notes=(
            "from dnn-partitioning's JSON, its times taken as milliseconds; a layer is a colour class, its weights all the "
            "memory that its nodes take",
            "transfers take the seconds that the file gives, whatever the link; --minimize max-device-load has the "
            "objective of its planner",
            *classes.notes(),
        ),
    )


def _parsed(text: str, name: str) -> _File:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise FileError(
            f"{name} is cut off or is not JSON: {error.msg} in line {error.lineno}, column {error.colno}; expected the "
            "JSON of dnn-partitioning"
        ) from error
    except RecursionError as error:
        raise FileError(f"{name} is nested too deeply; expected the JSON of dnn-partitioning") from error
    if str(content.get("format")).startswith("gplan."):
        raise FileError(f"{name} is a file of gplan, {content['format']}; it needs no import: use it as it is")
    try:
        return msgspec.convert(content, _File)
    except msgspec.ValidationError as error:
        raise FileError(f"{name} is not a profile of dnn-partitioning: {error}") from error


def _check(file: _File, name: str) -> None:
    """Raise FileError where the file cannot be planned, naming the place."""
    check_number(file.max_size, place=f"{name}: $.maxSizePerFPGA", least=1.0)
    for i, node in enumerate(file.nodes):
        check_number(node.fpga_latency, place=f"{name}: $.nodes[{i}].fpgaLatency")
        check_number(node.size, place=f"{name}: $.nodes[{i}].size")
        if not node.supported_on_fpga:
            raise FileError(
                f"{name}: $.nodes[{i}].supportedOnFpga is {node.supported_on_fpga!r}, so {node.label} runs on a CPU only; "
                "expected nodes that all run on the accelerator"
            )
    _check_ids(file.nodes, name)
    _check_edges(file, name)
    text = {x.id: f"{x.label} (id {x.id})" for x in file.nodes}
    check_no_cycle(nx.DiGraph((text[x.source_id], text[x.dest_id]) for x in file.edges), name=name)


def _check_ids(nodes: Sequence[Node], name: str) -> None:
    first: dict[int, int] = {}
    for i, node in enumerate(nodes):
        if first.setdefault(node.id, i) != i:
            raise FileError(
                f"{name}: $.nodes[{i}].id is {node.id}, as of $.nodes[{first[node.id]}]; expected every node to have its own"
            )


def _check_edges(file: _File, name: str) -> None:
    node_of = {x.id: x for x in file.nodes}
    cost_of: dict[int, float] = {}
    for i, edge in enumerate(file.edges):
        place = f"{name}: $.edges[{i}]"
        check_number(edge.cost, place=f"{place}.cost")
        for field, end in (("sourceId", edge.source_id), ("destId", edge.dest_id)):
            if end not in node_of:
                raise FileError(f"{place}.{field} is {end}; expected the id of one of the {len(node_of)} nodes")
        source, reader = node_of[edge.source_id], node_of[edge.dest_id]
        if abs(cost_of.setdefault(source.id, edge.cost) - edge.cost) > _COST_TOLERANCE:
            raise FileError(
                f"{place}.cost is {edge.cost!r} and {cost_of[source.id]!r} on an edge before, both of {source.label}; "
                "expected one cost for the output of a node"
            )
        if source.is_backward_node and not reader.is_backward_node:
            raise FileError(
                f"{place} runs from {source.label} of the backward pass to {reader.label} of the forward pass; expected the "
                "forward pass to come first"
            )
