"""The time of layers in a row where a host enqueues the kernels that a device runs: two clocks, by a recurrence.

H is when the host is free, G when the device is. For each layer, with c the host's seconds to enqueue it and d the device's
seconds to run it:

    H = H + c                        the host enqueues all kernels of the layer
    G = max(G, H - c) + d            the device begins when its first kernel is there,
    G = max(G, H)                    and ends when its last kernel is there, or later
    H = max(H, G)                    only if the host waits for the device, as for `.item()`

    host    |a|b|c|.....                    (as in Daydream, Zhu et al. 2020, and Lumos, Liang et al. 2025)
    device   |aaa|bbb|ccc|

Sends and receives between devices are enqueued too, and occupy only the device. The latency of a first kernel is left out,
and that a full launch queue holds the host up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Enqueued(NamedTuple):
    """A layer's part of one pass."""

    host_s: float
    device_s: float
    waits: bool = False  # whether the host waits for the device at its end


def both_done_s(layers: Iterable[Enqueued]) -> float:
    """Seconds from an idle device until host and device are done with these layers, in the order of the pass.

    >>> both_done_s([Enqueued(1.0, 3.0), Enqueued(1.0, 3.0)]), both_done_s([Enqueued(3.0, 1.0), Enqueued(3.0, 1.0)])
    (6.0, 6.0)
    >>> both_done_s([Enqueued(1.0, 5.0, waits=True), Enqueued(5.0, 1.0)])
    10.0
    """
    host_s = device_s = 0.0
    for layer in layers:
        begun_s = max(device_s, host_s)
        host_s += layer.host_s
        device_s = max(begun_s + layer.device_s, host_s)
        host_s = device_s if layer.waits else host_s
    return max(host_s, device_s)
