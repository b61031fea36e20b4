"""This host: its processor, cores, GPUs and software versions, and the settings of a process that is measured.

On a CPU, a pipeline device is a set of threads, pinned to as many cores. The C library keeps freed memory, and Python's
garbage collector is frozen while actions are timed. GPU settings are read, never changed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from gplan.core.units import bytes_text

_FIELDS = (
    ("name", "name"),
    ("driver", "driver_version"),
    ("SM clock", "clocks.sm"),
    ("memory clock", "clocks.mem"),
    ("power limit", "power.limit"),
    ("temperature, degrees C", "temperature.gpu"),
)
_GPUS = Path("/proc/driver/nvidia/gpus")  # of the driver
_LONGEST_S = 10.0


def gpu_state() -> tuple[tuple[str, str], ...]:
    """Clocks, power limit and temperature of each GPU by nvidia-smi, as (name, value); empty where that fails."""
    query = ",".join(field for _, field in _FIELDS)
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpu_state(done.stdout)


def parse_gpu_state(text: str) -> tuple[tuple[str, str], ...]:
    """The values in nvidia-smi's output, one line per GPU; unsupported fields are left out.

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
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of glibc's mallopt
_NEVER = -1
_USUAL_MMAP_MAX = 65536
_RETURNED_FROM_BYTES = 2**20


def software_versions() -> tuple[tuple[str, str], ...]:
    """The versions that affect a measurement."""
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


def clock_id() -> str:
    """What processes have in common that read the same `time.perf_counter`: the start of the system, else the host."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


def cuda_problem() -> str | None:
    """Why torch can use no CUDA device here, with what to do; None where it can."""
    build = f"torch {torch.__version__}"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"{build} is a build for CPUs; install one for CUDA"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available() and torch.cuda.device_count():
            return None
    if any("too old" in str(x.message) for x in caught):
        return (
            f"the NVIDIA driver is older than {build} needs, which is built for CUDA {torch.version.cuda}; update the driver, or "
            "install a torch that is built for an older CUDA"
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden} leaves {build} no GPU; unset it, or name GPUs of this host"
    return f"{build} sees no GPU here; see whether `nvidia-smi` lists one"


def gpu_memory(device: str) -> tuple[int, tuple[str, ...]]:
    """The bytes of a GPU that torch's allocator can have, and notes on what takes the rest, and on a MIG slice."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    outside_bytes = max(0, total_bytes - free_bytes - torch.cuda.memory_reserved(device))
    notes = [
        f"{bytes_text(outside_bytes)} of the GPU's {bytes_text(total_bytes)} are taken outside torch's allocator (CUDA's context, "
        "libraries, other processes): a stage may have the rest"
    ]
    name = torch.cuda.get_device_name(device)
    if "MIG" in name:
        notes.append(
            f"{name} is a MIG slice: these times hold for slices of this size only, and NCCL does not connect slices of one GPU, "
            "so run stages on slices of different GPUs, or all in one process (`gplan run --engine virtual`)"
        )
    return total_bytes - outside_bytes, tuple(notes)


def default_device() -> str:
    """The device of "auto": CUDA where torch can use it."""
    return "cpu" if cuda_problem() is not None else "cuda"


def unused_gpu_notes() -> tuple[str, ...]:
    """A note for work on cores where this host has GPUs, also such as torch cannot use."""
    problem = cuda_problem()
    if problem is None:
        count = torch.cuda.device_count()
        return (
            f"this host has {count} GPU{'s' * (count > 1)} that this does not use; `gplan profile --device cuda` does",
        )
    return (f"this host has an NVIDIA GPU that torch cannot use: {problem}",) if _GPUS.is_dir() else ()


def usable_cores() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def max_neighbours(num_threads: int) -> int:
    """The number of further devices of `num_threads` cores that can compute beside one on this host."""
    if sys.platform != "linux":  # neighbours are forks that are stopped and pinned
        return 0
    return max(0, min(MOST_NEIGHBOURS, len(usable_cores()) // num_threads - 1))


@contextmanager
def garbage_collector_frozen() -> Iterator[None]:
    """Inside, Python's garbage collector skips all objects that exist at entry.

    A full collection visits every object of torch, the traced model and its graphs, which takes about 0.1 s in the
    middle of an action. Recompute creates enough objects for one collection in every second step.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def page_faults() -> int:
    """Return how many pages of 4 KiB the system gave to this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def keep_freed_memory() -> None:
    """Let the C library keep freed memory instead of returning it to the system, for the life of this process.

    Returned pages fault when they are used again. This made the update of a 134 million parameter model 1.7 times as
    long, and more in the middle of other work: its temporary tensors are as large as the vocabulary's table, and glibc
    maps blocks of 32 MiB and more anew each time unless it may not map blocks at all. No effect without mallopt.
    """
    _mallopt(_M_TRIM_THRESHOLD, _NEVER)
    _mallopt(_M_MMAP_MAX, 0)


def return_large_blocks() -> None:
    """Let the C library return freed blocks of 1 MiB and more to the system, for the life of this process.

    For hosts with little memory: glibc before 2.38 does not always reuse aligned blocks, so that the process can take
    twice the memory of its tensors. The page faults cost time.
    """
    _mallopt(_M_MMAP_MAX, _USUAL_MMAP_MAX)
    _mallopt(_M_MMAP_THRESHOLD, _RETURNED_FROM_BYTES)


@contextmanager
def large_blocks_returned() -> Iterator[None]:
    """Inside, freed blocks of 1 MiB and more return to the system; afterwards freed memory is kept.

    This prevents fragmentation where large temporary tensors alternate with small ones that stay.
    """
    return_large_blocks()
    try:
        yield
    finally:
        keep_freed_memory()


def _mallopt(option: int, value: int) -> None:
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(option, value)


@contextmanager
def device_share(num_threads: int) -> Iterator[None]:
    """Inside, this process has `num_threads` torch threads, pinned to as many cores."""
    before, cores = torch.get_num_threads(), usable_cores()
    pin_to_share(0, num_shares=1, num_threads=num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _pin_to_cores(cores)


def pin_to_share(index: int, *, num_shares: int, num_threads: int) -> None:
    """Pin this process to its share of the cores, with as many torch threads; it keeps freed memory from now on."""
    torch.set_num_threads(num_threads)
    keep_freed_memory()
    _pin_to_cores(core_shares(num_shares, num_threads=num_threads)[index])


def _pin_to_cores(cores: Iterable[int]) -> None:
    if hasattr(os, "sched_setaffinity"):  # not on macOS
        os.sched_setaffinity(0, cores)


def core_shares(num_shares: int, *, num_threads: int) -> list[set[int]]:
    """Disjoint sets of `num_threads` cores each; they overlap only if there are too few cores."""
    cores = usable_cores()
    starts = [share * num_threads for share in range(num_shares)]
    return [{cores[(start + i) % len(cores)] for i in range(num_threads)} for start in starts]
