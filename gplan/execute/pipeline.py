"""A model trained as a plan says, from the user's own script: what `gplan.pipeline` returns.

    pipe = gplan.pipeline(model, plan, loss=cross_entropy)
    optimizer = torch.optim.AdamW(pipe.parameters())
    for inputs, targets in batches:
        loss = pipe.step(inputs, targets)       # forwards and backwards of all micro-batches
        optimizer.step()
        optimizer.zero_grad()

Under torchrun each process holds one stage (of one replica); alone a process computes all of them, to the same
gradients. They are those of the plain model on the whole mini-batch (GPipe, Huang et al. 2019: synchronous, independent
of K and M), but for what each micro-batch has of its own: statistics of batch norm, and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from gplan.errors import GplanError, ModelError, RunError, UsageError
from gplan.execute import given, holdings
from gplan.execute.batches import Pass, joined, passes_of, rows_of, share_of
from gplan.execute.captured import Captured, Captures, named_state
from gplan.execute.checkpoint import Plain, State, latest, load_checkpoint, save_checkpoint
from gplan.execute.checkpoint.state import Scheduler
from gplan.execute.clipping import gradient_norm
from gplan.execute.engine import PassWork, TorchEngine
from gplan.execute.losses import Loss, check_reduction, checked_loss
from gplan.execute.moving_averages import MovingAverages
from gplan.execute.randomness import Draws, key_of
from gplan.execute.ranks import Telling, join
from gplan.execute.replicas import replicated
from gplan.execute.source import Source
from gplan.execute.stage import StageModule, StageWork
from gplan.execute.tied import TiedGradients
from gplan.execute.virtual import VirtualEngine
from gplan.execute.whereabouts import Whereabouts
from gplan.nouns import Action, ActionKind, Plan, Schedule
from gplan.schedules import make_schedule
from profiler.capture.chain import flat_tensors
from profiler.model.author import describe, root_cause
from profiler.model.inputs import describe_inputs, resized

_LOSS_KEY = key_of("the loss")


class Pipeline:
    """The stages of a plan that this process holds, ready to train."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        *,
        loss: Loss | None,
        inputs: Any,
        device: torch.device,
        timeout_s: float,
        whereabouts: Whereabouts | None = None,
    ) -> None:
        """`inputs` are those of any number of samples; they show what the model is called with.

        `whereabouts` takes notes of what this process does, for whoever watches it.
        """
        self.whereabouts = Whereabouts() if whereabouts is None else whereabouts
        self.whereabouts.enter_action("capturing")
        self.plan, self.device = plan, device
        self.num_steps = 0  # taken so far
        self.ranks = join(plan, device, timeout_s=timeout_s)
        self._loss, self._is_loss_new = loss, True
        self._seed = source.seed
        self._draws = Draws(source.seed, device)
        self._usual_inputs = resized(inputs, plan.microbatch_size)
        source, self._captures, usual = _captured(source, plan, self._usual_inputs, device)
        model = source.file.model
        self._names = holdings.names_of(model, usual, plan.num_stages)
        own = range(plan.num_stages) if self.ranks is None else range(self.ranks.stage, self.ranks.stage + 1)
        self._tensors = source.values([x for x in named_state(model) if x in self._names.of(own)], device)
        self._captures.make_real(self._tensors)
        self.stages = tuple(self._stage(index) for index in own)
        self._averages = [MovingAverages(self._captures.norms(usual, index)) for index in own]
        self.engine = self._engine()
        self.engine.recorder.whereabouts, self.engine.recorder.is_on_gpu = self.whereabouts, device.type == "cuda"
        self._trained = {name for name, x in model.named_parameters() if x.requires_grad}
        self._told = None if self.ranks is None else Telling(self.ranks)
        self._tied = TiedGradients(self._names.shared(), self._tensors, self.ranks, trained=self._trained)

    @property
    def engine_name(self) -> str:
        """torch (one process per stage) or virtual (all stages in this one)."""
        return "virtual" if self.ranks is None else "torch"

    @property
    def rank(self) -> int:
        """The global rank of this process; 0 where it is alone."""
        return 0 if self.ranks is None else dist.get_rank()

    # ---- training and evaluation

    def step(self, inputs: Any, targets: Any = None, *, scale: float = 1.0) -> Tensor:
        """The loss of a mini-batch, the same on every rank; its gradients are added to those of `parameters()`.

        `inputs` (a tensor, a tuple, or a dict by name) and `targets` have the samples in dimension 0: any number of them
        up to the plan's batch size (gplan/execute/batches.py says how they are divided). Every rank is given the same;
        ranks that hold neither the first nor the last stage may be given None where the mini-batch is a whole one.
        `scale` multiplies the gradients, such as 1/n to take the mean over n steps; the loss is not scaled.

        Raises UsageError for data that do not fit the plan, RunError with stage and layer where the model fails.
        """
        self.engine.recorder.take()
        for averages in self._averages:
            averages.abandon()  # of a step that failed
        inputs, num_rows = self._checked(inputs, targets)
        self._check_trainable(num_rows)
        given.check_training(scale, trained=self._trained, parameters=dict(self.named_parameters()))
        scale *= self._num_averaged
        losses = self._begin()
        with self._draws.apart(), self._tied.apart():
            passes = self._passes(num_rows)
            for part in passes:
                end = self._loss_end(targets, part, num_rows, scale)
                found = self._run(part, inputs, num_rows, end=end, trains=True, is_last=part is passes[-1])
                losses += [x.detach().double() / scale for x in found]
            with self.engine.recorder.note(Action(self.stages[0].index, ActionKind.OPTIMIZER, 0)):
                self._tied.add_up()
                for averages in self._averages:
                    averages.finish(self._sum_over_replicas)
        self.num_steps += 1
        return self._everywhere(losses)

    def eval_step(self, inputs: Any, targets: Any = None) -> Tensor:
        """The loss of any number of samples in evaluation mode, without gradients; the same on every rank."""
        inputs, num_rows = self._checked(inputs, targets)
        losses = self._begin()
        for part in self._passes(num_rows):
            end = self._loss_end(targets, part, num_rows, 1.0)
            losses += [x.double() for x in self._evaluate(part, inputs, num_rows, end)]
        return self._everywhere(losses)

    def predict(self, inputs: Any) -> Any:
        """The model's output for any number of samples in evaluation mode, on the ranks of the last stage; else None."""
        inputs, num_rows = self._checked(inputs, None)
        size, most = self.plan.microbatch_size, self.plan.num_microbatches
        found: list[tuple[Any, int]] = []
        for part in passes_of(num_rows, microbatch_size=size, most_microbatches=most):
            outputs = self._outputs(part, inputs, num_rows)
            found += [(joined(outputs), part.num_rows)] if outputs else []
        return joined(found) if found else None

    # ---- parameters and state

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters held here, by their names in the model; a tied one once."""
        return ((name, x) for name, x in self._tensors.items() if isinstance(x, nn.Parameter))

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters held here, for an optimizer.

        A stage without any gives one of no elements, since torch's optimizers refuse an empty list.
        """
        found = [x for _, x in self.named_parameters()]
        yield from found or [nn.Parameter(torch.empty(0, device=self.device))]

    def held_by(self, stage: StageModule) -> list[Tensor]:
        """What a stage of this process holds between two steps: its parameters and buffers, and what it receives into."""
        names = self._names.of([stage.index])
        return [*(self._tensors[name] for name in names), *self.engine.buffers(stage.index)]

    def clip_grad_norm_(self, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all stages so that their norm together is at most `max_norm`; the norm before.

        A tied parameter counts once, as in the plain model.
        """
        own = [
            x
            for name, x in self.named_parameters()
            if self.ranks is None or self._names.first_stage(name) == self.ranks.stage
        ]
        group = None if self.ranks is None else self.ranks.pipeline
        norm = gradient_norm(own, norm_type, device=self.device, group=group)
        nn.utils.clip_grads_with_norm_([x for _, x in self.named_parameters()], max_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """What is held here of the model's state dict, under the model's own keys: all of it in one process."""
        return holdings.state_dict(self._names.saved, self._tensors)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's whole state dict, on the CPU of global rank 0; empty on other ranks. The plain model loads it."""
        if self.ranks is None:
            return {key: x.to("cpu", copy=True) for key, x in self.state_dict().items()}
        own = {key: x.cpu() for key, x in self.state_dict().items()}
        parts: list[dict[str, Tensor] | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own if self.ranks.replica == 0 else {}, parts)
        merged = {key: x for part in parts or () if part for key, x in part.items()}
        return {key: merged[key] for key in self._names.saved if key in merged}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of a state dict of the model, whole or this process's part of it.

        Raises FileError for keys that are missing or unknown, or of another shape.
        """
        holdings.load_state_dict(self.state_dict(), state, known=self._names.saved)

    def save(
        self,
        directory: str | Path,
        *,
        optimizer: Optimizer | None = None,
        scheduler: Scheduler | None = None,
        progress: Mapping[str, Plain] | None = None,
    ) -> Path:
        """Write a checkpoint, `directory`/step-N, that any plan for the same model can go on from; every rank must call it.

        It holds parameters and buffers, the states of optimizer, scheduler and torch's generator, the number of steps
        taken, and `progress` (plain values, such as the position in the data). It is there whole or not at all. Raises
        RunError, on every rank, where it cannot be written; earlier checkpoints then stay as they are.
        """
        self.whereabouts.enter_action("saving")
        known = {"gplan.steps": self.num_steps, "gplan.seed": self._seed}
        return save_checkpoint(
            Path(directory),
            self._state(optimizer, scheduler),
            step=self.num_steps,
            progress={**(progress or {}), **known},
            digest=self.plan.model.digest,
            group=dist.group.WORLD if self.ranks is not None else None,
        )

    def load(
        self, path: str | Path, *, optimizer: Optimizer | None = None, scheduler: Scheduler | None = None
    ) -> dict[str, Plain]:
        """Go on from a checkpoint, or from the latest one in a folder, that was saved with this or another plan.

        Parameters, buffers and what else is given are set in place, and random numbers continue as they would have.
        Returns the `progress` that was saved. Raises FileError where there is no whole checkpoint of this model.
        """
        self.whereabouts.enter_action("restoring")
        progress = load_checkpoint(
            latest(Path(path)),
            self._state(optimizer, scheduler),
            digest=self.plan.model.digest,
            group=dist.group.WORLD if self.ranks is not None else None,
        )
        self.num_steps, self._seed = int(progress.pop("gplan.steps")), int(progress.pop("gplan.seed"))
        self._draws.reseed(self._seed)
        return progress

    # ---- how it is done

    def _state(self, optimizer: Optimizer | None, scheduler: Scheduler | None) -> State:
        return State(
            model=self.state_dict(),
            parameters={name: x for name, x in self.named_parameters() if x.requires_grad},
            optimizers=[] if optimizer is None else [optimizer],
            schedulers=[] if scheduler is None else [scheduler],
            stage=None if self.ranks is None else self.ranks.stage,
        )

    def _stage(self, index: int) -> StageModule:
        names = self._names.used_by_stage[index]
        parameters = [x for name in names if isinstance(x := self._tensors[name], nn.Parameter)]
        return StageModule(index, parameters, self._draws, self.whereabouts)

    def _engine(self) -> TorchEngine | VirtualEngine:
        if self.ranks is None:
            return VirtualEngine(self.stages, device=self.device)
        (stage,) = self.stages
        module: nn.Module = stage if self.ranks.replicas is None else replicated(stage, self.ranks.replicas)
        return TorchEngine(
            module, stage, num_stages=self.plan.num_stages, device=self.device, group=self.ranks.pipeline
        )

    @property
    def _num_averaged(self) -> int:
        """Over how many replicas gradients are averaged, where they should be added up."""
        return self.ranks.num_replicas if self.ranks is not None else 1

    def _passes(self, num_rows: int) -> tuple[Pass, ...]:
        """What this process does of a mini-batch: its replica's share, or, alone, those of all replicas in turn."""
        num_replicas = self.plan.num_replicas
        replicas = range(num_replicas) if self.ranks is None else [self.ranks.replica]
        shares = [share_of(num_rows, replica=x, num_replicas=num_replicas) for x in replicas]
        sizes = {"microbatch_size": self.plan.microbatch_size, "most_microbatches": self.plan.num_microbatches}
        return tuple(x for share in shares for x in passes_of(len(share), **sizes, first_row=share.start))

    def _checked(self, inputs: Any, targets: Any) -> tuple[Any, int]:
        """The inputs and how many samples they are; those of a whole mini-batch where None is given."""
        if inputs is None:
            if self.stages[0].index == 0:
                raise UsageError("the inputs are None, and this process holds the first stage; expected a batch")
            inputs = resized(self._usual_inputs, self.plan.batch_size)
        num_rows = given.num_samples(inputs, usual=self._usual_inputs)
        given.check_targets(targets, num_rows)
        return inputs, num_rows

    def _check_trainable(self, num_rows: int) -> None:
        plan = self.plan
        if num_rows > plan.batch_size:
            raise UsageError(
                f"got {num_rows} samples; the plan is for at most {plan.batch_size} a step ({plan.num_replicas} x "
                f"{plan.num_microbatches} micro-batches of {plan.microbatch_size}): give fewer and accumulate over several "
                "steps (scale=1/n), or balance again with more micro-batches"
            )
        if num_rows < plan.num_replicas:
            raise UsageError(f"got {num_rows} samples for {plan.num_replicas} replicas; expected at least one for each")

    def _loss_end(self, targets: Any, part: Pass, num_rows: int, scale: float) -> End:
        """What follows the last stage: the loss, scaled so that those of all micro-batches add up to the mini-batch's."""
        loss = self._loss
        if loss is None:
            raise UsageError(
                "there is no loss; pass one: gplan.pipeline(model, plan, loss=torch.nn.functional.cross_entropy)"
            )
        weight = part.microbatch_size / num_rows if self.plan.loss_reduction == "mean" else 1.0

        def end(output: Any, microbatch: int) -> Tensor:
            target = to_device(rows_of(targets, part.microbatch_rows(microbatch), num_rows), self.device)
            self._draws.seed(_LOSS_KEY, microbatch)
            value = checked_loss(loss(output, target), trains=torch.is_grad_enabled())
            if self._is_loss_new:
                self._is_loss_new = False
                check_reduction(loss, output, target, num_rows=part.microbatch_size, expected=self.plan.loss_reduction)
            return value * (weight * scale)

        return end

    def _outputs(self, part: Pass, inputs: Any, num_rows: int) -> list[tuple[Any, int]]:
        """The model's output for every micro-batch of a pass, with its size, where the last stage is held here."""
        found: list[tuple[Any, int]] = []

        def keep(output: Any, _microbatch: int) -> Tensor:
            found.append((output, part.microbatch_size))
            return torch.zeros((), device=self.device)

        self._evaluate(part, inputs, num_rows, keep)
        return found

    def _evaluate(self, part: Pass, inputs: Any, num_rows: int, end: End) -> list[Tensor]:
        with torch.inference_mode(False), torch.no_grad(), self._draws.apart():
            return self._run(part, inputs, num_rows, end=end, trains=False)

    def _run(
        self, part: Pass, inputs: Any, num_rows: int, *, end: End, trains: bool, is_last: bool = True
    ) -> list[Tensor]:
        """One pass through the stages; the values of `end` by micro-batch, where the last stage is held here."""
        captured = self._captured_for(rows_of(inputs, part.microbatch_rows(0), num_rows), trains)
        for stage in self.stages:
            stage.begin(self._stage_work(captured, stage, part, trains))
        self._draws.begin(self.num_steps, part.first_rows)
        work = PassWork(
            captured=captured,
            schedule=self._schedule(part.num_microbatches, trains),
            inputs=to_device(flat_tensors(rows_of(inputs, part.rows, num_rows), what="the inputs"), self.device),
            at_end=lambda outputs, microbatch: end(captured.chain.model_output(outputs), microbatch),
            is_last=is_last,
        )
        try:
            with self._captures.in_mode(training=trains):
                return self.engine.run(work)
        except GplanError:
            raise
        except Exception as error:
            raise self._failure(error) from error

    def _captured_for(self, inputs: Any, trains: bool) -> Captured:
        try:
            return self._captures.for_inputs(inputs, training=trains)
        except ModelError as error:
            usual, found = describe_inputs(self._usual_inputs), describe_inputs(inputs)
            raise ModelError(
                f"micro-batches were planned to be {usual}; the model fails with {found}: {error}"
            ) from error

    def _pieces(self, captured: Captured, stage: StageModule, trains: bool) -> tuple[nn.Module, ...]:
        return self._captures.pieces(captured, stage, self.plan.recompute if trains else "never")

    def _sum_over_replicas(self, tensor: Tensor) -> None:
        if self.ranks is not None and self.ranks.replicas is not None:
            dist.all_reduce(tensor, group=self.ranks.replicas)

    def _stage_work(self, captured: Captured, stage: StageModule, part: Pass, trains: bool) -> StageWork:
        averages = self._averages[self.stages.index(stage)]
        norms = self._captures.norms(captured, stage.index) if trains else ()
        return StageWork(
            pieces=self._pieces(captured, stage, trains),
            layers=captured.notes,
            num_microbatches=part.num_microbatches,
            recompute=self.plan.recompute if trains else "never",
            around=(lambda: averages.microbatch(norms)) if norms else nullcontext,
        )

    def _schedule(self, num_microbatches: int, trains: bool) -> Schedule:
        num_stages = self.plan.num_stages
        if trains:
            return make_schedule(self.plan.schedule, num_stages=num_stages, num_microbatches=num_microbatches)
        return forwards_alone(num_stages, num_microbatches)

    def _begin(self) -> list[Tensor]:
        """No losses yet; the other ranks wait for those of the last stage."""
        if self._told is not None:
            self._told.begin()
        return []

    def _everywhere(self, losses: list[Tensor]) -> Tensor:
        """The sum of the losses of all micro-batches, of all replicas, on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:
            total += loss
        if self.ranks is None or self._told is None:
            return total
        if self.ranks.is_last and self.ranks.replicas is not None:
            with self.whereabouts.waiting("sums"):
                dist.all_reduce(total, group=self.ranks.replicas)
        with self.whereabouts.waiting("sums"):
            return self._told.end(total)

    def _failure(self, error: Exception) -> RunError:
        """What failed, and where."""
        action = self.engine.recorder.under_way
        stage = next((x for x in self.stages if action is not None and x.index == action.stage), self.stages[0])
        words = [f"step {self.num_steps}", f"stage {stage.index}"]
        if action is not None:
            kind = "forward" if action.kind is ActionKind.FORWARD else "backward"
            words.append(f"{kind} of micro-batch {action.microbatch}")
        if stage.layer is not None:
            words.append(f"layer {stage.layer}")
        return RunError(f"{', '.join(words)}: {describe(root_cause(error))}")


End = Callable[[Any, int], Tensor]
"""(the model's output, micro-batch) -> what the last stage makes of it, a scalar."""


def _captured(
    source: Source, plan: Plan, inputs: Any, device: torch.device
) -> tuple[Source, Captures, Captured]:
    """The model captured without its weights, or, where its code needs them, with all of them."""
    captures = Captures(source.file.model, plan, name=source.file.name, device=device)
    try:
        return source, captures, captures.for_inputs(inputs, training=True)
    except ModelError as error:
        if not source.can_be_whole:
            raise ModelError(
                f"{source.file.name} fails with inputs {describe_inputs(inputs)}, as the plan for {plan.model.name} has them: "
                f"{error}"
            ) from error
    return _captured(source.whole(), plan, inputs, device)


def forwards_alone(num_stages: int, num_microbatches: int) -> Schedule:
    """The order of an evaluation: micro-batches go through the stages one after the other."""
    return Schedule(
        name="forward",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        orders=tuple(
            tuple(Action(stage, ActionKind.FORWARD, m) for m in range(num_microbatches)) for stage in range(num_stages)
        ),
    )


def to_device(value: Any, device: torch.device) -> Any:
    """A structure of tensors on a device; copies do not wait where the memory is pinned."""
    return pytree.tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), value)
