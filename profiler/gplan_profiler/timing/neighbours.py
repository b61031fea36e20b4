"""Processes that do the same work on the host's other cores, to measure how much longer it takes beside them.

Each neighbour is a fork of this process with its own weights and cores. It does the work once, so that it has its own
copy of every page that the work writes. Then it is stopped (SIGSTOP). Inside `running` it repeats the work. It has one
thread, as a fork would wait forever for OpenMP threads that only its parent has. Linux only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from gplan_profiler.host.processes import signal_at_parents_end
from gplan_profiler.timing.clock import Samples

BESIDE_OTHERS = " beside others"
"""Suffix of the names of samples while the neighbours compute."""
NEIGHBOUR_FAILED = "a neighbour process failed: the measured slow-down is too low"
_STUCK_S = 10.0  # without computing, before the first stop
_POLL_S = 0.005
_LEAD_S = 0.1
"""Cores of a virtual machine that wake up may share one of the host at first, and are 1.6 times slower then."""


class Neighbours:
    """Processes that are stopped and continued by signals."""

    def __init__(self, process_ids: Iterable[int]) -> None:
        self._process_ids = tuple(process_ids)
        for process_id in self._process_ids:
            _wait_until_ready(process_id)

    @property
    def are_alive(self) -> bool:
        """Whether none of them failed."""
        try:  # without reaping: their ids stay reserved, so that no other process receives the signals
            return not any(os.waitid(os.P_PID, x, os.WEXITED | os.WNOHANG | os.WNOWAIT) for x in self._process_ids)
        except ChildProcessError:
            return False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the processes compute, as does this one for `_LEAD_S` before."""
        self._send(signal.SIGCONT)
        try:
            if self._process_ids:
                end_s = time.monotonic() + _LEAD_S
                while time.monotonic() < end_s:
                    pass
            yield
        finally:
            self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        for process_id in self._process_ids:
            os.kill(process_id, number)


def slow_down(pairs: Sequence[tuple[Samples, Samples]]) -> float:
    """The total time beside neighbours over the total time alone, by pairs (alone, beside); 1 if not measured."""
    alone_s, beside_s = (sum(x.timing().median_s for x in samples) for samples in zip(*pairs, strict=True))
    return max(1.0, beside_s / alone_s) if alone_s and beside_s else 1.0


@contextmanager
def neighbours(
    shares: Sequence[set[int]], work: Callable[[], object], parameters: Sequence[nn.Parameter]
) -> Iterator[Neighbours]:
    """One stopped process for each set of cores, which has done `work` once on copies of the parameters' values."""
    process_ids: list[int] = []
    try:
        for cores in shares:
            process_ids.append(_fork(work, parameters, cores))
        yield Neighbours(process_ids)
    finally:
        for process_id in process_ids:
            os.kill(process_id, signal.SIGKILL)
            os.waitpid(process_id, 0)


def _fork(work: Callable[[], object], parameters: Sequence[nn.Parameter], cores: set[int]) -> int:
    parent = os.getpid()
    process_id = os.fork()
    if process_id:
        return process_id
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal_at_parents_end(signal.SIGKILL)
        if os.getppid() == parent:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(1)
            with torch.no_grad():
                for parameter in parameters:
                    parameter.data = parameter.data.clone()
            work()
            os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                work()
    finally:
        os._exit(1)


def _wait_until_ready(process_id: int) -> None:
    """Wait until a process has stopped itself, ready to work, or has failed; one that computes no more is killed."""
    ticks, changed_s = -1, time.monotonic()
    while os.waitid(os.P_PID, process_id, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        if (now := int(fields[11]) + int(fields[12])) != ticks:  # utime and stime
            ticks, changed_s = now, time.monotonic()
        elif time.monotonic() - changed_s > _STUCK_S:
            os.kill(process_id, signal.SIGKILL)
        time.sleep(_POLL_S)
