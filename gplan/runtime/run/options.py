"""What a run is asked for, and what one process saw of each of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gplan.core.errors import ModelError, UsageError
from gplan.runtime.recorder import ActionTiming

NUM_WARMUP_STEPS = 3
"""Steps whose times are left out; the last of them is the one in which memory is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to carry a plan out."""

    num_steps: int = 20
    check: bool = False
    seed: int = 0
    timeout_s: float = 120.0  # that nothing may move, or that one process waits for another, before the run is given up
    weights: str | None = None  # a file, or a folder, with the values to begin with
    save_every: int | None = None  # steps between two checkpoints
    checkpoints: str = "gplan-checkpoints"  # the folder that they are written to
    resume: str | None = None  # a checkpoint, or a folder of them, to go on from
    must_resume: bool = True  # else a folder with no checkpoint yet means the first step
    keeps_steps: bool = False  # whether the run holds the timeline of every step that counts

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise UsageError(f"asked for {self.num_steps} steps; expected at least 1")
        if not self.timeout_s > 0:
            raise UsageError(f"the timeout is {self.timeout_s:g} s; expected more than 0")
        if self.save_every is not None and self.save_every < 1:
            raise UsageError(f"asked for a checkpoint every {self.save_every} steps; expected at least 1")
        if self.check and (self.resume is not None or self.weights is not None):
            given = "--resume" if self.resume is not None else "--weights"
            raise UsageError(f"--check compares the first step from the seed with the plain model; leave out {given}")
        if self.resume is not None and self.weights is not None and self.must_resume:
            raise UsageError("--resume takes the weights from the checkpoint; leave out --weights")

    @property
    def memory_step(self) -> int:
        """The step in which memory is read: the last of the warm-up, or of a run without one."""
        return (self.num_warmup_steps or self.num_steps) - 1

    @property
    def num_warmup_steps(self) -> int:
        """Steps left out of the times; none where there are too few to spare."""
        return NUM_WARMUP_STEPS if self.num_steps > NUM_WARMUP_STEPS else 0

    def is_saved_after(self, step: int) -> bool:
        """Whether a checkpoint is due when `step` steps have been taken in all."""
        return self.save_every is not None and step % self.save_every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one process saw of one step."""

    loss: float
    noted: tuple[ActionTiming, ...]  # the optimizers included
    start_s: float
    end_s: float


ReportStep = Callable[[int, float], None]
"""Called with the step's number, from 0, and its loss."""


def check_loss(loss: float, step: int) -> None:
    """Raise ModelError where training has run away; `step` counts from 0, the message as people do."""
    if not math.isfinite(loss):
        raise ModelError(f"the loss is {loss} at step {step + 1}; lower the learning rate or look at the data")
