"""What a step costs outside the micro-batch loop: zero_grad and the optimizer's step, on copies of the parameters.

Where the parameters are many, some of them stand for all: an optimizer's work and state grow with their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gplan.errors import ModelError
from gplan.nouns import StepCost, Timing
from profiler.memory.bytes import now_ns, storage_bytes, traced_allocations
from profiler.model.author import describe
from profiler.model.load import ModelFile
from profiler.timing.clock import Clock, Samples
from profiler.timing.neighbours import neighbours

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

    def make_gradients(self) -> None:
        """A small gradient for every parameter."""
        for copy in self.copies:
            copy.grad = torch.full_like(copy, 1e-3)


def measure_step(file: ModelFile, clock: Clock, *, device: str = "cpu", shares: Sequence[set[int]] = ()) -> StepCost:
    """The optimizer's step, alone and in the company of a process on each of the `shares` of the cores."""
    trained = [x for x in dict.fromkeys(file.model.parameters()) if x.requires_grad]
    nothing = Timing.exactly(0.0)
    if not file.has("optimizer") or not trained:
        return StepCost(optimizer=nothing, zero_grad=nothing, optimizer_name="none", state_bytes=0, workspace_bytes=0)
    copies = tuple(_copy(x, device) for x in _some(trained))
    factor = sum(x.nbytes for x in trained) / sum(x.nbytes for x in copies)
    steps = _Steps(file.optimizer(copies), copies, clock, file.name)
    alone, company, zeroing = Samples(), Samples(), Samples()
    for _ in range(_WARMUP):
        steps.once(Samples(), Samples())
    with neighbours(shares, lambda: steps.once(Samples(), Samples()), copies) as others:
        for _ in range(_STEPS):
            steps.once(alone, zeroing)
            if shares:
                with others.running():
                    steps.once(Samples(), Samples())
                    steps.once(company, Samples())
        clock.flush()
    return StepCost(
        optimizer=alone.timing().times(factor),
        zero_grad=zeroing.timing().times(factor),
        optimizer_name=type(steps.optimizer).__name__,
        state_bytes=round(factor * optimizer_state_bytes(steps.optimizer)),
        workspace_bytes=round(factor * _workspace_bytes(steps, device)),
        contention=contention([(alone, company)]),
    )


def contention(pairs: Sequence[tuple[Samples, Samples]]) -> float:
    """How much longer some things take in company than alone, all together; 1 where that was not measured."""
    alone_s, company_s = (sum(x.timing().median_s for x in samples) for samples in zip(*pairs, strict=True))
    return max(1.0, company_s / alone_s) if alone_s and company_s else 1.0


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the distinct storages of an optimizer's state."""
    states = optimizer.state.values()
    return storage_bytes([x for state in states for x in state.values() if isinstance(x, Tensor)])


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
