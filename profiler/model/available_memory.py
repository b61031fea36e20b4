"""How much memory this process can still take: the least that any limit leaves.

The limits are the process's own (RLIMIT_AS and RLIMIT_DATA, what `ulimit -v` and `ulimit -d` set), those of the control
groups it is in (containers, schedulers; versions 1 and 2), and the host's memory that is free or can be freed. Where
the system tells none of them, memory is taken for unlimited. A CUDA device has the memory that its driver calls free.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from gplan.core.errors import ModelError

_STATUS = Path("/proc/self/status")
_HOST = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_GROUP_FILES = (  # folder, limit, usage, and what of the usage the kernel gives back when it is needed
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(device: str = "cpu") -> int:
    """Bytes that this process can still take on a device."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    host = _table(_HOST).get("MemAvailable", sys.maxsize)
    return max(0, min(host, *_left_by_process_limits(), *_left_by_groups()))


def _left_by_process_limits() -> Iterator[int]:
    mapped = _table(_STATUS)
    for limit, usage in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft_limit, _ = resource.getrlimit(limit)
        if soft_limit != resource.RLIM_INFINITY:
            yield soft_limit - mapped.get(usage, 0)
    yield sys.maxsize


def _left_by_groups() -> Iterator[int]:
    for folder, limit_file, usage_file, reclaimable in _GROUP_FILES:
        for group in _group_folders(folder):
            limit, usage = _number(group / limit_file), _number(group / usage_file)
            if limit is not None and usage is not None:
                yield limit - usage + _table(group / "memory.stat").get(reclaimable, 0)


def _group_folders(folder: str) -> list[Path]:
    """The process's group and those around it; a container may see its own as the outermost."""
    own = [line.split(":", 2) for line in _lines(_MEMBERSHIP)]
    paths = [Path(path.lstrip("/")) for _, controllers, path in own if folder in controllers.split(",")]
    root = _GROUPS / folder
    return [root / x for path in paths for x in (path, *path.parents) if (root / x).is_dir()]


def _table(file: Path) -> dict[str, int]:
    """Names and numbers of a file of the kernel's, in bytes: `MemAvailable: 8 kB`, `inactive_file 8192`."""
    rows = [line.replace(":", " ").split() for line in _lines(file)]
    return {
        row[0]: int(row[1]) * (1024 if row[2:] == ["kB"] else 1) for row in rows if len(row) > 1 and row[1].isdigit()
    }


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is torch's or Python's word for memory that is not there, or arose from one."""
    if isinstance(error, ModelError):
        return is_out_of_memory(error.__cause__)
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(x in str(error).lower() for x in words)
