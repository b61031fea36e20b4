"""The training loop over an engine: steps, losses, times, one memory reading, and the check against the plain model.

A step is timed from the moment all ranks stand ready, its batch at hand, to the end of the last optimizer. The first
steps warm up; in one of them every allocation is recorded, which slows it down, so it is not timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gplan.errors import FileError, ModelError, UsageError
from gplan.execute.recorder import Noted
from gplan.execute.reference import chunks
from gplan.execute.stage import StageModule, stage_module
from gplan.nouns import Plan
from profiler.capture.chain import Chain, Tensors, TensorSpec
from profiler.capture.model import capture
from profiler.model.data import check_batch, check_target
from profiler.model.load import ModelFile

NUM_WARMUP_STEPS = 3
"""Steps whose times are left out; the last of them is the one in which memory is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to carry a plan out."""

    num_steps: int = 20
    check: bool = False
    seed: int = 0
    timeout_s: float = 120.0  # longest silence of the processes before the run is given up

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise UsageError(f"asked for {self.num_steps} steps; expected at least 1")
        if not self.timeout_s > 0:
            raise UsageError(f"the timeout is {self.timeout_s:g} s; expected more than 0")

    @property
    def memory_step(self) -> int:
        """The step in which memory is read: the last of the warm-up, or the first of a run without one."""
        return max(0, self.num_warmup_steps - 1)

    @property
    def num_warmup_steps(self) -> int:
        """Steps left out of the medians; none where there are too few to spare."""
        return NUM_WARMUP_STEPS if self.num_steps > NUM_WARMUP_STEPS else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one process saw of one step."""

    loss: float | None
    noted: tuple[Noted, ...]  # the optimizers included
    start_s: float
    end_s: float


class Prepared:
    """A model file captured for a plan: its stages, and the batches one after the other."""

    def __init__(self, file: ModelFile, plan: Plan, *, seed: int) -> None:
        file.require("batches", "loss", "optimizer")
        self.file, self.plan = file, plan
        self._batches = file.batches(plan.batch_size)
        self._targets: list[Any] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._data_state = torch.random.get_rng_state()  # the same on every rank, for batches drawn at random
        self.first_batch = self._next_batch()
        inputs = chunks(self.first_batch[0], plan.num_microbatches)[0]
        self.chain = _in_plans_order(capture(file.model, inputs, granularity=plan.granularity), plan, file)
        tensors = check_batch(inputs, plan.microbatch_size, what="the inputs of a micro-batch")
        layers = self.chain.boundaries(tensors)
        self.boundaries: tuple[tuple[TensorSpec, ...], ...] = tuple(layers[i] for i in (0, *plan.cuts, len(self.chain)))

    def stage(self, index: int) -> StageModule:
        """The module of one stage."""
        plan = self.plan
        return stage_module(
            self.chain, plan.stages[index], num_microbatches=plan.num_microbatches, recompute=plan.recompute
        )

    def next_inputs(self, step: int) -> Tensors:
        """The input tensors of a step's mini-batch; its targets are kept for `microbatch_loss`."""
        inputs, target = self.first_batch if step == 0 else self._next_batch()
        self._targets = chunks(target, self.plan.num_microbatches)
        return check_batch(inputs, self.plan.batch_size, what="the inputs of a mini-batch")

    def microbatch_loss(self, outputs: Tensors, microbatch: int) -> Tensor:
        """The share of one micro-batch in the loss of the step."""
        loss = self.file.loss(self.chain.model_output(outputs), self._targets[microbatch])
        return loss / self.plan.num_microbatches if self.plan.loss_reduction == "mean" else loss

    def tied_stages(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Parameters that several stages hold, with those stages, in an order that all ranks agree on."""
        holders: dict[int, list[int]] = {}
        names = {id(parameter): name for name, parameter in self.chain.model.named_parameters()}
        for stage in self.plan.stages:
            for parameter in self.chain.stage(stage.first_layer, stage.end_layer).parameters():
                holders.setdefault(id(parameter), []).append(stage.index)
        return tuple((names[key], tuple(stages)) for key, stages in holders.items() if len(stages) > 1)

    def _next_batch(self) -> tuple[Any, Any]:
        size = self.plan.batch_size
        with torch.random.fork_rng(devices=[]):
            torch.random.set_rng_state(self._data_state)
            inputs, target = next(self._batches)
            self._data_state = torch.random.get_rng_state()
        check_batch(inputs, size, what=f"the inputs that batches({size}) of {self.file.name} gives")
        check_target(target, size, what=f"the targets that batches({size}) of {self.file.name} gives")
        return inputs, target


def _in_plans_order(chain: Chain, plan: Plan, file: ModelFile) -> Chain:
    """The captured layers as the plan lays them out; raises FileError where it was made for others."""
    _check_layers(chain, plan, file)
    if chain.names == plan.layer_names:
        return chain
    place = {name: layer for layer, name in enumerate(chain.names)}
    try:
        return chain.reordered([place[name] for name in plan.layer_names])
    except ModelError as error:
        raise FileError(f"the plan's order of layers is impossible: {error}; balance again") from error


def _check_layers(chain: Chain, plan: Plan, file: ModelFile) -> None:
    if {*chain.names} != {*plan.layer_names}:
        found, made_for = (f"{len(x)} layers ({x[0]} to {x[-1]})" for x in (chain.names, plan.layer_names))
        odd = min({*chain.names} ^ {*plan.layer_names})
        raise FileError(
            f"the plan was made for {plan.model.name} with {made_for}; {file.name} has {found}; only one of them has "
            f"{odd}; profile and balance again"
        )
    if chain.digest() != plan.model.digest:
        raise FileError(
            f"the plan was made for a {plan.model.name} with other parameters (fingerprint "
            f"{plan.model.digest}, now {chain.digest()}); profile and balance again with the same settings"
        )


def named_gradients(chain: Chain, modules: Sequence[nn.Module]) -> Mapping[str, Tensor]:
    """The gradients of some stages by the parameters' names in the model."""
    names = {id(parameter): name for name, parameter in chain.model.named_parameters()}
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return {names[id(x)]: x.grad for x in parameters if x.grad is not None}


ReportStep = Callable[[int, float], None]
"""Called with the step's number and its loss, where the process has it."""


def tell_loss(loss: float | None, step: int, report: ReportStep) -> None:
    """Report a step's loss where this process has it; raise ModelError where training has run away."""
    if loss is None:
        return
    if not math.isfinite(loss):
        raise ModelError(f"the loss is {loss} at step {step}; lower the learning rate or look at the data")
    report(step, loss)
