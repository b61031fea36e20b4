"""Options of a run, and what one process measures in each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gplan.core.errors import UsageError
from gplan.runtime.recorder import ActionTiming

NUM_WARMUP_STEPS = 3
"""Steps that are not timed; in the last of them memory is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run a plan."""

    num_steps: int = 20
    check: bool = False
    seed: int = 0
    timeout_s: float = 120.0  # longest time without progress, and longest wait for another process
    weights: str | None = None  # a file, or a folder of files, with initial values
    save_every: int | None = None  # steps between two checkpoints
    checkpoints: str = "gplan-checkpoints"  # folder of the checkpoints
    resume: str | None = None  # a checkpoint, or a folder of them, to resume from
    must_resume: bool = True  # if False, a folder without a checkpoint starts from the first step
    keeps_steps: bool = False  # whether the run has the timeline of every counted step

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
        """The step in which memory is measured: the last of the warm-up, or of a run without one."""
        return (self.num_warmup_steps or self.num_steps) - 1

    @property
    def num_warmup_steps(self) -> int:
        """Steps that are not timed; 0 if there are too few steps."""
        return NUM_WARMUP_STEPS if self.num_steps > NUM_WARMUP_STEPS else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one process measured in one step."""

    loss: float
    actions: tuple[ActionTiming, ...]  # including optimizers
    start_s: float
    end_s: float
    num_page_faults: int = 0  # pages that the process was given in the step


ReportStep = Callable[[int, float], None]
"""Called with the step's number, from 0, and its loss."""
