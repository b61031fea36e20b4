"""This host: its processor, the versions of what measures, and the share of it that one pipeline device has."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from profiler.processes import core_shares

MOST_NEIGHBOURS = 7


def software_versions() -> tuple[tuple[str, str], ...]:
    """The versions that a measurement depends on."""
    return (
        ("torch", str(torch.__version__)),
        ("python", platform.python_version()),
        ("system", f"{platform.system()} {platform.machine()}"),
    )


def processor() -> str:
    """The name of this host's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def room_beside(num_threads: int) -> int:
    """How many devices of `num_threads` cores this host has beside one, as far as they can be put to work."""
    if sys.platform != "linux":  # forks that can be held and pinned
        return 0
    return max(0, min(MOST_NEIGHBOURS, len(os.sched_getaffinity(0)) // num_threads - 1))


@contextmanager
def device_share(num_threads: int) -> Iterator[None]:
    """One device's share of the host: that many threads, pinned to as many cores."""
    before = torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    torch.set_num_threads(num_threads)
    try:
        if cores is not None:
            os.sched_setaffinity(0, core_shares(1, num_threads=num_threads)[0])
        yield
    finally:
        torch.set_num_threads(before)
        if cores is not None:
            os.sched_setaffinity(0, cores)
