"""Measure the link between two processes of this host: transfers and all-reduces by size, over gloo or NCCL.

Two processes send messages of increasing size to and fro until the median settles; half a round trip is one transfer.
Sizes that take less than their share of the time are timed in two turns, and the shorter median counts: a slow phase of
the host that is shorter than a turn spoils one of the two.
The medians, made monotonic, are the points of the link, because protocols change with the size and no single line fits.
Bandwidth comes from the large messages, latency from the smallest. A round trip is refused if a thread of either
process was ready to run while another process had the core (Linux only).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from gplan.core import Collective, CollectiveKind, Link, LinkPoint
from gplan.core.machine import num_messages
from gplan_profiler.host.host_info import pin_to_share
from gplan_profiler.host.host_load import thread_times, waited_for_others_s
from gplan_profiler.host.processes import end_with_parent, run_processes
from gplan_profiler.timing.clock import Clock, CpuClock, CudaClock, Samples


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
COLLECTIVE_BYTES = tuple(16**power for power in range(3, 7))  # 4 KiB to 16 MiB
_LARGE_SHARE = 1 / 16  # the bandwidth is fitted to messages of at least this share of the largest
_TURNS = 2  # of all sizes: a slow phase of the host spoils those that are timed within it
_BUDGET_S = 2.0  # of sampling, divided evenly among the turns and sizes
_ALL_REDUCE_BUDGET_S = 1.0  # the same
_WARMUP_TIMES = 3
_TIMES_AT_ONCE = 5
_ENOUGH = 20  # slow trips may come in a row
_FEWEST = 3  # also where the time is up
_SLOW_S = 0.02  # what takes longer is done once at a time
_LONGEST_S = 2.0
_PAUSE_S = 1e-3  # as between the messages of a pipeline
_SETTLED_SHARE = 0.03
_SILENCE = timedelta(seconds=30)
_TIMEOUT_S = 60.0  # without any output of the two processes


ASSUMED_GPU_LINK = Link(latency_s=10e-6, bytes_per_s=25e9)
"""Between GPUs where only one is there: about that of PCIe 4.0 with 16 lanes."""


def is_measurable(device_kind: str) -> bool:
    """Whether this host has two devices of this kind."""
    return device_kind != "cuda" or torch.cuda.device_count() > 1


def measure_link(*, device_kind: str = "cpu") -> Link:
    """The link between two processes of this host, with one core each ("cpu") or one GPU each ("cuda").

    Raises RunError if the processes cannot connect.
    """
    with tempfile.TemporaryDirectory(prefix="gplan-link-") as place:
        run_processes("gplan_profiler.host.links", [device_kind, place], num_processes=2, timeout_s=_TIMEOUT_S)
        content = (Path(place) / "times.json").read_bytes()
    times, reduced = msgspec.json.decode(content, type=tuple[list[tuple[int, float]], list[tuple[int, float]]])
    return replace(fit_link(*zip(*times, strict=True)), collectives=(fit_collective("all_reduce", 2, reduced),))


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """The link with these transfer times, made monotonic, for messages of these increasing sizes.

    >>> link = fit_link([1000, 2000, 4000], [2e-3, 3e-3, 5e-3])
    >>> round(link.latency_s, 6), round(link.bytes_per_s), link.transfer_s(3000)
    (0.001, 1000000, 0.004)
    """
    rising_s = not_falling(seconds)
    large = [(n, s) for n, s in zip(sizes, rising_s, strict=True) if n >= _LARGE_SHARE * sizes[-1]]
    bytes_per_s = sizes[-1] / rising_s[-1]  # where the times do not rise
    if large[0][1] < large[-1][1]:  # a line with the least squared relative error
        terms = np.array([[1.0 / s, n / s] for n, s in large])
        _, s_per_byte = np.linalg.lstsq(terms, np.ones(len(large)), rcond=None)[0]
        bytes_per_s = 1.0 / float(s_per_byte)
    return Link(
        latency_s=max(0.0, rising_s[0] - sizes[0] / bytes_per_s),
        bytes_per_s=bytes_per_s,
        points=tuple(LinkPoint(num_bytes=n, seconds=s) for n, s in zip(sizes, rising_s, strict=True)),
        origin="measured",
    )


def fit_collective(kind: CollectiveKind, num_devices: int, times: Sequence[tuple[int, float]]) -> Collective:
    """The collective with these seconds by bytes of the whole tensor, divided among the messages of a ring.

    >>> found = fit_collective("all_reduce", 2, [(2000, 4e-3), (4000, 6e-3), (8000, 10e-3)])
    >>> found.message.transfer_s(3000)
    0.004
    """
    sent = num_messages(kind, num_devices)
    sizes, seconds = zip(*((size // num_devices, taken_s / sent) for size, taken_s in times), strict=True)
    return Collective(kind=kind, num_devices=num_devices, message=fit_link(sizes, seconds))


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


Store: TypeAlias = Any
"""A store of torch.distributed, through which ranks meet."""

Group: TypeAlias = Any
"""A backend of torch.distributed for some ranks; unlike a registered group, the others need not join in making it."""


def connected_group(device: torch.device, store: Store, *, rank: int, num_ranks: int, timeout: timedelta) -> Group:
    """Connect the ranks that share a store, by gloo or NCCL."""
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, num_ranks, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, num_ranks, options)


class GroupTimer:
    """Times what the ranks of a group do together; rank 0 of the group decides when the median has settled."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.num_ranks = group.rank(), group.size()
        self._clock: Clock = CudaClock() if device.type == "cuda" else CpuClock()

    def median_s(self, action: Callable[[], object], *, budget_s: float, expected_s: float = 0.0) -> float:
        """The median seconds of an action, the same on all ranks; an action that is expected to be slow is done less often."""
        is_slow = expected_s > _SLOW_S
        for _ in range(1 if is_slow else _WARMUP_TIMES):
            action()
        samples, end_s = Samples(), time.monotonic() + budget_s
        while True:
            self._sample(action, samples, 1 if is_slow else _TIMES_AT_ONCE)
            is_late = time.monotonic() > end_s and len(samples.clean_s) + len(samples.refused_s) >= _FEWEST
            is_enough = len(samples.clean_s) >= _ENOUGH and samples.settled(_SETTLED_SHARE)
            if self._from_rank_0(float(is_enough or is_late)):
                return self._from_rank_0(samples.timing().median_s)

    def _sample(self, action: Callable[[], object], samples: Samples, num_times: int) -> None:
        """Each time is refused if any rank waited for other processes."""
        taken_s, waited_s = [], []
        for _ in range(num_times):
            if self.rank == 0:
                time.sleep(_PAUSE_S)
            before = thread_times()
            once, start_s = Samples(), time.perf_counter()
            self._clock.time(once, action)
            wall_s = time.perf_counter() - start_s
            self._clock.flush()
            taken_s.append(once.clean_s[0] if once.clean_s else wall_s)  # waiting for the other rank belongs to it
            waited_s.append(waited_for_others_s(before, thread_times()))
        most_s = torch.tensor(waited_s, dtype=torch.float64, device=self.device)
        self.group.allreduce([most_s], dist.ReduceOp.MAX).wait()
        for seconds, longest_s in zip(taken_s, most_s.tolist(), strict=True):
            samples.add(seconds, seconds - longest_s, waits=True)

    def _from_rank_0(self, number: float) -> float:
        """The number of rank 0."""
        found = torch.tensor([number], dtype=torch.float64, device=self.device)
        self.group.broadcast(found, 0).wait()
        return float(found.item())


Prepared: TypeAlias = tuple[int, Callable[[], object]]
"""The bytes of the tensor, and what sends it."""


def pair_times(timer: GroupTimer, *, budget_s: float) -> list[tuple[int, float]]:
    """Bytes and seconds of one transfer between the two ranks of a group; sizes that would take too long are left out."""

    def trip(num_bytes: int) -> Prepared:
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=timer.device)

        def there_and_back() -> None:
            for sender in (0, 1):
                if timer.rank == sender:
                    timer.group.send([message], 1 - sender, 0).wait()
                else:
                    timer.group.recv([message], sender, 0).wait()

        return num_bytes, there_and_back

    return [(num_bytes, trip_s / 2) for num_bytes, trip_s in _times_by_size(timer, MESSAGE_BYTES, trip, budget_s)]


def collective_times(timer: GroupTimer, kind: CollectiveKind, *, budget_s: float) -> list[tuple[int, float]]:
    """Bytes of the whole tensor and seconds of a collective of a group; sizes that would take too long are left out."""

    def collective(num_bytes: int) -> Prepared:
        share = torch.zeros(-(-num_bytes // (4 * timer.num_ranks)), device=timer.device)
        whole = torch.zeros(timer.num_ranks * len(share), device=timer.device)

        def collect() -> None:
            if kind == "all_reduce":
                work = timer.group.allreduce([whole], dist.ReduceOp.SUM)
            elif kind == "all_gather":
                work = timer.group._allgather_base(whole, share)
            else:
                work = timer.group._reduce_scatter_base(share, whole)
            work.wait()

        return whole.nbytes, collect

    return _times_by_size(timer, COLLECTIVE_BYTES, collective, budget_s)


def _times_by_size(
    timer: GroupTimer, sizes: Sequence[int], prepare: Callable[[int], Prepared], budget_s: float
) -> list[tuple[int, float]]:
    """Bytes and median seconds, the shorter median of the turns; sizes that would take too long are left out.

    What takes longer than its share of the budget has one turn, so that slow links do not take twice as long.
    """
    share_s = budget_s / (_TURNS * len(sizes))
    found: list[tuple[int, float]] = []
    for size in sizes:
        expected_s = found[-1][1] * size / found[-1][0] if found else 0.0
        if expected_s > _LONGEST_S:
            break
        num_bytes, action = prepare(size)
        found.append((num_bytes, timer.median_s(action, budget_s=share_s, expected_s=expected_s)))
    for _ in range(1, _TURNS):
        for i, (num_bytes, first_s) in enumerate(found):
            if first_s <= share_s:
                _, action = prepare(num_bytes)
                again_s = timer.median_s(action, budget_s=share_s, expected_s=first_s)
                found[i] = (num_bytes, min(first_s, again_s))
    return found


def _main(device_kind: str, place: Path) -> None:
    """One of the two processes; rank 0 writes the result."""
    end_with_parent()
    rank = int(os.environ["RANK"])
    if device_kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        pin_to_share(rank, num_shares=2, num_threads=1)
    store = dist.FileStore(str(place / "store"), 2)  # type: ignore[attr-defined]
    group = connected_group(device, store, rank=rank, num_ranks=2, timeout=_SILENCE)
    deprioritize_connection_threads()
    timer = GroupTimer(group, device)
    times = pair_times(timer, budget_s=_BUDGET_S)
    reduced = collective_times(timer, "all_reduce", budget_s=_ALL_REDUCE_BUDGET_S)
    if rank == 0:
        (place / "times.json").write_bytes(msgspec.json.encode((times, reduced)))
    group.barrier().wait()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
