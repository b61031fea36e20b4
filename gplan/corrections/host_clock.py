"""Profiles with a faster host: one that takes no time, or one that launches CUDA graphs. They show what the host costs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from gplan.core import LayerCost, Profile, Timing

GRAPH_LAUNCH_S = 2.5e-6
"""What a host takes to launch a CUDA graph (NVIDIA, Constant Time Launch for Straight-Line CUDA Graphs, 2024)."""

GRAPH_KERNEL_S = 1e-9
"""What each kernel in a graph adds to that."""


def without_host(profile: Profile) -> Profile:
    """The profile of a host that takes no time."""
    return profile.with_costs(lambda cost: replace(cost, host_forward=None, host_backward=None))


def with_cuda_graphs(profile: Profile, starts: Collection[int]) -> Profile:
    """The profile with one CUDA graph for each pass of the stages that begin with these layers.

    A graph has a kernel for each counted operation. Layers whose host waits for the device are in none.
    """

    def of_graph(cost: LayerCost, launch_s: float) -> LayerCost:
        num_forward, num_backward = (
            sum(x.num_operations for x in work) for work in (cost.forward_work, cost.backward_work)
        )
        seconds: dict[str, float] = {
            "host_forward": launch_s + GRAPH_KERNEL_S * num_forward,
            "host_backward": launch_s + GRAPH_KERNEL_S * num_backward,
            "host_recompute": GRAPH_KERNEL_S * num_forward,  # in the graph of the backward
            "host_input_gradient": launch_s + GRAPH_KERNEL_S * num_backward,
            "host_weight_gradient": launch_s + GRAPH_KERNEL_S * num_backward,
        }
        timings: dict[str, Any] = {x: Timing.exactly(s, origin="computed") for x, s in seconds.items()}
        return cost if cost.forward_waits or cost.backward_waits else replace(cost, **timings)

    layers = enumerate(profile.layers)
    changed = (
        replace(x, costs=tuple(of_graph(cost, GRAPH_LAUNCH_S * (i in starts)) for cost in x.costs)) for i, x in layers
    )
    return replace(profile, layers=tuple(changed), loss=tuple(of_graph(x, 0.0) for x in profile.loss))
