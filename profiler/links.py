"""How fast neighbours on this host talk: latency and bandwidth of gloo between two processes, measured and fitted.

Messages of rising size go there and back, warmed up; half of the median round trip is one transfer. The fit
`latency + bytes / bandwidth` minimises relative errors, so that small messages count as much as large ones.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np

from gplan.nouns import Link
from profiler.processes import core_shares, end_with_parent, run_processes

MESSAGE_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_ROUND_TRIPS = 20


def measure_link(*, timeout_s: float = 60.0) -> Link:
    """The link between two processes of this host. Raises RunError if they cannot talk."""
    with tempfile.TemporaryDirectory(prefix="gplan-link-") as place:
        run_processes("profiler.links", [place], num_processes=2, timeout_s=timeout_s)
        seconds = msgspec.json.decode((Path(place) / "seconds.json").read_bytes(), type=list[float])
    return fit_link(MESSAGE_BYTES, seconds)


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Latency and bandwidth with the least squared relative error; neither is below zero.

    >>> link = fit_link([1000, 2000, 4000], [2e-3, 3e-3, 5e-3])
    >>> round(link.latency_s, 6), round(link.bytes_per_s)
    (0.001, 1000000)
    """
    weights = 1.0 / np.asarray(seconds)
    terms = np.stack([np.ones(len(sizes)), np.asarray(sizes, dtype=float)], axis=1) * weights[:, None]
    (latency_s, s_per_byte), *_ = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)
    if latency_s < 0:
        latency_s, s_per_byte = 0.0, float(np.mean(np.asarray(seconds) / np.asarray(sizes)))
    return Link(latency_s=float(latency_s), bytes_per_s=1.0 / max(float(s_per_byte), 1e-15), origin="measured")


def _main(place: Path) -> None:
    """One of the two processes: rank 0 sends first and keeps the time."""
    import torch
    import torch.distributed as dist

    end_with_parent()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, core_shares(2, num_threads=1)[rank])
    dist.init_process_group(
        "gloo", init_method=f"file://{place / 'store'}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    seconds = []
    for size in MESSAGE_BYTES:
        message = torch.zeros(size, dtype=torch.uint8)
        trips = []
        for _ in range(_ROUND_TRIPS):
            start_s = time.perf_counter()
            for sender in (0, 1):
                if rank == sender:
                    dist.send(message, 1 - rank)
                else:
                    dist.recv(message, 1 - rank)
            trips.append(time.perf_counter() - start_s)
        seconds.append(float(np.median(trips[_ROUND_TRIPS // 4 :])) / 2)
    if rank == 0:
        (place / "seconds.json").write_bytes(msgspec.json.encode(seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
