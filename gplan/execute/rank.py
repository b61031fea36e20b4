"""One rank of the torch engine: its stage trained over gloo; afterwards every rank knows what all saw."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from gplan.execute.engine import TorchEngine
from gplan.execute.reference import gradient_check, gradient_errors, plain_reference, trained
from gplan.execute.results import torch_run
from gplan.execute.train import Prepared, ReportStep, RunOptions, Step, named_gradients, tell_loss
from gplan.nouns import Action, ActionKind, Plan, Run
from gplan.schedules import make_schedule
from profiler.memory.bytes import traced_allocations
from profiler.memory.storages import optimizer_state_bytes, storage_bytes
from profiler.model.load import ModelFile


def train_rank(file: ModelFile, plan: Plan, options: RunOptions, *, report: ReportStep) -> Run:
    """Train this rank's stage; the process group holds one rank per stage. Every rank returns the same run."""
    rank = _Rank(file, plan, options)
    steps = [rank.step(index, report) for index in range(options.num_steps)]
    gathered: list[tuple[list[Step], int, dict[str, float]]] = [([], 0, {})] * plan.num_stages
    dist.all_gather_object(gathered, (steps, rank.peak_bytes, rank.errors))
    ranks, peaks, errors = zip(*gathered, strict=True)
    check = None
    if rank.reference is not None:
        merged: Mapping[str, float] = {name: error for found in errors for name, error in found.items()}
        check = gradient_check(rank.reference, merged, next(s.loss for s in ranks[-1] if s.loss is not None))
    return torch_run(plan, ranks, peak_bytes=peaks, check=check, options=options)


class _Rank:
    def __init__(self, file: ModelFile, plan: Plan, options: RunOptions) -> None:
        self._prepared = Prepared(file, plan, seed=options.seed)
        self._options = options
        self._index = dist.get_rank()
        inputs, target = self._prepared.first_batch
        self.reference = plain_reference(file, plan, inputs, target) if options.check else None
        self._module = self._prepared.stage(self._index)
        parameters = trained(self._module)
        self._optimizer = file.optimizer(parameters) if parameters else None
        self._tied = _tied_groups(self._prepared, self._index)
        self._engine = TorchEngine(
            self._module,
            index=self._index,
            schedule=make_schedule(plan.schedule, num_stages=plan.num_stages, num_microbatches=plan.num_microbatches),
            inputs=self._prepared.boundaries[self._index],
            outputs=self._prepared.boundaries[self._index + 1],
            loss=self._prepared.microbatch_loss,
        )
        self.peak_bytes = 0
        self.errors: dict[str, float] = {}
        torch.manual_seed(options.seed + self._index)

    def step(self, index: int, report: ReportStep) -> Step:
        """One step; in the last step of the warm-up the memory is read."""
        inputs = self._prepared.next_inputs(index)
        if index == self._options.memory_step:
            held = self._held_bytes()
            with traced_allocations() as trace:
                step = self._timed_step(index, inputs)
            self.peak_bytes = held + trace.peak_bytes()
        else:
            step = self._timed_step(index, inputs)
        tell_loss(step.loss, index, report)
        return step

    def _timed_step(self, index: int, inputs: tuple[Tensor, ...]) -> Step:
        update = Action(self._index, ActionKind.OPTIMIZER, 0)
        dist.barrier()
        start_s = time.perf_counter()
        loss = self._engine.step(inputs)
        with self._engine.recorder.note(update):
            for parameter, group in self._tied:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)
        if index == 0 and self.reference is not None:
            self.errors = gradient_errors(self.reference, named_gradients(self._prepared.chain, [self._module]))
        with self._engine.recorder.note(update):
            if self._optimizer is not None:
                self._optimizer.step()
                self._optimizer.zero_grad()
        return Step(loss=loss, noted=self._engine.recorder.take(), start_s=start_s, end_s=time.perf_counter())

    def _held_bytes(self) -> int:
        """What the stage holds between two steps."""
        tensors = [*self._module.parameters(), *self._module.buffers(), *self._engine.buffers()]
        state = optimizer_state_bytes(self._optimizer) if self._optimizer is not None else 0
        return storage_bytes(tensors) + state


def _tied_groups(prepared: Prepared, index: int) -> list[tuple[torch.nn.Parameter, dist.ProcessGroup]]:
    """The parameters that this stage shares with others, each with the group of ranks that hold it."""
    groups = []
    parameters = dict(prepared.chain.model.named_parameters())
    for name, stages in prepared.tied_stages():
        group = dist.new_group(list(stages))  # every rank must take part in making every group
        if index in stages and parameters[name].requires_grad:
            groups.append((parameters[name], group))
    return groups
