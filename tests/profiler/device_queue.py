"""A device on a CPU: a thread that runs kernels in order behind a queue of bounded length, on clocks of its own.

Nothing is slept or measured: each kernel has the seconds that it is given, so all times are exact. A host that launches into a
full queue, or synchronizes, really waits for the thread, and its clock goes on to the moment at which the device had come there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from gplan_profiler.timing.clock import CudaQueue


class Mark:
    """An event in the queue."""

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue, self.reached, self.at_s = queue, threading.Event(), 0.0

    def query(self) -> bool:
        self.reached.wait()
        return self.at_s <= self._queue.host_s

    def elapsed_time(self, end_event: Mark, /) -> float:
        return 1e3 * (end_event.at_s - self.at_s)


class DeviceQueue(CudaQueue):
    """The queue, its device and the clock of its host."""

    def __init__(self, depth: int = 1000) -> None:
        self.host_s = self.device_s = 0.0
        self.order: list[str] = []  # what began, by either
        self._waits = list[str]()
        self._depth, self._marks = depth, list[Mark]()
        self._work: SimpleQueue[tuple[str, float, float, Mark]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            name, launched_s, seconds, mark = self._work.get()
            self.device_s = mark.at_s = max(self.device_s, launched_s) + seconds
            if name:
                self.order.append(f"device {name}")
            mark.reached.set()

    def launch(self, *, host_s: float, device_s: float, name: str = "") -> Mark:
        """Enqueue a kernel; its launch takes the host so long."""
        if name:
            self.order.append(f"host {name}")
        self.host_s += host_s
        if len(self._marks) >= self._depth:
            self._wait_for(self._marks[-self._depth])
        mark = Mark(self)
        self._marks.append(mark)
        self._work.put((name, self.host_s, device_s, mark))
        return mark

    def _wait_for(self, mark: Mark) -> None:
        mark.reached.wait()
        self.host_s = max(self.host_s, mark.at_s)

    def item(self) -> None:
        """The host waits for a value."""
        self._waits.append("called a synchronizing CUDA operation")
        self.synchronize()

    def now_s(self) -> float:
        return self.host_s

    def record(self) -> Any:
        return self.launch(host_s=0.0, device_s=0.0)

    def spin(self, seconds: float) -> None:
        self.launch(host_s=0.0, device_s=seconds)

    def synchronize(self) -> None:
        if self._marks:
            self._wait_for(self._marks[-1])

    @contextmanager
    def synchronizations(self) -> Iterator[list[str]]:
        self._waits = found = list[str]()
        yield found


QUEUE: list[ref[DeviceQueue]] = []
"""The current one. Like a GPU's, it is no state of the model that gplan can see: what a reference leads to is not."""


class _Launches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Kernels) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        layer.launch(1, waits=layer.forward_waits)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.layer.launch(2, waits=ctx.layer.backward_waits)
        return gradients[0] * weight, (gradients[0] * x).sum(0), None


class Kernels(nn.Module):
    """A layer of kernels, whose backward has twice as many; its host may wait for the device at the end."""

    def __init__(
        self,
        num_kernels: int,
        host_s: float,
        device_s: float,
        *,
        forward_waits: bool = False,
        backward_waits: bool = False,
    ) -> None:
        super().__init__()
        self.num_kernels, self.host_s, self.device_s = num_kernels, host_s, device_s
        self.forward_waits, self.backward_waits = forward_waits, backward_waits
        self.weight = nn.Parameter(torch.ones(4))

    def launch(self, times: int, *, waits: bool) -> None:
        queue = QUEUE[0]()
        assert queue is not None
        for _ in range(times * self.num_kernels):
            queue.launch(host_s=self.host_s, device_s=self.device_s)
        if waits:
            queue.item()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Launches.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return found
