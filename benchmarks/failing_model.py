"""A model that fails when it is told to, for benchmarks/random_kills.py.

An nn.Sequential, so that the code of its layers runs in every forward. The environment variable GPLAN_FAULT, JSON, says
how it fails: `kind` (SIGKILL, SIGSTOP or exception), `rank`, `step`, and `moment` (forward, backward, loss, optimizer,
batches or save); of a forward or backward also `layer` and `visit`, how many times the layer has been there before in
that step. With `delay_s` a thread does it, so long after the moment. `note` is a file that gets the time of the fault.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 128
NUM_BLOCKS = 10
NUM_CLASSES = 10


class Fault:
    """What is to fail in this process, if anything."""

    def __init__(self) -> None:
        self._told = json.loads(os.environ.get("GPLAN_FAULT", "{}"))
        self._is_due = self._told.get("rank") == int(os.environ.get("RANK", "-1"))
        self._step, self._visits = -1, 0

    def enter_step(self) -> None:
        """The batch of the next step is taken."""
        self._step, self._visits = self._step + 1, 0

    def pass_by(self, moment: str, *, layer: int | None = None) -> None:
        """Fail, if this is the moment; in a while, if the fault has a delay."""
        told = self._told
        if not self._is_due or (told["step"], told["moment"], told.get("layer")) != (self._step, moment, layer):
            return
        self._visits += 1
        if self._visits <= told.get("visit", 0):
            return
        self._is_due = False
        if "delay_s" in told:
            threading.Timer(told["delay_s"], self._fail).start()
        else:
            self._fail()

    def _fail(self) -> None:
        Path(self._told["note"]).write_text(str(time.monotonic()))
        kind = self._told["kind"]
        if kind == "exception":
            raise ValueError(f"as told, in the {self._told['moment']}")
        os.kill(os.getpid(), signal.Signals[kind])


FAULT = Fault()


class _Passage(torch.autograd.Function):
    """The identity; its backward may fail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: int) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        FAULT.pass_by("backward", layer=ctx.layer)
        return gradients[0], None


class Block(nn.Module):
    """A residual layer with dropout."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        FAULT.pass_by("forward", layer=self.number)
        return x + self.inner(_Passage.apply(x, self.number))


class Optimizer(torch.optim.AdamW):
    """AdamW; its step may fail."""

    def step(self, closure: Any = None) -> Any:
        FAULT.pass_by("optimizer")
        return super().step(closure)


class Scheduler(torch.optim.lr_scheduler.StepLR):
    """A learning rate that falls; asked for its state, as when a checkpoint is saved, it may fail."""

    def state_dict(self) -> dict[str, Any]:
        FAULT.pass_by("save")
        return super().state_dict()


def model() -> nn.Module:
    """Ten residual blocks and a classifier."""
    return nn.Sequential(*(Block(number) for number in range(NUM_BLOCKS)), nn.Linear(WIDTH, NUM_CLASSES))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy."""
    FAULT.pass_by("loss")
    return F.cross_entropy(output, target)


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """For the parameters of a stage."""
    return Optimizer(parameters, lr=3e-4)


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Three quarters of the learning rate after every seven steps."""
    return Scheduler(optimizer, step_size=7, gamma=0.75)


def batches(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Much noise around a point for every class, drawn anew for every step."""
    centers = torch.randn(NUM_CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    while True:
        FAULT.enter_step()
        FAULT.pass_by("batches")
        target = torch.randint(NUM_CLASSES, (batch_size,))
        yield 0.3 * centers[target] + torch.randn(batch_size, WIDTH), target
