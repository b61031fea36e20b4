"""Runs a function on several ranks in processes forked from the test's."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(num_ranks: int, job: Callable[[int], Any], *, timeout_s: float = 60.0) -> list[Any]:
    """Return `job(rank)` of `num_ranks` processes of one gloo group; raises the first error."""
    with tempfile.TemporaryDirectory(prefix="gplan-ranks-") as place:
        children = [_forked(rank, num_ranks, job, Path(place), timeout_s) for rank in range(num_ranks)]
        try:
            for child in children:
                os.waitpid(child, 0)
        except BaseException:
            for child in children:
                os.kill(child, signal.SIGKILL)
            raise
        found = [torch.load(Path(place) / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]
    failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(found) if text]
    if failures:
        raise AssertionError("\n".join(failures))
    return [value for _, value in found]


def _forked(rank: int, num_ranks: int, job: Callable[[int], Any], place: Path, timeout_s: float) -> int:
    child = os.fork()
    if child:
        return child
    try:
        _write(place / f"{rank}.pt", _outcome(rank, num_ranks, job, place, timeout_s))
    finally:
        os._exit(0)  # not the test runner's own clean-up


def _outcome(rank: int, num_ranks: int, job: Callable[[int], Any], place: Path, timeout_s: float) -> tuple[str, Any]:
    torch.set_num_threads(1)  # threads of the parent are not there after a fork
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place / 'store'}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        return "", job(rank)
    except BaseException:
        return traceback.format_exc(), None


def _write(path: Path, value: object) -> None:
    torch.save(value, path)
