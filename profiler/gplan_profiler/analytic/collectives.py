"""Seconds of collectives between the devices of a machine: an alpha-beta model for each level of links.

A collective of n bytes (the whole tensor) over g ranks takes start + rank * (g - 1) + wire bytes / rate. On the wire are
(g - 1) / g * n bytes of an all-gather, reduce-scatter or all-to-all, and twice that of an all-reduce (rings; Thakur et
al., Optimization of Collective Communication Operations in MPICH, 2005). Within a node the rate is a share of the
device's link. Across nodes a ring enters each node once: the members of a group in one node use their network cards
side by side, so the rate is that of one device's network times the members, at most the link's; the tokens of an
all-to-all leave through each device's own card. Groups are placed as `Widths.order` says. Left out: rails that share
switches, and other traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from gplan.core import Link
from gplan.core.checks import COLLECTIVE_KINDS
from gplan.core.machine import Collective, num_messages
from gplan_profiler.analytic.decoder_config import Widths
from gplan_profiler.analytic.hardware import ExchangeKind, Hardware

Group: TypeAlias = Literal["tensor", "context", "expert", "expert_tensor"]
_DIMENSIONS: dict[Group, str] = {"tensor": "tp", "context": "cp", "expert": "ep", "expert_tensor": "tp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A collective within a layer, of one micro-batch."""

    kind: ExchangeKind
    group: Group
    num_bytes: int  # of the whole tensor
    hidden: float = 0.0  # share of its seconds that computing hides


def collective_s(
    hardware: Hardware, kind: ExchangeKind, num_bytes: float, *, group: tuple[tuple[int, int], ...]
) -> float:
    """Seconds of a collective over a group, as (size, stride) in the numbering of ranks; 0 for one rank."""
    size = prod(x for x, _ in group)
    if size < 2 or not num_bytes:
        return 0.0
    rate, per_node = hardware.collectives[kind], hardware.devices_per_node
    members = prod(min(x, max(1, per_node // stride)) for x, stride in group)  # of one node
    num_nodes = -(-size // members)
    bytes_per_s, start_s = hardware.link.bytes_per_s * rate.share, rate.start_s
    wire = num_bytes * (size - 1) / size * (2 if kind == "all_reduce" else 1)
    if num_nodes == 1:
        return start_s + rate.rank_s * (size - 1) + wire / bytes_per_s
    network = hardware.network
    network_rate = network.bytes_per_s * hardware.network_share
    start_s += network.latency_s * (num_nodes - 1) + rate.rank_s * (members - 1)
    if kind == "all_to_all":
        outside = num_bytes * (size - members) / size
        return start_s + max(outside / network_rate, num_bytes * (members - 1) / size / bytes_per_s)
    return start_s + wire / min(bytes_per_s, network_rate * members)


def exchange_s(hardware: Hardware, widths: Widths, exchange: Exchange) -> float:
    """Seconds of a layer's collective beyond what computing hides."""
    group = widths.placed(_DIMENSIONS[exchange.group], of_experts=exchange.group.startswith("expert"))
    seconds = collective_s(hardware, exchange.kind, exchange.num_bytes, group=group)
    return (1 - exchange.hidden) * seconds


def pipeline_link(
    hardware: Hardware, widths: Widths, *, hidden: float = 0.0, tensor_bytes: float = 1e9, sums_whole: bool = False
) -> Link:
    """The link between stages, with the collectives of a stage's replicas once a step, of so many bytes each.

    Where any two stages that follow each other are on two nodes, all transfers are priced as between nodes.
    `hidden` is the share of the replicas' collectives that the last backward and the first forward of a step hide.
    """
    num_replicas, ((_, apart),) = widths.replicas, widths.placed("pp")
    link = hardware.link if apart * widths.pipeline <= hardware.devices_per_node else hardware.network
    if num_replicas < 2:
        return link
    collectives = []
    for kind in COLLECTIVE_KINDS:
        messages = num_messages(kind, num_replicas)
        run: ExchangeKind = "all_reduce" if sums_whole and kind == "reduce_scatter" else kind
        whole_s = (1 - hidden) * collective_s(hardware, run, tensor_bytes, group=widths.placed("cp", "dp"))
        message = Link(latency_s=0.0, bytes_per_s=tensor_bytes * messages / num_replicas / whole_s)
        collectives.append(Collective(kind=kind, num_devices=num_replicas, message=message))
    return Link(latency_s=link.latency_s, bytes_per_s=link.bytes_per_s, collectives=tuple(collectives))
