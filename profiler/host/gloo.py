"""Gloo's threads, which bring messages in and out while a process computes.

A message's arrival wakes the thread of its connections, on a process with one core that core, and perhaps in the middle
of a send that holds the connection's lock. The thread then asks for the lock over and over, and the send goes on when
the scheduler's next tick, 4 ms later on many hosts, gives the core back. Batch threads never interrupt others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def connection_threads() -> Iterator[int]:
    """The threads of this process that wait for its connections; none where there is no /proc."""
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            if name.read_text().startswith("gloo_"):
                yield int(name.parent.name)


def let_work_go_on() -> None:
    """Let gloo's threads, as far as they exist, wait until the work pauses or has had its slice of time."""
    for thread in connection_threads():
        with suppress(OSError):  # the thread has ended, or the system does not let it be told
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
