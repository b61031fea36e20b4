"""Contenders that take turns: each lives in processes of its own and stands still while another takes a step.

    round 1   A B C D
    round 2   B A D C      the first one and the direction change, so that drift and what the step before left behind
    round 3   C D A B      hit all alike

A step lasts from the moment its first process has the mini-batch to the moment its last one has trained on it. Memory
is the growth of the resident set of the process(es) from the moment all is built to its highest point in any step,
added up: gradients, activations, buffers, and whatever libraries set up at the first step. The same for all, read from
Linux, which counts it to some hundred KiB.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beside.contenders import Contender, Cuts, trained
from beside.models import SUBJECTS
from profiler.host.host_info import core_shares, keep_freed_memory

NUM_WARM_UP = 3
NUM_CORES = 2  # of each contender
_START_S = 180.0
_STEP_S = 60.0
_REST_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contender with what it needs to start."""

    contender: Contender
    plan_file: str
    cuts: Cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of one contender: every step after the warm-up, the losses of all, and how much each process grew."""

    step_s: tuple[float, ...]
    losses: tuple[float, ...]
    growth_bytes: tuple[int, ...]


def take_turns(subject: str, entries: Sequence[Entry], *, num_steps: int) -> list[Measured]:
    """Train all entries for some steps and the warm-up, a step of each in turn; one result for each."""
    with _started(subject, entries) as teams:
        for team in teams:
            for one in team:
                _told(one, _START_S)
        steps: list[list[tuple[float, float | None]]] = [[] for _ in teams]
        for turn in range(NUM_WARM_UP + num_steps):
            for index in order_of(turn, len(teams)):
                steps[index].append(_step(teams[index]))
        growths = [tuple(int(_asked(one, None)) for one in team) for team in teams]
    return [
        Measured(
            step_s=tuple(seconds for seconds, _ in found[NUM_WARM_UP:]),
            losses=tuple(x for _, x in found if x is not None),
            growth_bytes=growth,
        )
        for found, growth in zip(steps, growths, strict=True)
    ]


def order_of(turn: int, num_teams: int) -> list[int]:
    """Who is when in a round.

    >>> [order_of(turn, 4) for turn in range(3)]
    [[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1]]
    """
    step = -1 if turn % 2 else 1
    return [(turn + step * place) % num_teams for place in range(num_teams)]


def _step(team: Sequence[Connection]) -> tuple[float, float | None]:
    """Seconds and loss of one step, taken by all processes of a contender."""
    time.sleep(_REST_S)  # threads of the one before stop spinning
    for one in team:
        one.send("step")
    told = [_told(one, _STEP_S) for one in team]
    begins, ends, losses = zip(*told, strict=True)
    return max(ends) - min(begins), losses[-1]


def _asked(one: Connection, message: object) -> Any:
    one.send(message)
    return _told(one, _STEP_S)


def _told(one: Connection, timeout_s: float) -> Any:
    if not one.poll(timeout_s):
        raise TimeoutError(f"a process said nothing for {timeout_s:.0f} s; expected a step")
    return one.recv()


@contextmanager
def _started(subject: str, entries: Sequence[Entry]) -> Iterator[list[list[Connection]]]:
    """The ends of the pipes to all processes, by contender and rank; afterwards the processes are gone."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.pipelining", "gplan.runtime.pipeline"])
    teams, processes = [], []
    try:
        for entry in entries:
            port, team = _free_port(), []
            for rank in range(entry.contender.num_processes):
                here, there = context.Pipe()
                process = context.Process(target=work, args=(there, rank, port, subject, entry), daemon=True)
                process.start()
                there.close()
                team.append(here)
                processes.append(process)
            teams.append(team)
        yield teams
    finally:
        for one in (x for team in teams for x in team):
            one.close()
        for process in processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()


def _free_port() -> int:
    with socket.socket() as some:
        some.bind(("localhost", 0))
        return int(some.getsockname()[1])


def work(told: Connection, rank: int, port: int, subject: str, entry: Entry) -> None:
    """One process of a contender: trains a step whenever it is told to, and at last tells how much it grew."""
    contender = entry.contender
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(contender.num_processes)}
    torch.set_num_threads(contender.num_threads)
    keep_freed_memory()
    os.sched_setaffinity(
        0, core_shares(contender.num_processes, num_threads=NUM_CORES // contender.num_processes)[rank]
    )
    turns = Turns(told, SUBJECTS[subject].sample())
    for value in trained(contender, subject, turns, plan_file=entry.plan_file, cuts=entry.cuts):
        end_s = time.perf_counter()
        told.send((turns.begin_s, end_s, None if value is None else float(value.detach())))
    told.send(resident_bytes("VmHWM") - turns.before_bytes)


class Turns:
    """The same mini-batch again and again, each time when it is this process's turn."""

    def __init__(self, told: Connection, batch: tuple[Tensor, Tensor]) -> None:
        self._told, self._batch = told, batch
        self.begin_s = 0.0
        self.before_bytes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Everything is built when the first is asked for: from there on growth is counted."""
        self.before_bytes = settled_bytes()
        self._told.send("ready")
        while self._told.recv() is not None:
            self.begin_s = time.perf_counter()
            yield self._batch


def settled_bytes() -> int:
    """What is resident after everything free was given back to the system; the highest point is counted anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # 5: reset the peak, proc(5)
    return resident_bytes("VmRSS")


def resident_bytes(field: str) -> int:
    """VmRSS, what is resident now, or VmHWM, the most that was."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}; expected Linux")
