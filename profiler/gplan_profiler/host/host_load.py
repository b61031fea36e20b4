"""How this host is while something is measured: other work on it, and its speed.

Evidence of other work: /proc/stat for stolen time, /proc/self/task for threads that waited for a core. The speed is that
of a yardstick, one fixed piece of work of about 1 ms. Products, memory and Python with PyTorch's own code take about 40,
15 and 45 % of it, as other work on a host slows each of them differently. A GPU's host is not timed, as it launches
kernels while earlier ones run; the driver reports the GPU's clocks instead (`gpu_state` of `host_info.py`).
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor, nn

from gplan.core.host_load import HostLoad
from gplan_profiler.timing.clock import CpuClock, Samples

ThreadTimes = Mapping[str, tuple[float, float]]
"""By thread: seconds running, and seconds ready to run while waiting for a core."""

_STEAL = 7  # place of the stolen time among the figures of /proc/stat
_NUM_COUNTED = 8  # later figures, of guests, are included in earlier ones

SPEED_SHARE = 0.02
"""Of the time, that the readings of the yardstick take."""
_NUM_UNTIMED, _NUM_TIMED = 6, 2  # repetitions in a reading: after a wait a core needs 5 ms to reach its full speed
_MOST_READING_S = 0.02  # that counts: an interruption need not put off the next
_STREAMED_FLOATS = 2**24  # 64 MiB, more than the caches hold that a core shares
_WIDTH, _ROWS, _WEIGHTS, _SUMMED_FLOATS = 192, 128, 256, 2**19
_TINY = 32
_HUGE_PAGE_BYTES, _PAGE_FLOATS = 2**21, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReading:
    """What the system counted up to a moment."""

    at_s: float
    stolen: int  # in ticks of all cores
    total: int
    threads: ThreadTimes


def read_load(stat: Path = Path("/proc/stat")) -> LoadReading:
    """The counters now; zeros where the system does not report them."""
    try:
        figures = [int(x) for x in stat.read_text().splitlines()[0].split()[1 : 1 + _NUM_COUNTED]]
    except (OSError, ValueError, IndexError):
        figures = []
    stolen = figures[_STEAL] if len(figures) > _STEAL else 0
    return LoadReading(at_s=time.monotonic(), stolen=stolen, total=sum(figures), threads=thread_times())


def load_between(before: LoadReading, after: LoadReading) -> HostLoad:
    """The load between two readings of this process."""
    seconds, ticks = after.at_s - before.at_s, after.total - before.total
    waited_s = waited_for_others_s(before.threads, after.threads)
    return HostLoad(
        steal_share=min(1.0, max(0.0, (after.stolen - before.stolen) / ticks)) if ticks > 0 else 0.0,
        wait_share=min(1.0, waited_s / seconds) if seconds > 0 else 0.0,
    )


def waited_for_others_s(before: ThreadTimes, after: ThreadTimes) -> float:
    """A lower bound on the seconds that a thread of this process waited for a core used by another process.

    The time that other threads of this process ran is subtracted.
    """
    ran_s = {name: after[name][0] - before[name][0] for name in before.keys() & after.keys()}
    ready_s = {name: after[name][1] - before[name][1] for name in ran_s}
    return max([0.0, *(ready_s[name] - (sum(ran_s.values()) - ran_s[name]) for name in ran_s)])


def thread_times() -> ThreadTimes:
    """The times of this process's threads so far; empty where the system does not report them."""
    time.thread_time()  # updates the calling thread's figures
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            ran_ns, ready_ns, _ = path.read_text().split()
        except (OSError, ValueError):
            continue  # the thread has ended, or the system does not count
        found[path.parent.name] = (int(ran_ns) / 1e9, int(ready_ns) / 1e9)
    return found


class HostMeter:
    """Measures how the host is from now on; `read_if_due` is called while nothing else is timed."""

    def __init__(
        self,
        samples: Samples | None = None,
        *,
        device: str = "cpu",
        share: float = SPEED_SHARE,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`samples` get the seconds of the yardstick, which takes at most `share` of the time."""
        self._samples = Samples() if samples is None else samples
        self._share, self._now = share, now
        self._work = FixedWork() if device == "cpu" else None
        if self._work is not None:
            self._work()  # libraries choose their kernels
        self._before, self._next_s = read_load(), now()

    def read_if_due(self) -> None:
        """Time the yardstick, unless the last reading was so short a time ago that it took more than its share of it."""
        start_s = self._now()
        if self._work is None or start_s < self._next_s:
            return
        self._work.touch()
        _repeat(self._work, _NUM_UNTIMED)
        CpuClock().time(self._samples, _repeat, self._work, _NUM_TIMED)
        end_s = self._now()
        self._next_s = end_s + min(end_s - start_s, _MOST_READING_S) / self._share

    def load(self) -> HostLoad:
        """How the host was until now."""
        found = self._samples.mean_timing()
        yardstick = found.times(1 / _NUM_TIMED) if self._samples.clean_s else None
        return replace(load_between(self._before, read_load()), yardstick=yardstick)


def _repeat(work: Callable[[], object], number: int) -> None:
    for _ in range(number):
        work()


class FixedWork:
    """Two products, sums of memory, and a forward and backward of a tiny model; without random numbers.

    One product has matrices that stay in a core's caches, the other has weights that come from memory, as those of a large
    model do. Everything is computed in memory of its own with fixed distances, so that it is as fast in every process.
    """

    def __init__(self) -> None:
        sizes = [_WIDTH**2, _WIDTH**2, _STREAMED_FLOATS, _PAGE_FLOATS // 2, _SUMMED_FLOATS, 1]
        ones = _ones_in_huge_pages(sum(sizes))
        left, product, streamed, _, self._total, self._small = ones.split(sizes)  # type: ignore[no-untyped-call]
        self._left, self._product = (x.view(_WIDTH, _WIDTH) for x in (left, product))
        weights, summed = streamed.split(_STREAMED_FLOATS // 2)
        self._rows, self._outputs = (x[: _ROWS * _WEIGHTS].view(_ROWS, _WEIGHTS) for x in (left, product))
        self._next_weights = cycle(weights.unflatten(0, (-1, _WEIGHTS, _WEIGHTS)).unbind())
        self._next_summed = cycle(summed.view(-1, _SUMMED_FLOATS).unbind())
        self._pages = streamed.view(-1, _PAGE_FLOATS)[:, 0]
        with torch.device("meta"):
            self._tiny = nn.Sequential(nn.Linear(_TINY, _TINY), nn.LayerNorm(_TINY), nn.GELU(), nn.Linear(_TINY, _TINY))
        self._tiny.to_empty(device="cpu").float()
        self._samples = torch.linspace(-1.0, 1.0, 8 * _TINY, dtype=torch.float32, device="cpu").view(8, _TINY)
        with torch.no_grad():
            for parameter in self._tiny.parameters():
                parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).view(parameter.shape))

    def touch(self) -> None:
        """Touch every page: the host of a virtual machine takes a while to bring back pages that were not used."""
        torch.sum(self._pages, dim=0, out=self._small.view(()))

    def __call__(self) -> None:
        """Do all of it once."""
        torch.mm(self._left, self._left, out=self._product)
        torch.mm(self._rows, next(self._next_weights), out=self._outputs)
        self._total.add_(next(self._next_summed))
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            torch.autograd.grad(self._tiny(self._samples).sum(), list(self._tiny.parameters()))


def _ones_in_huge_pages(number: int) -> Tensor:
    """Ones on the CPU, in huge pages where the system has them.

    In small pages reading takes 1.4 to 2.8 times as long, depending on where the pages lie.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.ones(number, dtype=torch.float32)
    space = mmap.mmap(-1, 4 * number + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages
        space.madvise(mmap.MADV_HUGEPAGE)
    floats = torch.frombuffer(space, dtype=torch.float32)
    first = -floats.data_ptr() % _HUGE_PAGE_BYTES // 4
    return floats[first : first + number].fill_(1.0)
