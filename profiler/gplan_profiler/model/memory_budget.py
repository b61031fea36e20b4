"""Whether measuring a model in one piece fits in memory.

Needed are the weights, their gradients and the larger of the activations of one step and the optimizer's copies of some
parameters; a reserve covers temporary memory. Available is the least that any limit leaves: the process's (RLIMIT_AS,
RLIMIT_DATA), those of its control groups (containers, schedulers; versions 1 and 2), and the host's free and
reclaimable memory. On a CUDA device it is the free memory by the driver.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gplan.core.errors import ModelError
from gplan.core.units import bytes_text
from gplan_profiler.backward.rematerialize import noting_saves
from gplan_profiler.capture.authored_layers import caches_empty
from gplan_profiler.capture.chain import model_state_restored
from gplan_profiler.memory.allocations import gradient_bytes, storage_bytes, storage_key
from gplan_profiler.model.data import sample_batch
from gplan_profiler.model.lazy_build import fake_mode_of
from gplan_profiler.model.load import ModelFile
from gplan_profiler.timing.optimizer_step import MOST_COPIED_BYTES
from gplan_profiler.torch_compat import pytree

_STATUS = Path("/proc/self/status")
_HOST = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_GROUP_FILES = (  # folder, limit, usage, and the reclaimable part of the usage
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(device: str = "cpu") -> int:
    """Bytes that this process can still allocate on a device; sys.maxsize if the system reports no limit."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    host = _table(_HOST).get("MemAvailable", sys.maxsize)
    return max(0, min([host, *_left_by_limits()]))


def check_layer_fits(name: str, weight_bytes: int, device: str) -> None:
    """Raise ModelError for a layer whose weights and gradients alone are more than a device has left."""
    needed, left = 2 * weight_bytes, available_bytes(device)
    if needed > left:
        raise ModelError(
            f"layer {name} needs {bytes_text(needed)} for its weights and gradients, and {device} has {bytes_text(left)} left; "
            "profile on a device with more memory, or divide the layer with --granularity op"
        )


def _left_by_limits() -> Iterator[int]:
    """What the limits of the process, its control groups and their ancestors leave, as far as a container shows them."""
    mapped = _table(_STATUS)
    for kind, of in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft_limit, _ = resource.getrlimit(kind)
        if soft_limit != resource.RLIM_INFINITY:
            yield soft_limit - mapped.get(of, 0)
    groups = [line.split(":", 2) for line in _lines(_MEMBERSHIP)]
    for folder, limit_file, usage_file, reclaimable in _GROUP_FILES:
        own = [Path(path.lstrip("/")) for _, controllers, path in groups if folder in controllers.split(",")]
        for place in (_GROUPS / folder / x for path in own for x in (path, *path.parents)):
            limit, usage = _number(place / limit_file), _number(place / usage_file)
            if limit is not None and usage is not None:
                yield limit - usage + _table(place / "memory.stat").get(reclaimable, 0)


def _table(file: Path) -> dict[str, int]:
    """Names and numbers, in bytes, in a file of the kernel: `MemAvailable: 8 kB`, `inactive_file 8192`."""
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


_OPTIMIZER_COPIES = 5  # of each: the parameter, its gradient, two moments, and a temporary of the step
_RESERVE = 1.15


def headroom(file: ModelFile, *, batch_size: int, device: str = "cpu", num_copies: int = 1) -> tuple[int, int]:
    """The bytes that are needed to measure a lazy file's model in one piece, and those available on device and host.

    `num_copies` is the number of processes that measure at once, each with its own weights.
    """
    available = min(available_bytes(), available_bytes(device))
    weights = weight_bytes(file)
    trained = sum(map(gradient_bytes, file.model.parameters()))
    least = weights + trained + _OPTIMIZER_COPIES * min(trained, MOST_COPIED_BYTES)
    most = max(least, weights + trained + saved_bytes(file, batch_size)) if least <= available else least
    return int(_RESERVE * num_copies * most), available


def weight_bytes(file: ModelFile) -> int:
    """Bytes of the model's parameters and buffers, shared ones once, real or fake."""
    return storage_bytes([*file.model.parameters(), *file.model.buffers()])


def saved_bytes(file: ModelFile, batch_size: int) -> int:
    """Bytes that a lazy file's model saves for its backward pass, without weights, by a run on fake tensors.

    0 for a model that cannot run on fake tensors.
    """
    mode = fake_mode_of(file.model)
    if mode is None:
        return 0
    own = {storage_key(x) for x in (*file.model.parameters(), *file.model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> None:
        kept[storage_key(tensor)] = tensor

    with model_state_restored(file.model), caches_empty(file.model):
        try:
            inputs = sample_batch(file, batch_size)[0]
            with mode:
                noting_saves(file.forward, keep)(pytree.tree_map_only(Tensor, mode.from_tensor, inputs))
        except Exception:  # control flow depends on values, or the inputs are wrong, which the measurement reports
            return 0
    return storage_bytes(x for key, x in kept.items() if key not in own)
