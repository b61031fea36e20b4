"""What a step costs outside the micro-batch loop: zero_grad and the optimizer's step, on copies of the parameters.

Where the parameters are many, some of them stand for all: an optimizer's work and state grow with their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gplan.errors import ModelError
from gplan.nouns import StepCost
from profiler.memory.bytes import now_ns, traced_allocations
from profiler.memory.storages import optimizer_state_bytes
from profiler.model.author import describe
from profiler.model.load import ModelFile
from profiler.timing.clock import Clock, Samples
from profiler.timing.neighbours import Neighbours, contention, neighbours

_STEPS = 8
_WARMUP = 2
MOST_COPIED_BYTES = 256 * 2**20  # of parameters that are copied for it


@dataclass(frozen=True, slots=True)
class _Steps:
    """An optimizer over copies of parameters, and the samples of its steps."""

    optimizer: torch.optim.Optimizer
    copies: tuple[nn.Parameter, ...]
    clock: Clock
    owner: str

    def once(self, step: Samples, zeroing: Samples) -> None:
        """Gradients, a step, and the gradients gone again."""
        self.make_gradients()
        try:
            self.clock.time(step, self.optimizer.step)
        except Exception as error:
            raise ModelError(
                f"the optimizer of {self.owner} cannot take a step on its own: {describe(error)}"
            ) from error
        self.clock.time(zeroing, self.optimizer.zero_grad)

    def unsampled(self) -> None:
        """A step that is not kept."""
        self.once(Samples(), Samples())

    def once_among(self, others: Neighbours, step: Samples) -> None:
        """A step while the neighbours compute, after one that lets them begin."""
        with others.running():
            self.unsampled()
            self.once(step, Samples())

    def make_gradients(self) -> None:
        """A small gradient for every parameter."""
        for copy in self.copies:
            copy.grad = torch.full_like(copy, 1e-3)


def measure_step(file: ModelFile, clock: Clock, *, device: str = "cpu", shares: Sequence[set[int]] = ()) -> StepCost:
    """The optimizer's step, alone and in the company of a process on each of the `shares` of the cores."""
    trained = [x for x in file.model.parameters() if x.requires_grad]
    if not file.has("optimizer") or not trained:
        return StepCost.none()
    copies = tuple(_copy(x, device) for x in _some(trained))
    factor = sum(x.nbytes for x in trained) / sum(x.nbytes for x in copies)
    steps = _Steps(file.optimizer(copies), copies, clock, file.name)
    alone, company, zeroing = Samples(), Samples(), Samples()
    for _ in range(_WARMUP):
        steps.unsampled()
    with neighbours(shares, steps.unsampled, copies) as others:
        for _ in range(_STEPS):
            steps.once(alone, zeroing)
            if shares:
                steps.once_among(others, company)
        clock.flush()
    return StepCost(
        optimizer=alone.timing().times(factor),
        zero_grad=zeroing.timing().times(factor),
        optimizer_name=type(steps.optimizer).__name__,
        state_bytes=round(factor * optimizer_state_bytes(steps.optimizer)),
        workspace_bytes=round(factor * _workspace_bytes(steps, device)),
        contention=contention([(alone, company)]),
    )


def _some(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """As many parameters, in their order, as may be copied; at least one."""
    chosen: list[nn.Parameter] = []
    left = MOST_COPIED_BYTES
    for parameter in parameters:
        if parameter.nbytes <= left or not chosen:
            chosen.append(parameter)
            left -= parameter.nbytes
    return chosen


def _copy(parameter: nn.Parameter, device: str) -> nn.Parameter:
    """A real parameter like another one, which may have no memory."""
    with torch.no_grad():
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        return nn.Parameter(made.normal_(0.0, 0.02))


def _workspace_bytes(steps: _Steps, device: str) -> int:
    steps.make_gradients()
    with traced_allocations(device) as trace:
        steps.optimizer.step()
        end_ns = now_ns()
    return max(0, trace.peak_bytes(0, end_ns))
