"""Evidence of other work on this host: /proc/stat for stolen time, /proc/self/task for threads that waited for a core."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gplan.core.host_load import HostLoad

ThreadTimes = Mapping[str, tuple[float, float]]
"""By thread: seconds running, and seconds ready to run while waiting for a core."""

_STEAL = 7  # place of the stolen time among the figures of /proc/stat
_NUM_COUNTED = 8  # later figures, of guests, are included in earlier ones


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
