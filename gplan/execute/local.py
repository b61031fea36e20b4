"""A run of the virtual engine: all stages in this process, on one device's share of the cores."""

from __future__ import annotations

import time

import torch

from gplan.execute.reference import gradient_check, gradient_errors, plain_reference, trained
from gplan.execute.results import virtual_run
from gplan.execute.train import Prepared, ReportStep, RunOptions, Step, named_gradients, tell_loss
from gplan.execute.virtual import VirtualEngine
from gplan.nouns import Action, ActionKind, Plan, Run
from gplan.schedules import make_schedule
from profiler.capture.chain import Tensors
from profiler.host.share import device_share
from profiler.memory.bytes import AllocationTrace, now_ns, traced_allocations
from profiler.memory.storages import optimizer_state_bytes, storage_bytes
from profiler.model.load import ModelFile


def train_virtual(file: ModelFile, plan: Plan, options: RunOptions, *, report: ReportStep) -> Run:
    """Train all stages of the plan here, one action after the other."""
    with device_share(plan.device.num_threads):
        loop = _Loop(file, plan, options)
        steps = [loop.step(index, report) for index in range(options.num_steps)]
    check = None
    if loop.reference is not None:
        check = gradient_check(loop.reference, loop.errors, next(s.loss for s in steps if s.loss is not None))
    return virtual_run(plan, steps, peak_bytes=loop.peak_bytes, check=check, options=options)


class _Loop:
    def __init__(self, file: ModelFile, plan: Plan, options: RunOptions) -> None:
        self._prepared = Prepared(file, plan, seed=options.seed)
        self._options = options
        inputs, target = self._prepared.first_batch
        self.reference = plain_reference(file, plan, inputs, target) if options.check else None
        self._modules = [self._prepared.stage(stage.index) for stage in plan.stages]
        self._optimizers = [file.optimizer(x) if (x := trained(module)) else None for module in self._modules]
        self._engine = VirtualEngine(
            self._modules,
            schedule=make_schedule(plan.schedule, num_stages=plan.num_stages, num_microbatches=plan.num_microbatches),
            boundaries=self._prepared.boundaries,
            loss=self._prepared.microbatch_loss,
        )
        self.peak_bytes: list[int] = [0] * plan.num_stages
        self.errors: dict[str, float] = {}
        torch.manual_seed(options.seed)

    def step(self, index: int, report: ReportStep) -> Step:
        """One step; in the last step of the warm-up the memory is read."""
        inputs = self._prepared.next_inputs(index)
        if index == self._options.memory_step:
            held = [self._held_bytes(stage) for stage in range(len(self._modules))]
            with traced_allocations() as trace:
                step = self._timed_step(index, inputs)
            self.peak_bytes = [
                x + y for x, y in zip(held, _stage_peaks(trace, self._engine.action_starts_ns), strict=True)
            ]
        else:
            step = self._timed_step(index, inputs)
        tell_loss(step.loss, index, report)
        return step

    def _timed_step(self, index: int, inputs: Tensors) -> Step:
        start_s = time.perf_counter()
        loss = self._engine.step(inputs)
        if index == 0 and self.reference is not None:
            self.errors = gradient_errors(self.reference, named_gradients(self._prepared.chain, self._modules))
        for stage, optimizer in enumerate(self._optimizers):
            self._engine.action_starts_ns.append((now_ns(), stage))
            with self._engine.recorder.note(Action(stage, ActionKind.OPTIMIZER, 0)):
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
        return Step(loss=loss, noted=self._engine.recorder.take(), start_s=start_s, end_s=time.perf_counter())

    def _held_bytes(self, stage: int) -> int:
        """What a stage holds between two steps."""
        module, optimizer = self._modules[stage], self._optimizers[stage]
        tensors = [*module.parameters(), *module.buffers(), *self._engine.buffers(stage)]
        return storage_bytes(tensors) + (optimizer_state_bytes(optimizer) if optimizer is not None else 0)


def _stage_peaks(trace: AllocationTrace, action_starts: list[tuple[int, int]]) -> list[int]:
    """The most that each stage held: a block belongs to the stage whose action was under way when it was given."""
    num_stages = 1 + max(stage for _, stage in action_starts)
    level, peak, owner = [0] * num_stages, [0] * num_stages, dict[int, tuple[int, int]]()
    moments = iter([*action_starts[1:], (2**63, 0)])
    stage, (next_ns, next_stage) = action_starts[0][1], next(moments)
    for event in trace.events:
        while event.time_ns >= next_ns:
            stage, (next_ns, next_stage) = next_stage, next(moments)
        if event.num_bytes > 0:
            owner[event.address] = (stage, event.num_bytes)
            level[stage] += event.num_bytes
            peak[stage] = max(peak[stage], level[stage])
        elif event.address in owner:
            holder, num_bytes = owner.pop(event.address)
            level[holder] -= num_bytes
    return peak
