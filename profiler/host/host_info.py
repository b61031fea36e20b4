"""This host: its processor, the versions of what measures, and the share of it that one pipeline device has."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

# What state the host's GPUs are in: clocks, power limit and temperature, as nvidia-smi tells them.
#
# Only read: no setting is changed. A GPU that is warm or held to a lower power runs slower, so a measurement notes this.


_FIELDS = (
    ("name", "name"),
    ("driver", "driver_version"),
    ("SM clock", "clocks.sm"),
    ("memory clock", "clocks.mem"),
    ("power limit", "power.limit"),
    ("temperature, degrees C", "temperature.gpu"),
)
_LONGEST_S = 10.0


def gpu_state() -> tuple[tuple[str, str], ...]:
    """What each GPU of the host is and how it stands, as name and value;
    empty where nvidia-smi is not there or fails."""
    query = ",".join(field for _, field in _FIELDS)
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpu_state(done.stdout)


def parse_gpu_state(text: str) -> tuple[tuple[str, str], ...]:
    """The values of nvidia-smi's lines, one line a GPU; what a GPU does not tell is left out.

    >>> parse_gpu_state("NVIDIA T4, 550.54, 1590 MHz, 5000 MHz, 70.00 W, 34")[2:5]
    (('SM clock', '1590 MHz'), ('memory clock', '5000 MHz'), ('power limit', '70.00 W'))
    """
    lines = [line for line in text.splitlines() if line.count(",") == len(_FIELDS) - 1]
    found = []
    for index, line in enumerate(lines):
        prefix = f"GPU {index} " if len(lines) > 1 else ""
        values = (value.strip() for value in line.split(","))
        pairs = zip(_FIELDS, values, strict=True)
        found += [(prefix + name, value) for (name, _), value in pairs if value and not value.startswith("[")]
    return tuple(found)


MOST_NEIGHBOURS = 7
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_KEPT_BELOW_BYTES = 32 * 2**20
_GIVEN_BACK_FROM_BYTES = 2**20


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


def num_usable_cores() -> int:
    """The cores that this process may run on, which can be fewer than the host has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def max_neighbours(num_threads: int) -> int:
    """How many devices of `num_threads` cores this host has beside one, as far as they can be put to work."""
    if sys.platform != "linux":  # forks that can be held and pinned
        return 0
    return max(0, min(MOST_NEIGHBOURS, num_usable_cores() // num_threads - 1))


@contextmanager
def garbage_collector_frozen() -> Iterator[None]:
    """Inside, Python's garbage collector looks only at objects that are made inside.

    A full collection goes through all that torch, the traced model and its graphs consist of, which takes a tenth of a
    second, in the middle of whatever action it meets; recomputing makes objects enough for one in every other step.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def keep_freed_memory() -> None:
    """Let the C library keep what is freed instead of giving it back to the system, for the life of this process.

    Where it gives memory back, the next step's first touch of every page faults, or not, as the blocks happen to lie:
    forward passes then differ by a tenth and more from one process to the next. Blocks of 32 MiB and more are always
    given back. Does nothing where the C library has no mallopt.
    """
    _mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    _mallopt(_M_MMAP_THRESHOLD, _KEPT_BELOW_BYTES)


def return_large_blocks() -> None:
    """Let the C library give blocks of 1 MiB and more back as soon as they are freed, for the life of this process.

    For where memory is scarce: kept blocks are not always found fit for the next tensor of their size (glibc before
    2.38 leaves aligned ones), and the process can come to take twice what its tensors do. Faulting pages in takes time.
    """
    _mallopt(_M_MMAP_THRESHOLD, _GIVEN_BACK_FROM_BYTES)


@contextmanager
def large_blocks_returned() -> Iterator[None]:
    """Within it the C library gives blocks of 1 MiB and more back as soon as they are freed.

    Where large tensors come and go between small ones that stay, the gaps they leave would soon fit none of them, and
    the process would grow with each. Afterwards only blocks of 32 MiB and more are given back.
    """
    _mallopt(_M_MMAP_THRESHOLD, _GIVEN_BACK_FROM_BYTES)
    try:
        yield
    finally:
        _mallopt(_M_MMAP_THRESHOLD, _KEPT_BELOW_BYTES)


def _mallopt(option: int, value: int) -> None:
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(option, value)


@contextmanager
def device_share(num_threads: int) -> Iterator[None]:
    """One device's share of the host: that many threads, pinned to as many cores."""
    before = torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    torch.set_num_threads(num_threads)
    keep_freed_memory()
    try:
        if cores is not None:
            os.sched_setaffinity(0, core_shares(1, num_threads=num_threads)[0])
        yield
    finally:
        torch.set_num_threads(before)
        if cores is not None:
            os.sched_setaffinity(0, cores)


def core_shares(num_shares: int, *, num_threads: int) -> list[set[int]]:
    """Disjoint shares of the host's cores, `num_threads` each; they overlap only if there are too few cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    starts = [share * num_threads for share in range(num_shares)]
    return [{cores[(start + i) % len(cores)] for i in range(num_threads)} for start in starts]
