"""Measure zero_grad and the optimizer's step on copies of the parameters.

With master weights the copies are in float32, and rounding them into the parameters belongs to the step. Time model: a
fixed time, known from tensors of one element, plus a time for each parameter. Each shape of parameters is measured
alone, because the time per byte depends on the size of a tensor. The times are scaled so that they add up to that of an
update of all shapes. If the parameters exceed 256 MiB, only some of each shape are updated together, and the state is
scaled by bytes. On a CPU other memory is read before each sample, because after a whole backward pass no gradient is in
a core's own caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import fmean
from typing import TypeAlias

import torch
from torch import nn

from gplan.core import StepCost
from gplan.core.errors import ModelError
from gplan.core.progress import Progress, no_progress, part
from gplan_profiler.memory.allocations import gradient_bytes, now_ns, optimizer_state_bytes, traced_allocations
from gplan_profiler.model.error_location import describe
from gplan_profiler.model.load import ModelFile
from gplan_profiler.model.materialise import alike, with_attributes
from gplan_profiler.model.precision import MASTER_DTYPE, input_dtype, master_bytes, round_into
from gplan_profiler.timing.clock import Clock, Samples
from gplan_profiler.timing.neighbours import NEIGHBOUR_FAILED, Neighbours, neighbours

MICROBATCHES = 8  # of a measured step: a usual number
_SWEPT_BYTES = 64 * 2**20  # more than what a core's own caches hold
_NUM_ROUNDS = 4  # in a series, of a step alone and one beside each kind of neighbours
WARMUP = 2
_STEPS_OF_SHAPE = 3  # in a call of sample()
_NUM_TINY = 16  # tensors of one element, beside a single one
MOST_COPIED_BYTES = 256 * 2**20  # of copied parameters
_NO_COST = StepCost.none(origin="measured")
_LEAST_MULTIPLE = 1e-3  # of the largest tensor, of temporary memory; less is a scalar or two
_MOST_ALIKE_BYTES = 32 * 2**20  # of those of one shape, to measure that; at least one


@dataclass(frozen=True, slots=True)
class _Steps:
    """An optimizer over copies of parameters, and the samples of its steps."""

    optimizer: torch.optim.Optimizer
    copies: tuple[nn.Parameter, ...]
    clock: Clock
    owner: str
    cool: Callable[[], object]  # fills a core's caches with other data; on a GPU it does nothing

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
        self, others: Sequence[Neighbours], alone: Samples, zeroing: Samples, progress: Progress
    ) -> list[list[float]]:
        """Time a step alone, then one beside each of `others`, some times. Returns for each of them the ratios to alone.

        The steps alone are added to `alone` and `zeroing`.
        """
        found: list[list[float]] = [[] for _ in others]
        for index in range(_NUM_ROUNDS):
            progress(f"measuring the optimizer's step, round {index + 1} of {_NUM_ROUNDS}", index / _NUM_ROUNDS)
            own = Samples()
            self.clock.flush()  # a GPU that still reads would hide how long the launches of a step take
            self.once(own, zeroing)
            beside = [Samples() for _ in others]
            for samples, neighbours_ in zip(beside, others, strict=True):
                with neighbours_.running():
                    self.once(samples, Samples())
            self.clock.flush()
            own_s = own.timing().median_s
            alone.extend(own)
            for ratios, x in zip(found, beside, strict=True):
                ratios.append(x.timing().median_s / own_s if own_s else 1.0)
        return found

    def make_gradients(self) -> None:
        """A small gradient for every parameter."""
        for copy in self.copies:
            copy.grad = torch.full_like(copy, 1e-3)


Update: TypeAlias = tuple[StepCost, dict[nn.Parameter, float]]
"""The costs of the optimizer's step, and the seconds of each trained parameter in it."""


class StepSampler:
    """Samples the optimizer's step alone, and beside one process on each of `shares` (sets of cores).

    On each of `shares` one process repeats `work_beside`, a training pass of the next micro-batch as other stages make
    them in a pipeline, and another one repeats the update alone, in turns. Without `work_beside` both slow-downs are
    those beside updates.

    The speed of a shared host changes between phases of seconds or minutes. So do the slow-downs: on a virtual machine
    updates slow each other down for some ten seconds and then not, as its cores move on the host. So a profile calls
    `sample` before its layers and after them, and the costs are those of all samples.
    """

    def __init__(
        self,
        file: ModelFile,
        clock: Clock,
        *,
        device: str = "cpu",
        shares: Sequence[set[int]] = (),
        work_beside: Callable[[], object] | None = None,
    ) -> None:
        self._file, self._clock, self._device = file, clock, device
        self._shares, self._work_beside = shares, work_beside
        self._trained = [x for x in file.model.parameters() if x.requires_grad] if file.has("optimizer") else []
        self._some, self._shapes, self._tiny = list[nn.Parameter](), list[_Alike](), list[_Alike]()
        self._alone, self._zeroing = Samples(), Samples()
        self._ratios: list[list[list[float]]] = []  # by series and kind of neighbours
        self._without_times: StepCost | None = None  # known from the first sampling
        self._has_failed = False

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be measured."""
        tiny, shape = (next((x.rejected for x in of if x.rejected), "") for of in (self._tiny, self._shapes))
        found = {
            NEIGHBOUR_FAILED: self._has_failed,
            f"the fixed time of an update counts as 0, as the optimizer rejects tensors of {tiny}": tiny,
            f"the optimizer rejects some tensors without the others, so all times are by bytes: {shape}": shape,
        }
        return tuple(note for note, holds in found.items() if holds)

    def sample(self, progress: Progress = no_progress) -> None:
        """Sample two series of rounds, and between them the updates of each shape.

        Does nothing without an optimizer or without weights to train.
        """
        if not self._trained:
            return
        if not self._some:
            self._choose()
        steps = self._steps(self._some)
        works: list[tuple[Callable[[], object], Sequence[nn.Parameter]]] = []
        if self._shares:
            works.append((steps.update, steps.copies))
            if self._work_beside is not None:
                works.insert(0, (self._work_beside, self._trained))
        with ExitStack() as stack:
            others = [stack.enter_context(neighbours(self._shares, *work)) for work in works]
            if others:  # the first step after a fork copies the pages that both processes have
                steps.once(Samples(), Samples())
            self._ratios.append(steps.rounds(others, self._alone, self._zeroing, part(progress, 0, 2)))
            for some in (*self._tiny, *self._shapes):
                self._sample_alike(some)
            self._ratios.append(steps.rounds(others, self._alone, self._zeroing, part(progress, 1, 2)))
            self._has_failed |= not all(x.are_alive for x in others)
        if self._without_times is None:
            self._without_times = self._cost_without_times(steps)

    def update(self) -> Update:
        """The costs of the step and the seconds of each parameter."""
        if not self._trained:
            return _NO_COST, {}
        assert self._without_times is not None, "call sample() first"
        some_bytes = sum(map(gradient_bytes, self._some))
        slow_downs = [max(1.0, fmean(map(_middle_mean, times))) for times in zip(*self._ratios, strict=True)] or [1.0]
        one, all_tiny = (x.seconds for x in self._tiny)
        fixed_s = 0.0 if one is None or all_tiny is None else max(0.0, one - max(0.0, all_tiny - one) / (_NUM_TINY - 1))
        cost = replace(
            self._without_times,
            optimizer=self._alone.timing(),
            zero_grad=self._zeroing.timing(),
            slow_down=slow_downs[0],
            update_slow_down=slow_downs[-1],
            fixed_s=fixed_s,
        )
        if any(x.rejected for x in self._shapes):  # by bytes; the unit is that of the sum
            each_s = {x: float(gradient_bytes(x)) for x in self._trained}
        else:
            of_one = [(max(0.0, (x.seconds or 0.0) - fixed_s) / len(x.some), x.all) for x in self._shapes]
            each_s = {parameter: seconds for seconds, found in of_one for parameter in found}
        some_s = sum(each_s[x] for x in self._some)
        factor = cost.spread_s / some_s if some_s else 0.0
        each_s = {x: factor * seconds for x, seconds in each_s.items()}
        by_bytes = sum(map(gradient_bytes, self._trained)) / some_bytes
        return cost.grown(by_bytes, by_update=sum(each_s.values()) / cost.spread_s if factor else by_bytes), each_s

    def _choose(self) -> None:
        """Choose the parameters whose copies are updated: one of each shape, then a second one of each, and so on.

        At least one, and not above `MOST_COPIED_BYTES`.
        """
        by_shape, left = alike(self._trained), MOST_COPIED_BYTES
        for parameter in (x for of_turn in zip_longest(*by_shape) for x in of_turn if x is not None):
            if parameter.nbytes <= left or not self._some:
                self._some.append(parameter)
                left -= parameter.nbytes
        for found in by_shape:
            some = found[: max(1, _MOST_ALIKE_BYTES // max(1, found[0].nbytes))]
            self._shapes.append(_Alike(all=found, some=some))
        for number in (1, _NUM_TINY):
            shape = [1] * by_shape[0][0].dim()
            made = [nn.Parameter(torch.zeros(shape, device=self._device)) for _ in range(number)]
            tiny = [with_attributes(x, by_shape[0][0]) for x in made]
            self._tiny.append(_Alike(all=tiny, some=tiny))

    def _steps(self, parameters: Sequence[nn.Parameter]) -> _Steps:
        """Steps over real copies of parameters, which may be fake tensors; warmed up."""
        file, copies = self._file, list[nn.Parameter]()
        for x in parameters:
            dtype = MASTER_DTYPE if file.precision.master_weights else x.dtype
            made = torch.empty(x.shape, dtype=dtype, device=self._device)
            with torch.no_grad():
                copies.append(with_attributes(nn.Parameter(made.normal_(0.0, 0.02)), x))
        optimizer = file.optimizer(copies)
        if file.precision.master_weights:
            weights = [x.detach().to(input_dtype(file.precision)) for x in copies]
            optimizer.register_step_post_hook(lambda *_: round_into(weights, copies))
        swept = torch.zeros(_SWEPT_BYTES if self._device == "cpu" else 0, dtype=torch.uint8)
        steps = _Steps(optimizer, tuple(copies), self._clock, file.name, lambda: swept.add_(1))
        for _ in range(WARMUP):
            steps.once(Samples(), Samples())
        return steps

    def _sample_alike(self, found: _Alike) -> None:
        """Sample the update of some parameters, unless the optimizer rejects them without the others."""
        if found.rejected:
            return
        self._clock.flush()
        try:
            steps = self._steps(found.some)
            for _ in range(_STEPS_OF_SHAPE):
                steps.once(found.step, found.zeroing)
        except Exception as error:  # the author's optimizer may raise anything
            shape = " x ".join(map(str, found.some[0].shape))
            found.rejected = f"shape {shape}: {describe(error.__cause__ or error)}"
        self._clock.flush()

    def _cost_without_times(self, steps: _Steps) -> StepCost:
        """The name and the bytes of the optimizer over the copies."""
        some_bytes, masters = sum(map(gradient_bytes, self._some)), master_bytes(self._some, self._file.precision)
        workspace_bytes, largest_workspace = self._workspaces(steps)
        return replace(
            _NO_COST,
            optimizer_name=type(steps.optimizer).__name__,
            state_bytes=optimizer_state_bytes(steps.optimizer) + masters,
            # gradients for the optimizer, in the dtype of master weights
            workspace_bytes=workspace_bytes + max(0, masters - some_bytes),
            # from a tensor to its gradient
            largest_workspace=largest_workspace * sum(x.nbytes for x in steps.copies) / some_bytes,
            master_bytes=masters,
        )

    def _workspaces(self, steps: _Steps) -> tuple[int, float]:
        """Temporary bytes by the bytes of all, and as a multiple of the largest tensor.

        Optimizers that update all tensors at once need the first, those that update them one by one the second. Both are
        known from a step of all and one of the largest alone.
        """
        sizes, all_bytes = [x.nbytes for x in steps.copies], _workspace_bytes(steps, self._device)
        largest = max(sizes)
        if len(sizes) == 1:
            return 0, all_bytes / largest
        try:
            largest_bytes = _workspace_bytes(self._steps([self._some[sizes.index(largest)]]), self._device)
        except Exception:  # the author's optimizer may raise anything for a single tensor
            return all_bytes, 0.0
        by_bytes = max(0.0, (all_bytes - largest_bytes) / (sum(sizes) - largest))
        multiple = largest_bytes / largest - by_bytes
        return round(by_bytes * sum(sizes)), multiple if multiple > _LEAST_MULTIPLE else 0.0


@dataclass(slots=True, kw_only=True)
class _Alike:
    """Parameters whose updates take the same time, and the samples of an update of some of them."""

    all: Sequence[nn.Parameter]
    some: Sequence[nn.Parameter]
    step: Samples = field(default_factory=Samples)
    zeroing: Samples = field(default_factory=Samples)
    rejected: str = ""  # why the optimizer does not take them alone

    @property
    def seconds(self) -> float | None:
        """Of an update of `some`, with zero_grad; None if the optimizer rejects them."""
        if self.rejected:
            return None
        return sum(x.timing().median_s for x in (self.step, self.zeroing))


def _middle_mean(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter, which leaves out bursts.

    >>> _middle_mean([1.0, 1.0, 1.2, 9.0])
    1.1
    """
    quarter = len(values) // 4
    return fmean(sorted(values)[quarter : len(values) - quarter])


def _workspace_bytes(steps: _Steps, device: str) -> int:
    steps.make_gradients()
    with traced_allocations(device) as trace:
        steps.optimizer.step()
        end_ns = now_ns()
    return max(0, trace.peak_bytes(0, end_ns))
