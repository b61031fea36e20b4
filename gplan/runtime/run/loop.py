"""The training loop of `gplan run`: steps, losses, times, one memory reading, checkpoints, and the gradient check.

A step is timed from a barrier of all ranks, with its batch ready, to the end of the last optimizer. The first steps
are warm-up; in one of them every allocation is recorded, which slows it down, so it is not timed.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gplan.core import Plan, Run
from gplan.core.errors import RunError, UsageError
from gplan.core.units import counted
from gplan.evaluate.compare import stale_prediction_notes
from gplan.runtime.checkpoint.collective import RankGroup
from gplan.runtime.gradient_sync import set_aside
from gplan.runtime.model_source import ModelSource
from gplan.runtime.pipeline import Pipeline, own_device
from gplan.runtime.run.reference import Reference, as_dense, gradient_check, gradient_errors, plain_reference
from gplan.runtime.run.results import on_one_clock, torch_run, virtual_run
from gplan.runtime.run.run_options import ReportStep, RunOptions, StepRecord
from gplan.runtime.sharded_replicas import check_optimizer
from gplan.runtime.sharded_tensors import full_tensor, local_tensor
from gplan.runtime.stage_module import StageModule
from gplan.runtime.validation import host_bytes
from gplan.runtime.virtual_engine import TiedUpdates, VirtualEngine
from gplan_profiler.host.failure import failure_text
from gplan_profiler.host.heartbeat import Heartbeat
from gplan_profiler.host.host_info import (
    clock_id,
    garbage_collector_frozen,
    page_faults,
    return_large_blocks,
    usable_cores,
)
from gplan_profiler.host.host_load import SPEED_SHARE, HostMeter
from gplan_profiler.memory.allocations import AllocationTrace, storage_bytes, traced_allocations
from gplan_profiler.model.data import check_batch, check_target
from gplan_profiler.model.lazy_build import random_state, random_state_kept, seed_everything
from gplan_profiler.model.load import Batch, ModelFile
from gplan_profiler.model.memory_budget import available_bytes
from gplan_profiler.model.model_reference import file_digest


class BatchStream:
    """The mini-batches of a run, from the model file's `batches`; equal on every rank and after a resume.

    Batches drawn from torch's, Python's or numpy's generators have a random stream of their own. A resumed run draws
    the used batches again and drops them.
    """

    def __init__(self, file: ModelFile, batch_size: int, *, seed: int) -> None:
        self._file, self._batch_size = file, batch_size
        self._batches = file.batches(batch_size)
        with random_state_kept():
            seed_everything(seed)
            self._go_on = random_state()
        self._peeked: list[Batch] = []
        self.position = 0  # batches taken so far

    def peek(self) -> Batch:
        """Return the next batch without taking it."""
        if not self._peeked:
            self._peeked.append(self._drawn())
        return self._peeked[0]

    def take(self) -> Batch:
        """Return the next batch: inputs and target."""
        batch = self.peek()
        self._peeked.clear()
        self.position += 1
        return batch

    def _drawn(self) -> tuple[Any, Any]:
        size, name = self._batch_size, self._file.name
        with random_state_kept():
            self._go_on()
            inputs, target = next(self._batches)
            self._go_on = random_state()
        check_batch(inputs, size, what=f"the inputs that batches({size}) of {name} gives")
        check_target(target, size, what=f"the targets that batches({size}) of {name} gives")
        return inputs, target


def train(
    source: ModelSource, plan: Plan, options: RunOptions, *, report: ReportStep, heartbeat: Heartbeat | None = None
) -> Run:
    """Train this process's part of the plan; every process returns the same run.

    `options.num_steps` counts from the first step; a resumed run takes the remaining ones.
    """
    loop = _TrainingLoop(source, plan, options, Heartbeat() if heartbeat is None else heartbeat)
    with garbage_collector_frozen():
        steps = [loop.step(index, report) for index in range(loop.first_step, options.num_steps)]
    return loop.run(steps)


class _TrainingLoop:
    def __init__(self, source: ModelSource, plan: Plan, options: RunOptions, heartbeat: Heartbeat) -> None:
        file = source.file
        file.require("batches", "loss", "optimizer")
        self._file, self._plan, self._options, self._heartbeat = file, plan, options, heartbeat
        self._data = BatchStream(file, plan.batch_size, seed=options.seed)
        inputs, target = self._data.peek()
        self._reference: Reference | None = None
        if options.check:  # the plain model is built whole for its gradients, and dropped
            whole = source.build_whole() if source.is_rebuildable else source
            self._reference = plain_reference(whole.file, plan, inputs, target)
            del whole
        self._pipe = Pipeline(
            source,
            plan,
            loss=file.loss,
            inputs=inputs,
            device=own_device(plan, None),
            timeout_s=options.timeout_s,
            heartbeat=heartbeat,
        )
        if self._reference is not None:
            self._reference.check_weights(dict(self._pipe.named_parameters()), file.name)
        num_copies = 1 if self._pipe.ranks is None else plan.num_replicas
        if 2 * host_bytes(plan, num_copies=num_copies) > available_bytes():  # stages may take more than predicted
            return_large_blocks()
        self._optimizer = file.optimizer(list(self._pipe.parameters()))
        check_optimizer(self._optimizer, plan)
        self._scheduler = file.scheduler(self._optimizer)
        self._devices = self._pipe.runner.stages_by_device
        self._tied = TiedUpdates(self._optimizer, [self._pipe.runner.parameters_of(x) for x in self._devices])
        self._peak_bytes = [0] * len(self._devices)
        self._reserved_bytes = 0  # by a GPU's allocator
        self._errors: dict[str, float] = {}
        self._notes: tuple[str, ...] = ()  # of the run
        profiled, now = plan.model.file_digest, file_digest(file.name)
        if profiled and now and profiled != now:
            other = plan.model.name
            how = (
                "changed after it was profiled"
                if file.name == other
                else f"differs from the profiled model file {other}"
            )
            self._warn(
                f"{file.name} {how}: if its layers, their sizes, its loss or its optimizer differ, profile and balance again"
            )
        for note in stale_prediction_notes(plan):
            self._warn(note)
        if options.resume is not None:
            self._resume(options.resume)
        self.first_step = self._pipe.num_steps
        self._remaining = replace(options, num_steps=options.num_steps - self.first_step)
        self._num_ranks = 1 if self._pipe.ranks is None else dist.get_world_size()
        self._host = HostMeter(device=self._pipe.device.type, share=SPEED_SHARE / self._num_ranks)

    def step(self, index: int, report: ReportStep) -> StepRecord:
        """Run one step; in the last warm-up step memory is measured."""
        self._heartbeat.enter_step(index)
        num_done = index - self.first_step
        is_measured = num_done == self._remaining.memory_step
        is_timed = num_done >= self._remaining.num_warmup_steps
        if is_timed and index % self._num_ranks == self._pipe.rank:  # in turns, as in the profile nothing ran beside it
            self._host.read_if_due()
        try:
            inputs, target = self._data.take()
            step = (self._measured_step if is_measured else self._timed_step)(inputs, target)
            if self._scheduler is not None:
                self._scheduler.step()
        except (RunError, UsageError):
            raise
        except (Exception, SystemExit) as error:
            place = self._heartbeat.read(self._plan.layer_names).place
            raise RunError(f"{place}: {failure_text(error)}") from error
        report(index, step.loss)
        if self._options.save_every is not None and (index + 1) % self._options.save_every == 0:
            self._pipe.save(
                self._options.checkpoints,
                optimizer=self._optimizer,
                scheduler=self._scheduler,
                progress={"batches": self._data.position},
            )
        return step

    def _resume(self, path: str) -> None:
        loaded = self._pipe.restore(
            path,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            must_exist=self._options.must_resume,
        )
        if loaded is None:
            self._warn(f"no checkpoint is in {path} yet: the run began with the first step")
            return
        if loaded.note:
            self._warn(loaded.note)
        num_steps, wanted = self._pipe.num_steps, self._options.num_steps
        if num_steps >= wanted:
            raise UsageError(
                f"{loaded.path} has taken {num_steps} steps; --steps {wanted} counts from the first; expected "
                f"--steps {num_steps + 1} or more"
            )
        self._heartbeat.enter_action("reading")
        position, was, now = int(loaded.progress.get("batches", num_steps)), loaded.batch_size, self._plan.batch_size
        if was is not None and was != now:
            position, num_again = divmod(position * was, now)
            again = f", so that {counted(num_again, 'sample')} come again" if num_again else ""
            self._warn(
                f"{loaded.path} was saved with mini-batches of {was} samples, the plan has {now}: the data go on at batch "
                f"{position + 1} of that size{again}"
            )
        self._notes = (*self._notes, f"went on from {loaded.path}: steps {num_steps + 1} to {wanted} were run")
        if self._pipe.seed != self._options.seed:  # go on with the batches of the run that saved
            self._data = BatchStream(self._file, self._plan.batch_size, seed=self._pipe.seed)
        while self._data.position < position:
            self._data.take()

    def _warn(self, note: str) -> None:
        """Warn now, and add the note to the run."""
        self._notes = (*self._notes, note)
        if self._pipe.rank == 0:
            warnings.warn(note, stacklevel=2)

    def run(self, steps: Sequence[StepRecord]) -> Run:
        """Combine what all processes measured."""
        plan, options, load = self._plan, self._remaining, self._host.load()
        if self._pipe.ranks is None:
            run = virtual_run(plan, steps, peak_bytes=self._peak_bytes, options=options, loads=[load])
            errors = self._errors
        else:
            own = clock_id(), steps, self._peak_bytes[0], self._reserved_bytes, self._errors, load, usable_cores()
            gathered = RankGroup(group=dist.group.WORLD).run_on_all(lambda: own)
            clocks, found, peaks, reserved, of_ranks, loads, cores = zip(*gathered, strict=True)
            ranks = on_one_clock(found, clocks)
            errors = {name: error for own_errors in of_ranks for name, error in own_errors.items()}
            run = torch_run(
                plan,
                ranks,
                peak_bytes=peaks,
                reserved_bytes=reserved,
                options=options,
                loads=loads,
                num_hosts=len(set(clocks)),
                num_cores=len(set().union(*cores)),  # each rank is pinned to its own
            )
        check = None if self._reference is None else gradient_check(self._reference, errors, steps[0].loss)
        return replace(run, check=check, notes=(*self._notes, *run.notes))

    def _measured_step(self, inputs: Any, target: Any) -> StepRecord:
        engine = self._pipe.runner.engine
        held = [self._held_bytes(stages) for stages in self._devices]
        with traced_allocations(self._pipe.device.type) as trace:
            step = self._timed_step(inputs, target)
        peaks = (
            _device_peaks(trace, engine.action_starts_ns) if isinstance(engine, VirtualEngine) else [trace.peak_bytes()]
        )
        self._peak_bytes = [x + y for x, y in zip(held, peaks, strict=True)]
        self._reserved_bytes = trace.peak_reserved_bytes
        return step

    def _timed_step(self, inputs: Any, target: Any) -> StepRecord:
        pipe = self._pipe
        inputs, target, num_rows = pipe.agreed("step", inputs, target)
        if pipe.ranks is not None:
            with self._heartbeat.waiting("ranks"):
                dist.barrier()
        num_faults, start_s = page_faults(), time.perf_counter()
        loss = pipe.train_on(inputs, target, num_rows)
        if not math.isfinite(loss):
            raise RunError(pipe.explain_not_finite(inputs, num_rows, loss))
        if pipe.num_steps == 1 and self._reference is not None:
            found = {
                name: full_tensor(as_dense(x.grad)).cpu() for name, x in pipe.named_parameters() if x.grad is not None
            }
            self._errors = gradient_errors(self._reference.gradients, found)
        for device, stages in enumerate(self._devices):
            self._update(device, stages)
        actions = pipe.runner.engine.recorder.take()
        return StepRecord(
            loss=float(loss),
            actions=actions,
            start_s=start_s,
            end_s=time.perf_counter(),
            num_page_faults=page_faults() - num_faults,
        )

    def _update(self, device: int, stages: Sequence[StageModule]) -> None:
        """Run the optimizer for one device's parameters; the others have no gradients meanwhile."""
        own = self._pipe.runner.parameters_of(stages)
        ids = {id(x) for x in own}
        others = [] if len(self._devices) == 1 else [x for x in self._pipe.parameters() if id(x) not in ids]
        with set_aside(others), self._tied.of_device(device), self._pipe.runner.updating(device):
            self._optimizer.step()
            self._pipe.round_master_weights(own)
            self._optimizer.zero_grad()

    def _held_bytes(self, stages: Sequence[StageModule]) -> int:
        """Return the bytes that a device's stages hold between steps."""
        parameters = self._pipe.runner.parameters_of(stages)
        found = [x for p in parameters for x in self._optimizer.state.get(p, {}).values() if isinstance(x, Tensor)]
        resident = [x for stage in stages for x in self._pipe.runner.resident_tensors(stage)]
        return storage_bytes([*resident, *map(local_tensor, found)])


def _device_peaks(trace: AllocationTrace, action_starts: list[tuple[int, int]]) -> list[int]:
    """Return each device's peak bytes; a block belongs to the device whose action allocated it."""
    num_devices = 1 + max(device for _, device in action_starts)
    level, peak, owner = [0] * num_devices, [0] * num_devices, dict[int, tuple[int, int]]()
    moments = iter([*action_starts[1:], (2**63, 0)])
    device, (next_ns, next_device) = action_starts[0][1], next(moments)
    for event in trace.events:
        while event.time_ns >= next_ns:
            device, (next_ns, next_device) = next_device, next(moments)
        if event.num_bytes > 0:
            owner[event.address] = (device, event.num_bytes)
            level[device] += event.num_bytes
            peak[device] = max(peak[device], level[device])
        elif event.address in owner:
            holder, num_bytes = owner.pop(event.address)
            level[holder] -= num_bytes
    return peak
