"""The time of layers in a row where a host enqueues the kernels that a device runs: two clocks, by a recurrence.

H is when the host is free, G when the device is. For each layer, with c the host's seconds to enqueue it, d the device's
seconds to run it, l the latency of a first kernel, and B the seconds of work that the launch queue holds:

    H = H + c                        the host enqueues all kernels of the layer
    G = max(G, H - c + l) + d        the device begins when its first kernel is there,
    G = max(G, H)                    and ends when its last kernel is there, or later
    H = max(H, G)                    only if the host waits for the device, as for `.item()`
    H = max(H, G - B)                the host waits while the queue is full

    host    |a|b|c|.....                    (as in Daydream, Zhu et al. 2020, and Lumos, Liang et al. 2025)
    device   |aaa|bbb|ccc|

Sends and receives between devices are enqueued too, and occupy only the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple


class Enqueued(NamedTuple):
    """A layer's part of one pass."""

    host_s: float
    device_s: float
    waits: bool = False  # whether the host waits for the device at its end


def both_done_s(layers: Iterable[Enqueued], *, latency_s: float = 0.0, queue_s: float = inf) -> float:
    """Seconds from an idle device until host and device are done with these layers, in the order of the pass.

    >>> both_done_s([Enqueued(1.0, 3.0), Enqueued(1.0, 3.0)]), both_done_s([Enqueued(3.0, 1.0), Enqueued(3.0, 1.0)])
    (6.0, 6.0)
    >>> both_done_s([Enqueued(1.0, 5.0, waits=True), Enqueued(5.0, 1.0)])
    10.0
    """
    host_s = device_s = 0.0
    for layer in layers:
        begun_s = host_s + latency_s
        host_s += layer.host_s
        device_s = max(max(device_s, begun_s) + layer.device_s, host_s)
        host_s = max(host_s, device_s if layer.waits else device_s - queue_s)
    return max(host_s, device_s)
