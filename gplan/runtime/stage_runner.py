"""Runs passes through the stages of this process on either engine, and explains where a pass failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gplan.core import Action, ActionKind, Schedule
from gplan.core.errors import GplanError, ModelError, RunError, UsageError
from gplan.core.units import counted
from gplan.runtime.capture_cache import CaptureCache, CapturedModel
from gplan.runtime.gradient_sync import average_gradients, broadcast_first_replica, has_sparse_gradients
from gplan.runtime.microbatches import Pass, take_rows
from gplan.runtime.pass_state import EnginePass
from gplan.runtime.process_group import RankLayout
from gplan.runtime.random_streams import RandomStreams
from gplan.runtime.sharded_tensors import local_tensor
from gplan.runtime.stage_module import StageModule, StagePass, written_buffers
from gplan.runtime.stage_state import StateNames
from gplan.runtime.torch_engine import TorchEngine
from gplan.runtime.validation import LossError
from gplan.runtime.virtual_engine import VirtualEngine
from gplan.schedules.registry import make_schedule
from gplan_profiler.capture.chain import NotFinite, Tensors, flat_tensors
from gplan_profiler.capture.moving_averages import MovingAverages
from gplan_profiler.host.failure import failure_text, is_lost_connection
from gplan_profiler.host.heartbeat import Heartbeat, at_layer, on_stage
from gplan_profiler.memory.allocations import now_ns, storage_key
from gplan_profiler.model.model_reference import describe_inputs
from gplan_profiler.torch_compat import pytree

OutputFn = Callable[[Any, int], Tensor]
"""(the model's output, micro-batch) -> scalar."""

Observe = Callable[[CapturedModel, int, Tensors], None]
"""(capture, number of a layer in it, the layer's outputs)."""


class StageRunner:
    """The stages of this process and the engine that runs them."""

    def __init__(
        self,
        captures: CaptureCache,
        usual: CapturedModel,
        *,
        stages: Sequence[StageModule],
        names: StateNames,
        tensors: Mapping[str, Tensor],
        computing: Mapping[str, Tensor],
        ranks: RankLayout | None,
        random_streams: RandomStreams,
        heartbeat: Heartbeat,
    ) -> None:
        """`usual` is the capture of the plan's own micro-batches in training; `stages` are those of this process.

        `tensors` are those that the optimizer updates, `computing` those that stages hold between steps to compute with:
        the same ones without master weights.
        """
        self._captures, self._ranks, self._random_streams = captures, ranks, random_streams
        self._replicas = None if ranks is None else ranks.replicas
        self._names, self._tensors, self._computing = names, tensors, computing
        self._plan = captures.plan
        self.stages = tuple(stages)
        self._averages = {x.index: MovingAverages(captures.norms(usual, x.index)) for x in stages}
        self._written: dict[tuple[CapturedModel, StageModule, bool], frozenset[int]] = {}
        for stage in self.stages:
            if stage.shards is not None and has_sparse_gradients(self._segments(usual, stage, True)):
                raise UsageError(
                    f"stage {stage.index} has sparse gradients, as of nn.Embedding(sparse=True), which sharded replicas "
                    "cannot divide; use sparse=False, or balance again with --shard none"
                )
        self._followed = self._buffers_to_broadcast(usual)
        device = random_streams.device
        self.engine: TorchEngine | VirtualEngine = (
            VirtualEngine(self.stages, device=device)
            if ranks is None
            else TorchEngine(self.stages, device=device, group=ranks.pipeline)
        )
        self.engine.recorder.heartbeat = heartbeat
        self.engine.recorder.is_on_gpu = device.type == "cuda"

    def begin(self) -> None:
        """Begin a step or an evaluation; drops what a failed one left and timings that were not taken."""
        self.engine.recorder.take()
        if isinstance(self.engine, VirtualEngine):
            self.engine.action_starts_ns.clear()
        for averages in self._averages.values():
            averages.discard()
        self.rest()

    def rest(self) -> None:
        """Free what sharded stages gathered, after a step or an evaluation."""
        for stage in self.stages:
            if stage.shards is not None:
                stage.shards.reset()

    def reduce_shards(self) -> None:
        """Divide the sums of sharded stages' gradients over the replicas; counts as the devices' updates."""
        if shards := [x.shards for x in self.stages if x.shards is not None]:
            with self.updating(0), self.engine.recorder.heartbeat.waiting("sums"):
                for x in shards:
                    x.reduce_gradients()

    def finish(self) -> None:
        """End a step: average the replicas' gradients, and update moving averages.

        Both count as the devices' updates.
        """
        if self._ranks is not None and self._replicas is not None:
            with self.updating(0), self.engine.recorder.heartbeat.waiting("sums"):
                average_gradients(self.parameters_of(self.stages), self._replicas)
                broadcast_first_replica(self._followed, self._ranks)
        for device, stages in enumerate(self.stages_by_device):
            with self.updating(device):
                for stage in stages:
                    self._averages[stage.index].finish(
                        lambda x: None if self._replicas is None else dist.all_reduce(x, group=self._replicas)
                    )

    def updating(self, device: int) -> AbstractContextManager[None]:
        """Record the block as the update of one of `stages_by_device`."""
        if isinstance(self.engine, VirtualEngine):
            self.engine.action_starts_ns.append((now_ns(), device))
        return self.engine.recorder.note(Action(self.stages_by_device[device][0].index, ActionKind.OPTIMIZER, 0))

    def run(
        self,
        part: Pass,
        inputs: Any,
        num_rows: int,
        *,
        step: int,
        output_fn: OutputFn,
        trains: bool,
        loss_weight: float = 1.0,
        observe: Observe | None = None,
    ) -> list[Tensor]:
        """Run one pass; return the values of `output_fn` by micro-batch if the last stage is on this process.

        Gradients are those of their sum times `loss_weight`. With `observe` the forwards are those of training, even
        where the pass does not train, layer by layer.
        """
        as_trained = trains or observe is not None
        first = take_rows(inputs, part.microbatch_rows(0), num_rows)
        try:
            captured = self._captures.for_inputs(first, training=as_trained)
        except ModelError as error:
            usual, found = self._captures.usual_inputs, describe_inputs(first)
            raise ModelError(
                f"micro-batches were planned to be {usual}; the model fails with {found}: {error}"
            ) from None  # the exporter's traceback has hundreds of lines
        old = self._captures.evict()
        self.engine.forget(old)
        self._written = {key: x for key, x in self._written.items() if key[0] not in old}
        for stage in self.stages:
            stage.begin(self._stage_work(captured, stage, part, as_trained, observe))
            if stage.shards is not None:
                with self.engine.recorder.heartbeat.waiting("ranks"):
                    stage.shards.begin()
        self._random_streams.begin(step, part.first_rows)
        given = flat_tensors(take_rows(inputs, part.rows, num_rows), what="the inputs")
        work = EnginePass(
            captured=captured,
            schedule=self._schedule(part.num_microbatches, trains),
            inputs=tuple(to_device(x, self._random_streams.device) for x in given),
            loss_fn=lambda outputs, microbatch: output_fn(captured.chain.model_output(outputs), microbatch),
            loss_weight=loss_weight,
        )
        try:
            # torch's operator for a captured no_grad() does not restore the gradient mode when it raises
            with self._captures.training_mode(training=as_trained), torch.set_grad_enabled(torch.is_grad_enabled()):
                losses = self.engine.run(work)
        except Exception as error:
            if isinstance(error, GplanError) and not isinstance(error, LossError):
                raise
            when = f"in step {step + 1}" if trains else f"in an evaluation after {counted(step, 'step')}"
            failure = self._failure(error, when)
            raise failure from (None if is_lost_connection(str(failure)) else error)  # gloo's stack adds nothing
        if not trains:
            for stage in self.stages:
                if stage.shards is not None:
                    stage.shards.end_evaluation()
        return losses

    def _segments(self, captured: CapturedModel, stage: StageModule, trains: bool) -> tuple[nn.Module, ...]:
        return self._captures.segments(captured, stage, self._plan.recompute if trains else "never")

    def _stage_work(
        self, captured: CapturedModel, stage: StageModule, part: Pass, trains: bool, observe: Observe | None
    ) -> StagePass:
        averages = self._averages[stage.index]
        norms = self._captures.norms(captured, stage.index) if trains else ()
        segments, key = self._segments(captured, stage, trains), (captured, stage, trains)
        if key not in self._written:
            self._written[key] = frozenset(storage_key(x) for segment in segments for x in written_buffers(segment))
        work = StagePass(
            segments=segments,
            written=self._written[key],
            layers=captured.layer_info,
            num_microbatches=part.num_microbatches,
            recompute=self._plan.recompute if trains else "never",
            around=(lambda: averages.microbatch(norms)) if norms else nullcontext,
        )
        if observe is None:
            return work
        first = captured.layers(stage.index).start
        return replace(
            work,
            segments=self._captures.segments(captured, stage, "never", by_layer=True),
            recompute="never",
            observe=lambda number, outputs: observe(captured, first + number, outputs),
        )

    def first_not_finite(self, part: Pass, inputs: Any, num_rows: int, *, step: int) -> tuple[int, str] | None:
        """Number and name of this process's first layer from which on its stage's outputs are not finite, in a step's
        pass again; None where a stage ends with finite ones. Buffers stay as they are."""
        found: set[tuple[int, str]] = set()
        not_finite = NotFinite()

        def observe(captured: CapturedModel, layer: int, outputs: Tensors) -> None:
            specs = captured.chain.specs(layer + 1)
            not_finite.after(layer, ((x, spec.requires_grad) for spec, x in zip(specs, outputs, strict=True)))
            if layer + 1 in {captured.layers(x.index).stop for x in self.stages}:
                if (first := not_finite.first) is not None:
                    found.add((first, captured.chain.names[first]))
                not_finite.first = None

        buffers = [(x, x.clone()) for x in self._tensors.values() if not isinstance(x, nn.Parameter)]
        no_loss: OutputFn = lambda _output, _microbatch: torch.zeros(())  # noqa: E731
        self.run(part, inputs, num_rows, step=step, output_fn=no_loss, trains=False, observe=observe)
        for buffer, value in buffers:
            buffer.copy_(value)
        for averages in self._averages.values():
            averages.discard()
        return min(found, default=None)

    def has_finite_weights(self, layer: str) -> bool:
        """Whether the parameters of a stage with this layer are finite."""
        stage = next(x for x in self.stages if layer in self._plan.stages[x.index].layer_names)
        return all(bool(local_tensor(x).isfinite().all()) for x in self.parameters_of([stage]))

    def _schedule(self, num_microbatches: int, trains: bool) -> Schedule:
        plan = self._plan
        schedule = make_schedule(plan.schedule, num_devices=plan.num_devices, num_microbatches=num_microbatches)
        if trains:
            return schedule
        orders = tuple(tuple(x for x in order if x.kind is ActionKind.FORWARD) for order in schedule.orders)
        return replace(schedule, name="forward", orders=orders)

    def resident_tensors(self, stage: StageModule) -> list[Tensor]:
        """Return the tensors of a stage between steps: parameters and buffers."""
        names = self._names.on_stages([stage.index])
        state = dict.fromkeys(x[name] for name in names for x in (self._tensors, self._computing))
        return [*map(local_tensor, state)]

    def parameters_of(self, stages: Iterable[StageModule]) -> list[nn.Parameter]:
        """Return the parameters of some stages that the optimizer updates, a tied one once."""
        used = (self._tensors[name] for stage in stages for name in self._names.used_by_stage[stage.index])
        return list(dict.fromkeys(x for x in used if isinstance(x, nn.Parameter)))

    @cached_property
    def stages_by_device(self) -> list[list[StageModule]]:
        """The stages of this process, grouped by device; one of several processes has one device."""
        found: dict[int, list[StageModule]] = {}
        for stage in self.stages:
            found.setdefault(self._plan.devices[stage.index], []).append(stage)
        return [found[device] for device in sorted(found)]

    def _failure(self, error: Exception, when: str) -> RunError:
        """Return the error of a failed action, with step, stage, micro-batch and layer."""
        action = self.engine.recorder.under_way
        stage = next((x for x in self.stages if action is not None and x.index == action.stage), self.stages[0])
        on = on_stage(action.microbatch, stage.index) if action is not None else ""
        words = [when, action.kind.words + on if action is not None else f"stage {stage.index}"]
        if stage.layer is not None:
            words.append(at_layer(stage.layer, None if action is None else action.kind))
        text = failure_text(error)
        if "modified by an inplace operation" in text:
            text += (
                "; the forwards of several micro-batches run before their backwards: where a forward reads a buffer that it "
                "writes, let it read a copy (self.name.clone())"
            )
        return RunError(f"{', '.join(words)}: {text}")

    def _buffers_to_broadcast(self, usual: CapturedModel) -> list[Tensor]:
        """Return the buffers, except moving averages, that forwards may write to; replicas take the first one's."""
        if self._replicas is None:
            return []
        norms = [norm for stage in self.stages for norm in self._captures.norms(usual, stage.index)]
        known = {id(x) for norm in norms for x in norm.buffers}
        segments = [segment for stage in self.stages for segment in self._segments(usual, stage, True)]
        found = {id(x): x for segment in segments for x in written_buffers(segment)}
        return [x for key, x in found.items() if key not in known]


def to_device(value: Any, device: torch.device) -> Any:
    """Move a structure of tensors to a device; copies to a GPU are asynchronous from pinned memory.

    Copies from a GPU are synchronous, as they would otherwise be read too early.
    """

    def moved(x: Tensor) -> Tensor:
        return x.to(device, non_blocking=device.type == "cuda")

    return moved(value) if isinstance(value, Tensor) else pytree.tree_map_only(Tensor, moved, value)
