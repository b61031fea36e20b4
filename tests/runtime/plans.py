"""Plans of small models, from quick profiles or without any, and runs of them in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gplan
from gplan.core import ActionKind, Granularity, Link, Plan, Profile, Run
from gplan.runtime.capture_cache import CapturedModel
from gplan.runtime.model_source import ModelSource
from gplan.runtime.pipeline import Pipeline
from gplan.runtime.run.launch import run_virtual_engine
from gplan.runtime.run.reference import accumulate_gradients
from gplan.runtime.run.run_options import RunOptions
from gplan.schedules.registry import make_schedule, num_devices_of, num_stages_of
from gplan.simulation.simulator import schedule_of
from gplan_profiler.capture.chain import model_state_restored, routing_notes
from gplan_profiler.capture.module_attributes import attributes_restored
from gplan_profiler.measure import ProfileOptions, measure_profile
from gplan_profiler.model.data import find_loss_reduction
from gplan_profiler.model.lazy_build import random_state_kept
from gplan_profiler.model.load import ModelFile
from gplan_profiler.timing.bench import capture_of_file
from tests.made import make_profile
from tests.model_files import load_model_file
from tests.partition.problems import in_halves

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

# The example models, made small enough to train in tests.
SMALL: Mapping[str, Mapping[str, Any]] = {
    "transformer_lm": {"num_blocks": 3, "width": 32, "num_heads": 2, "sequence_length": 16},
    "gpt2_hf": {"num_blocks": 2, "width": 32, "num_heads": 2, "sequence_length": 16},
    "resnet": {"depth": 18, "width": 8},
    "unet": {"depth": 2, "width": 4, "image_size": 16},
    "amoebanet_d": {"num_layers": 3, "num_filters": 16, "image_size": 64},
}
PROFILES: dict[Hashable, Profile] = {}


def small_example(name: str, **settings: Any) -> ModelFile:
    """A small version of an example; gpt2_hf needs transformers."""
    return load_model_file(str(EXAMPLES / f"{name}.py"), settings={**SMALL[name], **settings})


def plan_for(
    file: ModelFile,
    *,
    num_devices: int,
    num_microbatches: int = 4,
    microbatch_size: int = 2,
    granularity: Granularity = "layer",
    is_measured: bool = True,
    **options: Any,
) -> Plan:
    """A plan from a profile of as few samples as possible, or from one that is not measured."""
    profile = (profile_for if is_measured else unmeasured)(file, microbatch_size, granularity)
    return gplan.balance(profile, num_devices=num_devices, num_microbatches=num_microbatches, **options)


unmeasured_plan = partial(plan_for, is_measured=False)
"""A plan for training alone: all layers take equally long, and nothing takes memory."""


def unmeasured(file: ModelFile, microbatch_size: int, granularity: Granularity = "layer") -> Profile:
    """A profile with the layers of a model, in a chain, and with made costs."""
    with random_state_kept(), model_state_restored(file.model), attributes_restored(file.model):
        reduction = find_loss_reduction(file, microbatch_size).reduction
        chain = capture_of_file(file, file.example_inputs(microbatch_size), granularity=granularity, divided=None)
        made = in_halves(make_profile([1.0] * len(chain), microbatch_sizes=[microbatch_size]))
        named = zip(made.layers, chain.names, chain.kinds, strict=True)
        return replace(
            made,
            model=file.identity(chain),
            layers=tuple(replace(layer, name=name, kind=kind) for layer, name, kind in named),
            loss_reduction=reduction,
            granularity=granularity,
            precision=file.precision,
            plan_notes=tuple(routing_notes(chain, how="made")),
        )


def profile_for(file: ModelFile, microbatch_size: int, granularity: Granularity) -> Profile:
    """A quick profile, cached for files of equal content and settings."""
    if file.in_memory:
        return measured(file, microbatch_size, granularity)
    said = (Path(file.name).read_text(), file.settings, file.fixed_inputs is None, microbatch_size, granularity)
    if said not in PROFILES:
        PROFILES[said] = measured(file, microbatch_size, granularity)
    profile = PROFILES[said]
    return replace(profile, model=replace(profile.model, name=file.name))


def measured(file: ModelFile, microbatch_size: int, granularity: Granularity) -> Profile:
    """A profile with the smallest budget."""
    quick = ProfileOptions(
        microbatch_sizes=(microbatch_size,),
        link=Link(latency_s=0.0, bytes_per_s=1e9),
        budget_s=0.01,
        contention=0,
        granularity=granularity,
    )
    return measure_profile(file, quick)


def run_virtually(file: ModelFile, plan: Plan, options: RunOptions) -> Run:
    """Run all stages in this process on the file's own model."""
    return run_virtual_engine(source_for(file, options.seed), plan, options, report=lambda _step, _loss: None)


def pipeline_for(file: ModelFile, plan: Plan, *, seed: int = 0) -> Pipeline:
    """A pipeline of all stages on the file's own parameters."""
    return Pipeline(
        source_for(file, seed),
        plan,
        loss=file.loss,
        inputs=file.example_inputs(plan.microbatch_size),
        device=torch.device("cpu"),
        timeout_s=60.0,
    )


def source_for(file: ModelFile, seed: int = 0) -> ModelSource:
    """The file's model as it is."""
    return ModelSource(file=file, opened=None, seed=seed, stored=file.model)


def scheduled(plan: Plan, schedule: str) -> Plan:
    """The same stages under another schedule, on as many devices as it needs; costs are not updated."""
    num_devices = num_devices_of(schedule, plan.num_stages)
    assert num_stages_of(schedule, num_devices) == plan.num_stages
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=plan.num_microbatches)
    stages = tuple(replace(x, device=device) for x, device in zip(plan.stages, made.devices, strict=True))
    return replace(plan, schedule=schedule, stages=stages)


def recomputing(plan: Plan, layers: Collection[str]) -> Plan:
    """The same plan with recompute "selected" for these layers; costs are not updated."""
    assert {*layers} <= {*plan.layer_names}
    stages = tuple(
        replace(stage, recompute_layers=tuple(x for x in stage.layer_names if x in layers)) for stage in plan.stages
    )
    return replace(plan, recompute="selected", stages=stages)


def plain_losses(file: ModelFile, plan: Plan, *, num_steps: int) -> list[float]:
    """Train the plain model with the plan's micro-batches, without a pipeline; return its losses.

    Micro-batches run in the order of the first stage's backwards, so that gradients are summed in the same order.
    """
    ends = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
    actions = schedule_of(plan).orders[plan.devices[0]]
    order = [x.microbatch for x in actions if x.stage == 0 and x.kind in ends]
    file.model.train()
    optimizer, batches, losses = (
        file.optimizer([x for x in file.model.parameters() if x.requires_grad]),
        file.batches(plan.batch_size),
        [],
    )
    for _ in range(num_steps):
        inputs, target = next(batches)
        losses.append(accumulate_gradients(file, plan, inputs, target, order))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@contextmanager
def new_captures() -> Iterator[Callable[[], list[CapturedModel]]]:
    """A function that lists the captures made inside the block that are still in use."""
    before = _captures()

    def found() -> list[CapturedModel]:
        return [x for x in _captures() if not any(x is y for y in before)]

    yield found


def _captures() -> list[CapturedModel]:
    gc.collect()
    return [x for x in gc.get_objects() if isinstance(x, CapturedModel)]
