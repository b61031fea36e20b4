"""Measure the link between two processes of this host: transfer time by message size, over gloo or NCCL.

Two processes send messages of increasing size to and fro until the median settles; half a round trip is one transfer.
The medians, made monotonic, are the points of the link, because protocols change with the size and no single line fits.
Bandwidth comes from the large messages, latency from the smallest. A round trip is refused if a thread of either
process was ready to run while another process had the core (Linux only).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from gplan.core import Link, LinkPoint
from gplan.core.errors import UsageError
from profiler.host.host_info import pin_to_share
from profiler.host.host_load import thread_times, waited_for_others_s
from profiler.host.processes import end_with_parent, run_processes
from profiler.timing.clock import Clock, CpuClock, CudaClock, Samples


def connection_threads() -> Iterator[int]:
    """The ids of gloo's connection threads in this process; none without /proc."""
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            if name.read_text().startswith("gloo_"):
                yield int(name.parent.name)


def deprioritize_connection_threads() -> None:
    """Give gloo's existing threads the batch scheduling policy, so that they never preempt the computation.

    An arriving message wakes a connection thread, on a process with one core perhaps while a send holds the
    connection's lock. The thread then spins on the lock until the scheduler's next tick, often 4 ms later.
    """
    for thread in connection_threads():
        with suppress(OSError):  # the thread has ended, or the system forbids it
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


MESSAGE_BYTES = tuple(4**power for power in range(5, 14))  # 1 KiB to 64 MiB
_LARGE_SHARE = 1 / 16  # the bandwidth is fitted to messages of at least this share of the largest
_BUDGET_S = 2.0  # of sampling, divided evenly among the sizes
_WARMUP_TRIPS = 3
_TRIPS_AT_ONCE = 5
_LEAST_TRIPS = 20  # slow trips may come in a row
_PAUSE_S = 1e-3  # as between the messages of a pipeline
_SETTLED_SHARE = 0.03
_SILENCE = timedelta(seconds=30)


def measure_link(*, device_kind: str = "cpu", timeout_s: float = 60.0) -> Link:
    """The link between two processes of this host, with one core each ("cpu") or one GPU each ("cuda").

    Raises UsageError with fewer than two GPUs, RunError if the processes cannot connect.
    """
    check_measurable(device_kind)
    with tempfile.TemporaryDirectory(prefix="gplan-link-") as place:
        run_processes("profiler.host.links", [device_kind, place], num_processes=2, timeout_s=timeout_s)
        seconds = msgspec.json.decode((Path(place) / "seconds.json").read_bytes(), type=list[float])
    return fit_link(MESSAGE_BYTES, seconds)


def check_measurable(device_kind: str) -> None:
    """Raise UsageError for a "cuda" link on a host with fewer than two GPUs."""
    if device_kind == "cuda" and (num_gpus := torch.cuda.device_count()) < 2:
        raise UsageError(
            f"this host has {num_gpus} GPUs; measuring the link between two needs at least 2; state the link with "
            "--link, such as --link 25GB/s,5us"
        )


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """The link with these transfer times, made monotonic, for messages of these increasing sizes.

    >>> link = fit_link([1000, 2000, 4000], [2e-3, 3e-3, 5e-3])
    >>> round(link.latency_s, 6), round(link.bytes_per_s), link.transfer_s(3000)
    (0.001, 1000000, 0.004)
    """
    rising_s = not_falling(seconds)
    bytes_per_s = _bandwidth(sizes, rising_s)
    return Link(
        latency_s=max(0.0, rising_s[0] - sizes[0] / bytes_per_s),
        bytes_per_s=bytes_per_s,
        points=tuple(LinkPoint(num_bytes=n, seconds=s) for n, s in zip(sizes, rising_s, strict=True)),
        origin="measured",
    )


def not_falling(values: Sequence[float]) -> list[float]:
    """Isotonic regression in absolute distance: adjacent values that fall are pooled and replaced by their median.

    >>> not_falling([1.0, 4.0, 2.0, 5.0]), not_falling([1.0, 90.0, 2.0, 3.0])
    ([1.0, 3.0, 3.0, 5.0], [1.0, 3.0, 3.0, 3.0])
    """
    pools: list[list[float]] = []
    for value in values:
        pool = [value]
        while pools and median(pools[-1]) > median(pool):
            pool = pools.pop() + pool
        pools.append(pool)
    return [median(pool) for pool in pools for _ in pool]


def _bandwidth(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Bytes per second of the large messages, by a line fitted with the least squared relative error.

    Where their times do not rise: the largest message's bytes over its time.
    """
    large = [(n, s) for n, s in zip(sizes, seconds, strict=True) if n >= _LARGE_SHARE * sizes[-1]]
    if large[0][1] >= large[-1][1]:
        return sizes[-1] / seconds[-1]
    terms = np.array([[1.0 / s, n / s] for n, s in large])
    _, s_per_byte = np.linalg.lstsq(terms, np.ones(len(large)), rcond=None)[0]
    return 1.0 / float(s_per_byte)


class _Peer:
    """One of the two processes. Both run the same code; rank 0 sends first and decides when to stop."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._clock: Clock = CudaClock() if device.type == "cuda" else CpuClock()

    def transfer_s(self, num_bytes: int, budget_s: float) -> float:
        """Seconds of one transfer: half of the median round trip."""
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        for _ in range(_WARMUP_TRIPS):
            self._trip(message)
        samples, end_s = Samples(), time.monotonic() + budget_s
        self._sample(message, samples)
        while not self._agreed(_is_enough(samples) or time.monotonic() > end_s):
            self._sample(message, samples)
        return samples.timing().median_s / 2

    def _sample(self, message: torch.Tensor, samples: Samples) -> None:
        """A few round trips; each is refused if either process waited for other processes."""
        trips_s, waited_s = [], []
        for _ in range(_TRIPS_AT_ONCE):
            if self._rank == 0:
                time.sleep(_PAUSE_S)
            before = thread_times()
            trips_s.append(self._timed_trip(message))
            waited_s.append(waited_for_others_s(before, thread_times()))
        most_s = torch.tensor(waited_s, dtype=torch.float64, device=self._device)
        dist.all_reduce(most_s, op=dist.ReduceOp.MAX)
        for trip_s, longest_s in zip(trips_s, most_s.tolist(), strict=True):
            samples.add(trip_s, trip_s - longest_s)

    def _timed_trip(self, message: torch.Tensor) -> float:
        samples = Samples()
        self._clock.time(samples, self._trip, message)
        self._clock.flush()
        return (samples.clean_s or samples.refused_s)[0]

    def _trip(self, message: torch.Tensor) -> None:
        for sender in (0, 1):
            if self._rank == sender:
                dist.send(message, 1 - self._rank)
            else:
                dist.recv(message, 1 - self._rank)

    def _agreed(self, done: bool) -> bool:
        """The decision of rank 0."""
        verdict = torch.tensor([float(done)], device=self._device)
        dist.broadcast(verdict, src=0)
        return bool(verdict.item())


def _is_enough(samples: Samples) -> bool:
    return len(samples.clean_s) >= _LEAST_TRIPS and samples.settled(_SETTLED_SHARE)


@contextmanager
def _connected(device_kind: str, rank: int, place: Path) -> Iterator[torch.device]:
    """This rank's core or GPU; inside, a process group of both ranks exists."""
    if device_kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        pin_to_share(rank, num_shares=2, num_threads=1)
    dist.init_process_group(
        "nccl" if device_kind == "cuda" else "gloo",
        init_method=f"file://{place / 'store'}",
        rank=rank,
        world_size=2,
        timeout=_SILENCE,
        device_id=device if device_kind == "cuda" else None,
    )
    deprioritize_connection_threads()
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _main(device_kind: str, place: Path) -> None:
    """One of the two processes; rank 0 writes the result."""
    end_with_parent()
    rank = int(os.environ["RANK"])
    with _connected(device_kind, rank, place) as device:
        peer = _Peer(rank, device)
        seconds = [peer.transfer_s(size, _BUDGET_S / len(MESSAGE_BYTES)) for size in MESSAGE_BYTES]
        if rank == 0:
            (place / "seconds.json").write_bytes(msgspec.json.encode(seconds))
        dist.barrier()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
