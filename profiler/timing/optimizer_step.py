"""Measure zero_grad and the optimizer's step on copies of the parameters.

With master weights the copies are in float32, and rounding them into the parameters belongs to the step. Time model: a
fixed time, known from tensors of one element, plus a time for each parameter. Each shape of parameters is measured
alone, because the time per byte depends on the size of a tensor. The times are scaled so that they add up to that of an
update of all shapes. If the parameters exceed 256 MiB, only some of each shape are updated together, and the state is
scaled by bytes. On a CPU other memory is read before each sample, because after a whole backward pass no gradient is in
a core's own caches.

Rows of a table that no micro-batch of a first step uses have zero gradients here too (docs/cost-model.md, Optimizer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gplan.core import Precision, StepCost
from gplan.core.errors import ModelError
from gplan.core.host_speed import middle_mean
from profiler.memory.allocations import gradient_bytes, now_ns, optimizer_state_bytes, traced_allocations
from profiler.model.error_location import describe
from profiler.model.load import ModelFile
from profiler.model.precision import MASTER_DTYPE, input_dtype, master_bytes, round_into
from profiler.timing.clock import AtOneSpeed, Clock, Samples, cold_caches
from profiler.timing.neighbours import NEIGHBOUR_FAILED, Neighbours, neighbours

MICROBATCHES = 8  # of a measured step: a usual number
_NUM_ROUNDS = 6  # at a time, of a step alone and one beside each kind of neighbours
WARMUP = 2
_STEPS_OF_SHAPE = 6
_NUM_TINY = 16  # tensors of one element, beside a single one
MOST_COPIED_BYTES = 256 * 2**20  # of copied parameters
_MOST_ALIKE_BYTES = 32 * 2**20  # of those of one shape, to measure that; at least one


@dataclass(frozen=True, slots=True)
class _Steps:
    """An optimizer over copies of parameters, and the samples of its steps."""

    optimizer: torch.optim.Optimizer
    copies: tuple[nn.Parameter, ...]
    clock: Clock
    owner: str
    cool: Callable[[], object]  # flushes the caches
    unused_rows: tuple[Tensor | None, ...]  # of each copy: those without a gradient; None: every row has one

    def once(self, step: Samples, zeroing: Samples) -> None:
        """One step: create gradients, flush them from the caches, update, zero_grad."""
        self.make_gradients()
        self.cool()
        try:
            self.clock.time(step, self.optimizer.step)
        except Exception as error:
            raise ModelError(
                f"the optimizer of {self.owner} cannot take a step on its own: {describe(error)}"
            ) from error
        self.clock.time(zeroing, self.optimizer.zero_grad)

    def update(self) -> None:
        """Update, untimed. Only the first call makes gradients, so a process that repeats it does nothing but update."""
        if self.copies[0].grad is None:
            self.make_gradients()
        self.optimizer.step()

    def rounds(
        self,
        others: Sequence[Neighbours],
        alone: Samples,
        zeroing: Samples,
        read_yardstick: Callable[[], object] = lambda: None,
    ) -> list[list[float]]:
        """Time a step alone, then one beside each of `others`, some times. Returns for each of them the ratios to alone.

        The steps alone are added to `alone` and `zeroing`.
        """
        found: list[list[float]] = [[] for _ in others]
        for _ in range(_NUM_ROUNDS):
            own = Samples()
            read_yardstick()
            self.once(own, zeroing)
            beside = [self.among(x) for x in others]
            self.clock.flush()
            own_s = own.timing().median_s
            alone.extend(own)
            for ratios, x in zip(found, beside, strict=True):
                ratios.append(x.timing().median_s / own_s if own_s else 1.0)
        return found

    def among(self, others: Neighbours) -> Samples:
        """A step while the neighbours compute."""
        found = Samples()
        with others.running():
            self.once(found, Samples())
        return found

    def make_gradients(self) -> None:
        """A small gradient for every parameter."""
        for copy, unused in zip(self.copies, self.unused_rows, strict=True):
            copy.grad = torch.full_like(copy, 1e-3)
            if unused is not None:
                copy.grad[unused] = 0.0


Update: TypeAlias = tuple[StepCost, dict[nn.Parameter, float]]
"""The costs of the optimizer's step, and the seconds of each trained parameter in it."""

SampledStep: TypeAlias = Callable[[AtOneSpeed], Update]
"""The update, once the speed of the host is known."""


def sample_update_contention(
    file: ModelFile, clock: Clock, *, device: str = "cpu", shares: Sequence[set[int]] = ()
) -> tuple[list[float], tuple[str, ...]]:
    """Slow-downs of the update beside updates on `shares`, for `sample_step`, and notes. The model is not run.

    On a virtual machine updates slow each other down for some ten seconds and then not, as its cores move on the host. So
    a profile measures this before its layers too. Gradients are then in all rows: which are used is not known yet.
    """
    trained = _trained(file)
    if not trained or not shares:
        return [], ()
    copies = [_copy(x, file.precision, device) for x in _parameters_to_copy(_by_shape(trained, {}))]
    steps = _steps(file, copies, clock, device)
    with neighbours(shares, steps.update, copies) as others:
        steps.once(Samples(), Samples())  # as in `sample_step`
        (ratios,) = steps.rounds([others], Samples(), Samples())
        return ratios, () if others.are_alive else (NEIGHBOUR_FAILED,)


def sample_step(
    file: ModelFile,
    clock: Clock,
    *,
    device: str = "cpu",
    shares: Sequence[set[int]] = (),
    work_beside: Callable[[], object] | None = None,
    earlier: Sequence[float] = (),
    read_yardstick: Callable[[], object] = lambda: None,
) -> tuple[SampledStep, tuple[str, ...]]:
    """Sample the optimizer's step alone, and beside one process on each of `shares` (sets of cores). Also returns notes.

    On each of `shares` one process repeats `work_beside`, a training pass of the next micro-batch as other stages make
    them in a pipeline, and another one repeats the update alone, in turns. Without `work_beside` both slow-downs are
    those beside updates, of which `sample_update_contention` found `earlier` ones. The yardstick is read while all of them
    are stopped. Slow-downs are means over the times at which they were measured, as they change (see there).
    """
    trained = _trained(file)
    if not trained:
        return lambda _: (StepCost.none(origin="measured"), {}), ()
    unused = _unused_rows(trained, work_beside)
    by_shape = _by_shape(trained, unused)
    some = _parameters_to_copy(by_shape)
    copies = [_copy(x, file.precision, device) for x in some]
    steps = _steps(file, copies, clock, device, [unused.get(x) for x in some])
    works: list[tuple[Callable[[], object], list[nn.Parameter]]] = [(steps.update, copies)] if shares else []
    if work_beside is not None and shares:
        works.insert(0, (work_beside, trained))
    alone, zeroing = Samples(), Samples()
    with ExitStack() as stack:
        others = [stack.enter_context(neighbours(shares, *work)) for work in works]
        if others:
            steps.once(Samples(), Samples())  # the first step after a fork copies the pages that both processes have
        before_shapes = steps.rounds(others, alone, zeroing, read_yardstick)
        seconds_of, shape_notes = _sample_shapes(file, by_shape, unused, clock, device, read_yardstick)
        after_shapes = steps.rounds(others, alone, zeroing, read_yardstick)
        notes = () if all(x.are_alive for x in others) else (NEIGHBOUR_FAILED,)
    some_bytes, masters = sum(map(gradient_bytes, some)), master_bytes(some, file.precision)
    state_bytes = optimizer_state_bytes(steps.optimizer) + masters
    workspace_bytes, largest_workspace = _workspaces(file, steps, clock, device)
    workspace_bytes += max(0, masters - some_bytes)  # gradients for the optimizer, in the dtype of master weights
    largest_workspace *= sum(x.nbytes for x in copies) / some_bytes  # from a tensor to its gradient
    by_bytes = sum(map(gradient_bytes, trained)) / some_bytes
    ratios = [[*times] for times in zip(before_shapes, after_shapes, strict=True)]  # of each neighbour, by time
    if ratios and earlier:
        ratios[-1].append([*earlier])
    slow_downs = [max(1.0, fmean(map(middle_mean, times))) for times in ratios] or [1.0]

    def measured(at_one_speed: AtOneSpeed) -> Update:
        fixed_s, found_s = seconds_of(at_one_speed)
        cost = StepCost(
            optimizer=at_one_speed(alone).timing(),
            zero_grad=at_one_speed(zeroing).timing(),
            optimizer_name=type(steps.optimizer).__name__,
            state_bytes=state_bytes,
            workspace_bytes=workspace_bytes,
            largest_workspace=largest_workspace,
            contention=slow_downs[0],
            update_contention=slow_downs[-1],
            fixed_s=fixed_s,
            master_bytes=masters,
        )
        each_s = _seconds_by_parameter(found_s, trained, some, spread_s=cost.spread_s)
        some_s = sum(each_s[x] for x in some)
        factor = cost.spread_s / some_s if some_s else 0.0
        each_s = {x: factor * seconds for x, seconds in each_s.items()}
        grown = cost.grown(by_bytes, by_update=sum(each_s.values()) / cost.spread_s if factor else by_bytes)
        return grown, each_s

    return measured, (*notes, *shape_notes)


def _trained(file: ModelFile) -> list[nn.Parameter]:
    """The parameters that the optimizer of a file updates."""
    return [x for x in file.model.parameters() if x.requires_grad] if file.has("optimizer") else []


def _by_shape(trained: Sequence[nn.Parameter], unused: Mapping[nn.Parameter, Tensor]) -> list[list[nn.Parameter]]:
    """Parameters of one shape and type; those with unused rows apart from the others."""
    found = dict[object, list[nn.Parameter]]()
    for x in trained:
        rows = int(unused[x].sum()) if x in unused else 0
        found.setdefault((x.shape, x.dtype, gradient_bytes(x), rows), []).append(x)
    return list(found.values())


def _sample_shapes(
    file: ModelFile,
    by_shape: Sequence[Sequence[nn.Parameter]],
    unused: Mapping[nn.Parameter, Tensor],
    clock: Clock,
    device: str,
    read_yardstick: Callable[[], object],
) -> tuple[Callable[[AtOneSpeed], tuple[float, dict[nn.Parameter, float]]], tuple[str, ...]]:
    """Sample updates of each shape alone; return a function that gives `fixed_s` and the seconds of parameters; and notes.

    Parameters of shapes that the optimizer rejects alone are missing.
    """
    shapes, rejected = list[tuple[Sequence[nn.Parameter], int, tuple[Samples, Samples]]](), list[str]()

    def sampled(copies: Sequence[nn.Parameter], rows: Sequence[Tensor | None]) -> tuple[Samples, Samples] | None:
        try:
            return _update_samples(file, copies, clock, device, rows)
        except Exception as error:  # the author's optimizer may raise anything
            rejected.append(f"shape {' x '.join(map(str, copies[0].shape))}: {describe(error.__cause__ or error)}")
            return None

    tiny = [nn.Parameter(torch.zeros([1] * by_shape[0][0].dim(), device=device)) for _ in range(_NUM_TINY)]
    of_one = sampled(tiny[:1], [None])
    of_all = sampled(tiny, [None] * _NUM_TINY) if of_one else None
    notes = [f"the fixed time of an update counts as 0, as the optimizer rejects tensors of {x}" for x in rejected]
    rejected.clear()
    for parameters in by_shape:
        read_yardstick()
        chosen = parameters[: max(1, _MOST_ALIKE_BYTES // max(1, parameters[0].nbytes))]
        found = sampled([_copy(x, file.precision, device) for x in chosen], [unused.get(x) for x in chosen])
        if found is not None:
            shapes.append((parameters, len(chosen), found))
    notes += [
        f"the optimizer rejects some tensors without the others, so their times are by bytes: {x}" for x in rejected[:1]
    ]

    def seconds_of(at_one_speed: AtOneSpeed) -> tuple[float, dict[nn.Parameter, float]]:
        def seconds(samples: tuple[Samples, Samples]) -> float:
            return sum(at_one_speed(x).timing().median_s for x in samples)

        fixed_s = 0.0
        if of_one and of_all:
            one_s = seconds(of_one)
            fixed_s = max(0.0, one_s - max(0.0, seconds(of_all) - one_s) / (_NUM_TINY - 1))
        each = ((parameters, max(0.0, seconds(samples) - fixed_s) / num) for parameters, num, samples in shapes)
        return fixed_s, {x: s for parameters, s in each for x in parameters}

    return seconds_of, tuple(notes)


def _seconds_by_parameter(
    found_s: Mapping[nn.Parameter, float],
    trained: Sequence[nn.Parameter],
    updated: Sequence[nn.Parameter],
    *,
    spread_s: float,
) -> dict[nn.Parameter, float]:
    """Seconds of each trained parameter: as found; those that are missing share, by bytes, what is left of `spread_s`.

    `spread_s` is what an update of the parameters `updated` took.
    """
    missing = [x for x in updated if x not in found_s]
    left_s = max(0.0, spread_s - sum(found_s.get(x, 0.0) for x in updated)) if missing else spread_s
    s_per_byte = left_s / (sum(map(gradient_bytes, missing or updated)) or 1)
    return {x: found_s.get(x, s_per_byte * gradient_bytes(x)) for x in trained}


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


def _steps(
    file: ModelFile,
    copies: Sequence[nn.Parameter],
    clock: Clock,
    device: str,
    unused_rows: Sequence[Tensor | None] = (),
) -> _Steps:
    """The steps, warmed up."""
    cool = cold_caches(device)
    optimizer = file.optimizer(copies)
    if file.precision.master_weights:
        weights = [x.detach().to(input_dtype(file.precision)) for x in copies]
        optimizer.register_step_post_hook(lambda *_: round_into(weights, copies))
    steps = _Steps(optimizer, tuple(copies), clock, file.name, cool, tuple(unused_rows or [None] * len(copies)))
    for _ in range(WARMUP):
        steps.once(Samples(), Samples())
    return steps


def _update_samples(
    file: ModelFile,
    copies: Sequence[nn.Parameter],
    clock: Clock,
    device: str,
    unused_rows: Sequence[Tensor | None],
) -> tuple[Samples, Samples]:
    """The samples of the step and of zero_grad."""
    step, zeroing = Samples(), Samples()
    steps = _steps(file, copies, clock, device, unused_rows)
    for _ in range(_STEPS_OF_SHAPE):
        steps.once(step, zeroing)
    clock.flush()
    return step, zeroing


def _parameters_to_copy(by_shape: Sequence[Sequence[nn.Parameter]]) -> list[nn.Parameter]:
    """The parameters to copy: one of each shape, then a second one of each, and so on; at least one."""
    chosen: list[nn.Parameter] = []
    left = MOST_COPIED_BYTES
    for parameter in (x for of_turn in zip_longest(*by_shape) for x in of_turn if x is not None):
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
