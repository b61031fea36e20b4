"""The nodes and edges of dnn-partitioning's JSON, field by field as they stand in the file."""

from __future__ import annotations

import msgspec


class Node(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A layer or operator, of the forward or of the backward pass. Times and sizes are in the file's units."""

    id: int
    fpga_latency: float
    size: float  # bytes on the accelerator: weights, activations, everything
    is_backward_node: bool | int
    supported_on_fpga: bool | int
    color_class: int | None = None  # nodes of one class share a device; None: a class of its own
    name: str | None = None

    @property
    def label(self) -> str:
        """What messages and layers call it."""
        return self.name or f"node {self.id}"


class Edge(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The output of one node is read by another; `cost` is the time to move that output, the same on all its edges."""

    source_id: int
    dest_id: int
    cost: float
