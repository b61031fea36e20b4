"""`gplan.pipeline`: trains a model with a plan from the user's own script.

    pipe = gplan.pipeline(model, plan, loss=cross_entropy)
    optimizer = torch.optim.AdamW(pipe.parameters())
    for inputs, targets in batches:
        loss = pipe.step(inputs, targets)       # forwards and backwards of all micro-batches
        optimizer.step()
        optimizer.zero_grad()

Under torchrun each process holds the stages of one device of one replica. A single process runs all stages with the
virtual engine. Gradients equal those of the plain model on the whole mini-batch, for every K and M (synchronous
training as in GPipe, Huang et al. 2019), except for batch-norm statistics and random numbers, which are per
micro-batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gplan.core import Plan
from gplan.core.errors import GplanError, ModelError, UsageError
from gplan.core.units import counted
from gplan.runtime import stage_state, validation
from gplan.runtime.agreement import Agreement
from gplan.runtime.buffers import SharedBuffers, check_norms, strict_norm
from gplan.runtime.capture_cache import CaptureCache, CapturedModel, named_tensors
from gplan.runtime.checkpoint.collective import RankGroup
from gplan.runtime.gradient_sync import TiedGradients, broadcast_first_replica, copied_weights, hooked_once
from gplan.runtime.master_weights import MasterWeights
from gplan.runtime.microbatches import Pass, concat_outputs, replica_rows, split_into_passes, take_rows
from gplan.runtime.model_source import ModelLike, ModelSource, open_source
from gplan.runtime.model_use import LossReads, UnchangedModel
from gplan.runtime.peers import check_own_gpu, local_place
from gplan.runtime.process_group import LossExchange, join_process_group
from gplan.runtime.random_streams import RandomStreams, seed_key
from gplan.runtime.sharded_replicas import divided_names, shard_stages
from gplan.runtime.stage_module import StageModule
from gplan.runtime.stage_runner import OutputFn, StageRunner, to_device
from gplan.runtime.stage_state import StageState
from gplan.runtime.validation import Loss, LossError, check_reduction, num_samples, runs_on_gpus
from gplan_profiler.capture.chain import Chain, autocast
from gplan_profiler.capture.module_attributes import unreadable
from gplan_profiler.capture.python_state import StateError
from gplan_profiler.host.heartbeat import Heartbeat
from gplan_profiler.host.host_info import cuda_problem, keep_freed_memory
from gplan_profiler.host.links import deprioritize_connection_threads
from gplan_profiler.model.compiled import uncompiled
from gplan_profiler.model.error_location import describe, own_gradients_text
from gplan_profiler.model.lazy_build import random_state_kept
from gplan_profiler.model.load import checked_loss, loss_of_output
from gplan_profiler.model.model_reference import SettingValue, describe_inputs, parse_input_shapes, resize_inputs
from gplan_profiler.model.precision import convert_floats, input_dtype


def open_pipeline(
    model: ModelLike,
    plan: Plan,
    *,
    loss: Loss | None,
    inputs: Any,
    settings: Mapping[str, SettingValue],
    seed: int,
    weights: str | Path | None,
    device: str | None,
    timeout_s: float,
    broadcast_batches: bool,
) -> Pipeline:
    """Build the pipeline of a module, a function that builds one, or a model file; see `gplan.pipeline`."""
    with random_state_kept():
        source = open_source(
            model,
            settings=settings,
            functions={"loss": loss},
            seed=seed,
            weights=weights,
            precision=plan.precision,
        )
        if loss is None and source.file.has("loss"):
            loss = source.file.loss
        if inputs is None:
            inputs = example_inputs(source, plan)
        inputs = convert_floats(inputs, input_dtype(plan.precision))
        num_samples(inputs, usual=inputs)
        place = own_device(plan, device)
        if place.type == "cpu":
            keep_freed_memory()  # as in profiling, so that steps take as long as predicted
        return Pipeline(
            source,
            plan,
            loss=loss,
            inputs=inputs,
            device=place,
            timeout_s=timeout_s,
            broadcast_batches=broadcast_batches,
        )


def example_inputs(source: ModelSource, plan: Plan) -> Any:
    """Return example inputs: those of the model file, else made from the shapes in the plan."""
    if {"example_inputs", "batches"} & source.file.functions.keys() or source.file.fixed_inputs is not None:
        return source.file.example_inputs(plan.microbatch_size)
    if not plan.model.inputs:
        raise UsageError(
            f"the plan has no input shapes for {plan.model.name}; pass inputs=..., a batch of any number of samples"
        )
    return parse_input_shapes(plan.model.inputs)


def own_device(plan: Plan, device: str | None) -> torch.device:
    """Return the device of this process: `device` if given, else its own GPU if the plan is for GPUs, else the CPU."""
    if device is None:
        device = "cuda" if runs_on_gpus(plan) else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r} is not known; expected 'cpu', 'cuda' or 'cuda:1'") from error
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} cannot be used; expected 'cpu', 'cuda' or 'cuda:1'")
    if found.type == "cuda" and (problem := cuda_problem()) is not None:
        raise UsageError(f"device {device!r}: {problem}; or use device='cpu'")
    if found.type != "cuda":
        return found
    index = found.index if found.index is not None else local_place()[0]
    if ":" not in device:
        check_own_gpu(index, "run all stages in one process (`gplan run --engine virtual`), or use device='cpu'")
    elif index >= (num_gpus := torch.cuda.device_count()):
        raise UsageError(
            f"device {device!r} does not exist; this host has {counted(num_gpus, 'GPU')}, numbered from 0: choose one, or use "
            "device='cpu'"
        )
    torch.cuda.set_device(index)  # events, synchronization and nccl's own tensors use the current device
    return torch.device("cuda", index)


_LOSS_KEY = seed_key("the loss")


_OF_MODULES = {
    **dict.fromkeys(
        ("train", "eval", "training", "__call__"),
        "pipe.step trains, pipe.eval_step and pipe.predict evaluate, each in its own mode",
    ),
    **dict.fromkeys(
        ("to", "cuda", "cpu", "float", "double", "half", "bfloat16"),
        "the device is chosen by gplan.pipeline(..., device=...), the precision by gplan profile --precision",
    ),
    **dict.fromkeys(
        ("modules", "named_modules", "children", "named_children", "get_submodule", "apply", "register_forward_hook"),
        "change the model before you hand it to gplan.pipeline",
    ),
    "zero_grad": "call optimizer.zero_grad()",
    "module": "the plain model takes pipe.full_state_dict(), which is on rank 0",
}
"""What to use in place of some attributes of an nn.Module."""


class Pipeline(StageState):
    """The stages of a plan that this process holds, ready to train."""

    def __getattr__(self, name: str) -> Any:
        if name in _OF_MODULES:
            raise AttributeError(
                f"a pipeline is no nn.Module and has no {name}: {_OF_MODULES[name]}", name=name, obj=self
            )
        return super().__getattribute__(name)  # raises what was raised before

    def __call__(self, *_arguments: Any, **_options: Any) -> NoReturn:
        raise UsageError(f"a pipeline cannot be called like a model: {_OF_MODULES['__call__']}")

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise UsageError(
            "a pipeline cannot be copied or pickled, as it holds what is on this rank; save it with pipe.save, and for an "
            "average of weights keep copies of pipe.parameters()"
        )

    def __init__(
        self,
        source: ModelSource,
        plan: Plan,
        *,
        loss: Loss | None,
        inputs: Any,
        device: torch.device,
        timeout_s: float,
        heartbeat: Heartbeat | None = None,
        broadcast_batches: bool = False,
    ) -> None:
        """`inputs`, of any number of samples, show the structure, shapes and dtypes of the model's arguments."""
        notes = Heartbeat() if heartbeat is None else heartbeat
        notes.enter_action("capturing")
        self.plan = plan
        ranks = join_process_group(plan, device, timeout_s=timeout_s)
        if ranks is not None:
            source = source.seeded(RankGroup(group=dist.group.WORLD).run_on_all(lambda: source.seed)[0])
        random_streams = RandomStreams(source.seed, device)
        self._loss, self._is_loss_new, self._has_warned = loss, True, False
        self._usual_inputs = resize_inputs(inputs, plan.microbatch_size)
        source, captures, usual = _captured(source, plan, self._usual_inputs, device, loss)
        self._captures, self._loss = captures, self._loss or _own_loss(usual.chain)
        model = source.file.model
        names = stage_state.state_names(model, usual, plan.num_stages)
        if ranks is not None:
            check_norms(model, usual, names, plan)
        self._shared_buffers = SharedBuffers(model, usual, names, plan)
        own = range(plan.num_stages) if ranks is None else ranks.stages
        like = named_tensors(model)
        held = [own] if ranks is None else [[x.index for x in plan.stages_of(i)] for i in range(plan.num_devices)]
        wanted = [names.on_stages(stages) for stages in held]
        notes.enter_action("loading")
        # Without a file of weights the first rank builds the model and sends the others theirs.
        is_sent = ranks is not None and dist.get_rank() > 0 and source.weights is None
        with notes.waiting("ranks") if is_sent else nullcontext():
            tensors = source.values([[x for x in like if x in some] for some in wanted], device, ranks)
        if ranks is not None:
            broadcast_first_replica(tensors.values(), ranks)
        divided = divided_names(plan, names, model, ranks)
        whole = {name: x for name, x in tensors.items() if name not in divided}
        self._masters = MasterWeights(whole, like if plan.precision.master_weights else whole)
        computing = {**tensors, **self._masters.computing}
        stages = [
            StageModule(
                index,
                [x for name in names.used_by_stage[index] if isinstance(x := computing[name], nn.Parameter)],
                random_streams,
                notes,
            )
            for index in own
        ]
        shards = shard_stages(plan, usual, names, stages, computing, divided, like=like, ranks=ranks)
        captures.set_tensors({**computing, **shards.gathered}, shards.groups, around_capture=shards.allocated)
        tensors.update(shards.parts)
        self._trained = {name for name, x in model.named_parameters() if x.requires_grad}
        copies = copied_weights(names.shared(), tensors, ranks, trained=self._trained, divided=divided)
        super().__init__(
            names,
            tensors,
            digest=plan.model.digest,
            batch_size=plan.batch_size,
            ranks=ranks,
            random_streams=random_streams,
            heartbeat=notes,
            agreement=Agreement(ranks, notes, copies=copies, broadcasts=broadcast_batches),
        )
        self.runner = StageRunner(
            captures,
            usual,
            stages=stages,
            names=names,
            tensors=tensors,
            computing={**computing, **shards.parts},
            ranks=ranks,
            random_streams=random_streams,
            heartbeat=notes,
        )
        self._unchanged = UnchangedModel(source.stored, usual) if source.opened is None else None
        self._loss_reads = LossReads(
            model,
            usual,
            names,
            copied={*divided, *(self._masters.computing if self._masters else ())},
            tensors=tensors,
            num_replicas=plan.num_replicas,
        )
        self._strict_norm = strict_norm(model, usual.chain.norms(0, len(usual.chain)), plan.microbatch_size)
        self._loss_exchange = LossExchange(ranks)
        self._tied = TiedGradients(names.shared(), tensors, ranks, trained=self._trained)
        if ranks is not None:
            deprioritize_connection_threads()

    @property
    def rank(self) -> int:
        """Global rank of this process; 0 if it runs alone."""
        return 0 if self.ranks is None else dist.get_rank()

    def step(self, inputs: Any, targets: Any = None, *, scale: float = 1.0) -> Tensor:
        """Run forward and backward for one mini-batch and return its loss, the same on every rank.

        Gradients are added to those of `parameters()`. `inputs` (a tensor, tuple or dict) and `targets` have samples
        in dimension 0: any number up to the plan's batch size (see gplan/runtime/microbatches.py). Pass the same
        data on every rank; for a full mini-batch, ranks without the first stage may pass None as inputs, and those
        without the last one None as targets. With `broadcast_batches` only those of rank 0 count. `scale`
        multiplies the gradients but not the loss, such as 1/n for the mean over n accumulated steps.

        Warns once of a loss that is not finite. Raises UsageError for data that do not fit the plan or differ between ranks
        (small batches on the CPU are compared in every step, others in the first ten and then in those that are powers of
        two), RunError with stage and layer where the model fails.
        """
        inputs, targets, num_rows = self.agreed("step", inputs, targets)
        loss = self.train_on(inputs, targets, num_rows, scale=scale)
        if not self._has_warned and not math.isfinite(loss):
            self._has_warned, text = True, self.explain_not_finite(inputs, num_rows, loss)
            if self.rank == 0:
                warnings.warn(text, stacklevel=2)
        return loss

    def agreed(self, call: str, inputs: Any, targets: Any = None) -> tuple[Any, Any, int]:
        """Return the batch that every rank uses in a call, checked, and its number of samples: all ranks have the same one, or
        take the first rank's. Collective."""
        if self._agreement.broadcasts:
            self._agreement.begin(call, is_full=False)
            inputs, targets = self._agreement.broadcast(inputs, targets)
            inputs, num_rows = self._checked(inputs, targets)
            return inputs, targets, num_rows
        given = inputs, targets
        inputs, num_rows = self._checked(inputs, targets)
        self._agreement.begin(call, batch=given, num_rows=num_rows, is_full=num_rows == self.plan.batch_size)
        return inputs, targets, num_rows

    @uncompiled()
    def train_on(self, inputs: Any, targets: Any, num_rows: int, *, scale: float = 1.0) -> Tensor:
        """Run a step with a batch that `agreed` returned."""
        runner = self.runner
        runner.begin()
        self._check_trainable(num_rows)
        validation.check_training(scale, trained=self._trained, parameters=dict(self.named_parameters()))
        if self._unchanged is not None:
            self._unchanged.check()
        scale *= self._num_averaged
        self._loss_exchange.post_receive()
        step = self._agreement.until_failure(f"step {self.num_steps + 1}")
        with step, self._random_streams.preserved(), hooked_once(self.parameters()), self._tied.accumulated():
            with self._masters.lent(), self._shared_buffers.forbid_writes(self._tensors):
                losses = list[Tensor]()
                for part in self._passes(num_rows):
                    weight = self._loss_weight(part, num_rows)
                    found = runner.run(
                        part,
                        inputs,
                        num_rows,
                        step=self.num_steps,
                        output_fn=self._loss_fn(targets, part, num_rows),
                        trains=True,
                        loss_weight=weight * scale,
                    )
                    losses += [weight * x.double() for x in found]
                for device, stages in enumerate(runner.stages_by_device if self._masters else ()):
                    with runner.updating(device):  # master weights take the gradients as a part of the update
                        self._masters.take_gradients(runner.parameters_of(stages))
            total = self._total(losses)
            runner.reduce_shards()
            with self.heartbeat.waiting("sums"):
                self._tied.sum_gradients()
            runner.finish()
        self.num_steps += 1
        return total

    @uncompiled()
    def explain_not_finite(self, inputs: Any, num_rows: int, loss: Tensor) -> str:
        """Name the first layer whose output is not finite in the last step, before its update. Collective."""
        step = self.num_steps - 1

        def search() -> tuple[int, str] | None:
            with torch.inference_mode(False), torch.no_grad(), self._random_streams.preserved():
                self._masters.round()
                parts = self._passes(num_rows)
                found = [self.runner.first_not_finite(x, inputs, num_rows, step=step) for x in parts]
                layer = min((x for x in found if x is not None), default=None)
            self.runner.rest()
            if layer is None:
                return None
            number, name = layer
            stage = next(x.index for x in self.plan.stages if name in x.layer_names)
            weights = (
                "" if self.runner.has_finite_weights(name) else "; the weights of this stage are not finite either"
            )
            return number, f"the output of layer {name} on stage {stage} is the first that is not{weights}"

        group = RankGroup(group=None if self.ranks is None else dist.group.WORLD)
        _, where = min(
            (x for x in group.run_on_all(search) if x is not None),
            default=(0, "the output of every layer is; see the loss function and the targets"),
        )
        return f"the loss is {float(loss):g} in step {step + 1}, not finite: {where}; lower the learning rate or look at the data"

    def round_master_weights(self, parameters: Iterable[nn.Parameter]) -> None:
        """Round master weights into those that the stages compute with, right after their update.

        Without a call `step` and the evaluations do so when they begin.
        """
        self._masters.round(parameters)

    def eval_step(self, inputs: Any, targets: Any = None) -> Tensor:
        """Return the loss of any number of samples in evaluation mode, without gradients; the same on every rank."""
        self.runner.begin()
        inputs, targets, num_rows = self.agreed("eval_step", inputs, targets)
        self._check_alike(num_rows)
        self._loss_exchange.post_receive()
        losses = list[Tensor]()
        for part in self._passes(num_rows):
            weight, output_fn = self._loss_weight(part, num_rows), self._loss_fn(targets, part, num_rows)
            losses += [weight * x.double() for x in self._evaluate(part, inputs, num_rows, output_fn)]
        self.runner.rest()
        return self._total(losses)

    def predict(self, inputs: Any) -> Any:
        """Return the output for any number of samples in evaluation mode; None on ranks without the last stage."""
        self.runner.begin()
        inputs, _, num_rows = self.agreed("predict", inputs)
        size, most = self.plan.microbatch_size, self.plan.num_microbatches
        found: list[tuple[Any, int]] = []
        for part in split_into_passes(num_rows, microbatch_size=size, most_microbatches=most):
            outputs = self._outputs(part, inputs, num_rows)
            found += [(concat_outputs(outputs), part.num_rows)] if outputs else []
        self.runner.rest()
        return concat_outputs(found) if found else None

    @property
    def _num_averaged(self) -> int:
        """Number of replicas over which gradients are averaged; losses are scaled by it, so that gradients are sums."""
        return self.ranks.num_replicas if self.ranks is not None else 1

    def _passes(self, num_rows: int) -> tuple[Pass, ...]:
        """Return this process's passes for a mini-batch: those of its replica, or of all replicas if it runs alone."""
        replicas = range(self.plan.num_replicas) if self.ranks is None else [self.ranks.replica]
        return tuple(x for replica in replicas for x in self._passes_of(replica, num_rows))

    def _passes_of(self, replica: int, num_rows: int) -> tuple[Pass, ...]:
        share = replica_rows(num_rows, replica=replica, num_replicas=self.plan.num_replicas)
        sizes = {"microbatch_size": self.plan.microbatch_size, "most_microbatches": self.plan.num_microbatches}
        return split_into_passes(len(share), **sizes, first_row=share.start)

    def _checked(self, inputs: Any, targets: Any) -> tuple[Any, int]:
        """Return the inputs in the plan's precision, and their number of samples; None stands for a full mini-batch."""
        if inputs is not None:
            inputs = convert_floats(inputs, input_dtype(self.plan.precision))
        else:
            if self.runner.stages[0].index == 0:
                raise UsageError("the inputs are None, and this process holds the first stage; expected a batch")
            inputs = resize_inputs(self._usual_inputs, self.plan.batch_size)
        num_rows = validation.num_samples(inputs, usual=self._usual_inputs)
        validation.check_targets(targets, num_rows)
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
        self._check_alike(num_rows)
        if self._is_too_few_for_norms(num_rows):
            enough = next((x for x in range(num_rows - 1, 1, -1) if not self._is_too_few_for_norms(x)), None)
            remedy = "" if enough is None else f"give {enough}, or "
            raise UsageError(
                f"got {num_rows} samples, which leaves a micro-batch of one; {self._strict_norm} then has a single value per "
                f"channel and no variance: {remedy}leave such a batch out (drop_last=True of a DataLoader)"
            )

    def _check_alike(self, num_rows: int) -> None:
        """Raise UsageError if replicas that gather layers together would run other numbers of micro-batches."""
        if self.plan.sharding != "weights" or self._num_averaged == 1:
            return
        counts = [[x.num_microbatches for x in self._passes_of(i, num_rows)] for i in range(self.plan.num_replicas)]
        odd = next((x for x in counts if x != counts[0]), None)
        if odd is not None:
            raise UsageError(
                f"the replicas would run {sum(counts[0])} and {sum(odd)} micro-batches of {num_rows} samples: with sharded "
                f"weights they run the same ones; give a multiple of {self.plan.num_replicas} samples, or leave such a "
                "batch out (drop_last=True of a DataLoader)"
            )

    def _is_too_few_for_norms(self, num_rows: int) -> bool:
        """Whether some micro-batch would have one sample and a batch norm would reject it."""
        if self._strict_norm is None or num_rows < self.plan.num_replicas:
            return False
        replicas = range(self.plan.num_replicas)
        return any(x.microbatch_size == 1 for replica in replicas for x in self._passes_of(replica, num_rows))

    def _loss_weight(self, part: Pass, num_rows: int) -> float:
        """Weight of a micro-batch's loss, so that the weighted losses add up to that of the mini-batch."""
        return part.microbatch_size / num_rows if self.plan.loss_reduction == "mean" else 1.0

    def _loss_fn(self, targets: Any, part: Pass, num_rows: int) -> OutputFn:
        """Return the function that computes a micro-batch's loss from the model's output."""
        loss = self._loss
        if loss is None:
            raise UsageError(
                "there is no loss; pass one: gplan.pipeline(model, plan, loss=torch.nn.functional.cross_entropy)"
            )
        holds_loss = self.ranks is None or self.ranks.is_last
        each = [  # cut before the first action, as work between actions would delay the device
            to_device(take_rows(targets, part.microbatch_rows(m), num_rows), self.device)
            for m in range(part.num_microbatches if holds_loss else 0)
        ]

        def output_fn(output: Any, microbatch: int) -> Tensor:
            target = each[microbatch]
            self._random_streams.seed(_LOSS_KEY, microbatch)
            with (
                autocast(self.plan.precision, self.device.type),
                unreadable(self._captures.assigned),
                self._loss_reads.of(output),
            ):
                try:
                    value = checked_loss(loss(output, target), what="the loss", trains=torch.is_grad_enabled())
                except GplanError:
                    raise
                except Exception as error:
                    given = (describe_inputs(x) or type(x).__name__ for x in (output, target))
                    raise LossError(
                        f"the loss fails with an output of {' and targets of '.join(given)}: "
                        f"{own_gradients_text(error) or describe(error)}"
                    ) from error
            if self._is_loss_new:
                self._is_loss_new = False
                self._random_streams.seed(_LOSS_KEY, microbatch)
                rows, expected = part.microbatch_size, self.plan.loss_reduction
                with autocast(self.plan.precision, self.device.type):
                    check_reduction(loss, output, target, value=value.detach(), num_rows=rows, expected=expected)
            return value

        return output_fn

    def _outputs(self, part: Pass, inputs: Any, num_rows: int) -> list[tuple[Any, int]]:
        """Return (output, number of samples) of every micro-batch of a pass; empty without the last stage."""
        found: dict[int, Any] = {}

        def keep(output: Any, microbatch: int) -> Tensor:
            found[microbatch] = output
            return torch.zeros((), device=self.device)

        self._evaluate(part, inputs, num_rows, keep)
        return [(found[m], part.microbatch_size) for m in sorted(found)]

    @uncompiled()
    def _evaluate(self, part: Pass, inputs: Any, num_rows: int, output_fn: OutputFn) -> list[Tensor]:
        passes = self._agreement.until_failure("an evaluation")
        with passes, torch.inference_mode(False), torch.no_grad(), self._random_streams.preserved():
            self._masters.round()
            return self.runner.run(part, inputs, num_rows, step=self.num_steps, output_fn=output_fn, trains=False)

    def _total(self, losses: list[Tensor]) -> Tensor:
        """Sum the losses of all micro-batches and replicas; return the sum on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:
            total += loss
        if self.ranks is None:
            return total
        if self.ranks.is_last and self.ranks.replicas is not None:
            with self.heartbeat.waiting("sums"):
                dist.all_reduce(total, group=self.ranks.replicas)
        with self.heartbeat.waiting("sums"):
            return self._loss_exchange.exchange(total)


def _own_loss(chain: Chain) -> Loss | None:
    """The loss in the model's output, where it has one."""
    output = chain.model_output(tuple(x.on_meta() for x in chain.specs(len(chain))))
    try:
        loss_of_output(output)
    except ModelError:
        return None
    return loss_of_output


def _captured(
    source: ModelSource, plan: Plan, inputs: Any, device: torch.device, loss: Loss | None
) -> tuple[ModelSource, CaptureCache, CapturedModel]:
    """Capture the model without weights, or with all of them if its code reads their values."""
    captures = CaptureCache(source.file.model, plan, name=source.file.name, device=device, loss=loss)
    try:
        return source, captures, captures.for_inputs(inputs, training=True)
    except StateError:
        raise
    except ModelError as error:
        if not source.is_rebuildable:
            raise ModelError(
                f"{source.file.name} fails with inputs {describe_inputs(inputs)}, as the plan for {plan.model.name} has them: "
                f"{error}"
            ) from error
    return _captured(source.build_whole(), plan, inputs, device, loss)
