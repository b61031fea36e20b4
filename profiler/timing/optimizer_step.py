"""Measure zero_grad and the optimizer's step on copies of the parameters.

With master weights the copies are in float32, and rounding them into the parameters belongs to the step. Time model:
seconds per tensor (measured on as many tensors of one element) plus seconds per byte. If the parameters exceed 256 MiB,
only the first ones are copied, and time and state are scaled by bytes. On a CPU other memory is read before each
sample, because after a whole backward pass no gradient is in a core's own caches.

Rows of a table that no micro-batch of a first step uses have zero gradients here too, and such tables have a rate of
their own (docs/cost-model.md, Optimizer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gplan.core import Precision, StepCost
from gplan.core.errors import ModelError
from profiler.memory.allocations import gradient_bytes, now_ns, optimizer_state_bytes, traced_allocations
from profiler.model.error_location import describe
from profiler.model.load import ModelFile
from profiler.model.precision import MASTER_DTYPE, input_dtype, master_bytes, round_into
from profiler.timing.clock import AtOneSpeed, Clock, Samples
from profiler.timing.neighbours import NEIGHBOUR_FAILED, Neighbours, contention, neighbours

MICROBATCHES = 8  # of the first step, whose unused rows count: a usual number
_STEPS = 8
_BLOCKS = 2  # of steps alone, and of as many among neighbours
_WARMUP = 2
_SWEPT_BYTES = 64 * 2**20  # more than what a core's own caches hold
MOST_COPIED_BYTES = 256 * 2**20  # of copied parameters


@dataclass(frozen=True, slots=True)
class _Steps:
    """An optimizer over copies of parameters, and the samples of its steps."""

    optimizer: torch.optim.Optimizer
    copies: tuple[nn.Parameter, ...]
    clock: Clock
    owner: str
    swept: Tensor  # of _SWEPT_BYTES; empty on a GPU
    unused_rows: tuple[Tensor | None, ...]  # of each copy: those without a gradient; None: every row has one

    def once(self, step: Samples, zeroing: Samples, *, is_cold: bool = True) -> None:
        """One step: create gradients, flush them from the caches, update, zero_grad."""
        self.make_gradients()
        if is_cold:
            self.swept.add_(1)
        try:
            self.clock.time(step, self.optimizer.step)
        except Exception as error:
            raise ModelError(
                f"the optimizer of {self.owner} cannot take a step on its own: {describe(error)}"
            ) from error
        self.clock.time(zeroing, self.optimizer.zero_grad)

    def unsampled(self) -> None:
        """A step without samples."""
        self.once(Samples(), Samples(), is_cold=False)

    def among(
        self, others: Neighbours, step: Samples, *, times: int, read_beside: Callable[[], object] = lambda: None
    ) -> None:
        """Steps while the neighbours compute."""
        with others.running():
            for _ in range(times):
                read_beside()
                self.once(step, Samples())

    def make_gradients(self) -> None:
        """A small gradient for every parameter."""
        for copy, unused in zip(self.copies, self.unused_rows, strict=True):
            copy.grad = torch.full_like(copy, 1e-3)
            if unused is not None:
                copy.grad[unused] = 0.0


SampledStep: TypeAlias = Callable[[AtOneSpeed], StepCost]
"""The costs of the optimizer's step, once the speed of the host is known."""


def sample_step(
    file: ModelFile,
    clock: Clock,
    *,
    device: str = "cpu",
    shares: Sequence[set[int]] = (),
    work_beside: Callable[[], object] | None = None,
    read_yardstick: Callable[[], object] = lambda: None,
    read_beside: Callable[[], object] = lambda: None,
) -> tuple[SampledStep, frozenset[nn.Parameter], tuple[str, ...]]:
    """Sample the optimizer's step alone, and beside one process on each of `shares` (sets of cores).

    Also returned are the parameters of which MICROBATCHES of `work_beside` leave rows without a gradient, and notes.

    The processes repeat `work_beside`, a training pass of the next micro-batch as other stages make them in a pipeline,
    and then the same step. Without `work_beside` both slow-downs are those beside the same step.
    """
    trained = [x for x in file.model.parameters() if x.requires_grad]
    if not file.has("optimizer") or not trained:
        return lambda _: StepCost.none(), frozenset(), ()
    some = _some(trained)
    copies = [_copy(x, file.precision, device) for x in some]
    unused = _unused_rows(trained, work_beside)
    steps = _steps(file, copies, clock, device, [unused.get(x) for x in some])
    partly = [(copy, unused[x]) for copy, x in zip(copies, some, strict=True) if x in unused]
    tables, partly_notes = _steps_of_tables(file, partly if len(partly) < len(copies) else [], clock, device)
    of_tables, of_tables_zeroing = Samples(), Samples()  # in turns with those of all: of the same phases of the host
    alone, zeroing, beside_updates = Samples(), Samples(), Samples()
    beside = beside_updates if work_beside is None else Samples()
    notes = set[str]()
    works: list[tuple[Callable[[], object], list[nn.Parameter], Samples]] = [(steps.unsampled, copies, beside_updates)]
    if work_beside is not None and shares:
        works.insert(0, (work_beside, trained, beside))
    for work, parameters, found in works:
        with neighbours(shares, work, parameters) as others:
            for _ in range(_BLOCKS):
                for _ in range(_STEPS // _BLOCKS):
                    read_yardstick()
                    steps.once(alone, zeroing)
                    if tables is not None:
                        tables.once(of_tables, of_tables_zeroing)
                if shares:
                    steps.among(others, found, times=_STEPS // _BLOCKS, read_beside=read_beside)
            clock.flush()
            if not others.are_alive:
                notes.add(NEIGHBOUR_FAILED)
    tensor_s, tensor_notes = _sample_tensors(file, copies, clock, device)
    some_bytes, masters = sum(map(gradient_bytes, some)), master_bytes(some, file.precision)
    state_bytes = optimizer_state_bytes(steps.optimizer) + masters
    workspace_bytes, largest_workspace = _workspaces(file, steps, clock, device)
    workspace_bytes += max(0, masters - some_bytes)  # gradients for the optimizer, in the dtype of master weights
    largest_workspace *= sum(x.nbytes for x in copies) / some_bytes  # from a tensor to its gradient
    by_bytes = sum(map(gradient_bytes, trained)) / some_bytes
    partly_bytes = sum(gradient_bytes(x) for x in some if x in unused)
    all_partly_bytes = sum(gradient_bytes(x) for x in trained if x in unused)

    def measured(at_one_speed: AtOneSpeed) -> StepCost:
        cost = StepCost(
            optimizer=at_one_speed(alone).timing(),
            zero_grad=at_one_speed(zeroing).timing(),
            optimizer_name=type(steps.optimizer).__name__,
            state_bytes=state_bytes,
            workspace_bytes=workspace_bytes,
            largest_workspace=largest_workspace,
            contention=contention([(at_one_speed(alone), at_one_speed(beside, beside=True))]),
            update_contention=contention([(at_one_speed(alone), at_one_speed(beside_updates, beside=True))]),
            tensor_s=tensor_s(at_one_speed),
            master_bytes=masters,
        )
        factor = 1.0
        if tables is not None:
            partly_s = sum(at_one_speed(x).timing().median_s for x in (of_tables, of_tables_zeroing))
            partly_s -= len(partly) * cost.tensor_s
            others_s = cost.shares_s(len(copies))[1] - partly_s
            if partly_s > 0 and others_s > 0:
                factor = partly_s / partly_bytes / (others_s / (some_bytes - partly_bytes))
        more = factor - 1.0
        by_weighted = (by_bytes * some_bytes + more * all_partly_bytes) / (some_bytes + more * partly_bytes)
        grown = cost.grown(by_bytes, num_tensors=len(copies), num_all=len(trained), by_weighted=by_weighted)
        return replace(grown, partly_used_factor=factor)

    return measured, frozenset(unused), (*notes, *tensor_notes, *partly_notes)


def _unused_rows(trained: Sequence[nn.Parameter], work: Callable[[], object] | None) -> dict[nn.Parameter, Tensor]:
    """The rows without a gradient, of those parameters that a first step gives gradients in some rows only."""
    if work is None:
        return {}
    without = [x for x in trained if x.grad is None]
    for parameter in trained:
        if parameter.grad is not None:
            parameter.grad.zero_()
    for _ in range(MICROBATCHES):
        work()
    found = {x: _empty_rows(x.grad) for x in trained}
    for parameter in without:
        parameter.grad = None
    return {x: rows for x, rows in found.items() if rows is not None}


def _empty_rows(gradient: Tensor | None) -> Tensor | None:
    if gradient is None or gradient.is_sparse or gradient.dim() < 2:
        return None
    empty = (gradient == 0).flatten(1).all(1)
    return empty if empty.any() and not empty.all() else None


def _steps_of_tables(
    file: ModelFile, partly: Sequence[tuple[nn.Parameter, Tensor]], clock: Clock, device: str
) -> tuple[_Steps | None, tuple[str, ...]]:
    """Updates of partly used tables alone; None and a note for an optimizer that rejects those."""
    if not partly:
        return None, ()
    tables, unused_rows = zip(*partly, strict=True)
    try:
        return _steps(file, tables, clock, device, unused_rows), ()
    except Exception as error:  # the author's optimizer may raise anything
        cause = describe(error.__cause__ or error)
        return None, (
            f"parameters with unused rows are updated at the rate of the others, as the optimizer rejects them alone: {cause}",
        )


def _steps(
    file: ModelFile,
    copies: Sequence[nn.Parameter],
    clock: Clock,
    device: str,
    unused_rows: Sequence[Tensor | None] = (),
) -> _Steps:
    """The steps, warmed up."""
    swept = torch.zeros(_SWEPT_BYTES if device == "cpu" else 0, dtype=torch.uint8)
    optimizer = file.optimizer(copies)
    if file.precision.master_weights:
        weights = [x.detach().to(input_dtype(file.precision)) for x in copies]
        optimizer.register_step_post_hook(lambda *_: round_into(weights, copies))
    steps = _Steps(optimizer, tuple(copies), clock, file.name, swept, tuple(unused_rows or [None] * len(copies)))
    for _ in range(_WARMUP):
        steps.unsampled()
    return steps


def _sample_tensors(
    file: ModelFile, copies: Sequence[nn.Parameter], clock: Clock, device: str
) -> tuple[Callable[[AtOneSpeed], float], tuple[str, ...]]:
    """Seconds of both per tensor, by tensors of one element; 0 and a note for an optimizer that rejects those.

    The fixed cost, by an update of a single tensor, is subtracted.
    """
    tiny = [nn.Parameter(torch.zeros([1] * x.dim(), dtype=x.dtype, device=device)) for x in copies]
    if len(tiny) < 2:
        return lambda _: 0.0, ()
    try:
        one, every = (_update_samples(file, some, clock, device) for some in (tiny[:1], tiny))
    except Exception as error:  # the author's optimizer may raise anything
        cause = describe(error.__cause__ or error)
        return lambda _: 0.0, (
            f"update times are divided by bytes alone, as the optimizer rejects small tensors: {cause}",
        )

    def tensor_s(at_one_speed: AtOneSpeed) -> float:
        one_s, all_s = (sum(at_one_speed(x).timing().median_s for x in update) for update in (one, every))
        return max(0.0, all_s - one_s) / (len(tiny) - 1)

    return tensor_s, ()


def _update_samples(
    file: ModelFile, parameters: Sequence[nn.Parameter], clock: Clock, device: str
) -> tuple[Samples, Samples]:
    """The samples of the step and of zero_grad."""
    step, zeroing = Samples(), Samples()
    steps = _steps(file, parameters, clock, device)
    for _ in range(_STEPS):
        steps.once(step, zeroing)
    clock.flush()
    return step, zeroing


def _some(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters to copy, in their order; at least one."""
    chosen: list[nn.Parameter] = []
    left = MOST_COPIED_BYTES
    for parameter in parameters:
        if parameter.nbytes <= left or not chosen:
            chosen.append(parameter)
            left -= parameter.nbytes
    return chosen


def _copy(parameter: nn.Parameter, precision: Precision, device: str) -> nn.Parameter:
    """A real parameter of the same shape, as the optimizer updates it; the original may be a fake tensor."""
    with torch.no_grad():
        dtype = MASTER_DTYPE if precision.master_weights else parameter.dtype
        made = torch.empty(parameter.shape, dtype=dtype, device=device)
        return nn.Parameter(made.normal_(0.0, 0.02))


_LEAST_MULTIPLE = 1e-3  # of the largest tensor; less is a scalar or two


def _workspaces(file: ModelFile, steps: _Steps, clock: Clock, device: str) -> tuple[int, float]:
    """Temporary bytes by the bytes of all, and as a multiple of the largest tensor.

    Optimizers that update all tensors at once need the first, those that update them one by one the second. Both are
    known from a step of all and one of the largest alone.
    """
    sizes, all_bytes = [x.nbytes for x in steps.copies], _workspace_bytes(steps, device)
    largest = max(steps.copies, key=lambda x: x.nbytes)
    if len(sizes) == 1:
        return 0, all_bytes / largest.nbytes
    try:
        largest_bytes = _workspace_bytes(_steps(file, [largest], clock, device), device)
    except Exception:  # the author's optimizer may raise anything for a single tensor
        return all_bytes, 0.0
    by_bytes = max(0.0, (all_bytes - largest_bytes) / (sum(sizes) - largest.nbytes))
    multiple = largest_bytes / largest.nbytes - by_bytes
    return round(by_bytes * sum(sizes)), multiple if multiple > _LEAST_MULTIPLE else 0.0


def _workspace_bytes(steps: _Steps, device: str) -> int:
    steps.make_gradients()
    with traced_allocations(device) as trace:
        steps.optimizer.step()
        end_ns = now_ns()
    return max(0, trace.peak_bytes(0, end_ns))
