"""From what a user hands over to a pipeline: the model's source, its inputs, the device of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gplan.errors import UsageError
from gplan.execute.given import num_samples
from gplan.execute.losses import Loss
from gplan.execute.pipeline import Pipeline
from gplan.execute.source import ModelLike, Source, source_of
from gplan.nouns import Plan
from profiler.model.inputs import parse_input_shapes
from profiler.model.lazy import random_state_kept
from profiler.model.settings import Setting


def open_pipeline(
    model: ModelLike,
    plan: Plan,
    *,
    loss: Loss | None,
    inputs: Any,
    settings: Mapping[str, Setting],
    seed: int,
    weights: str | Path | None,
    device: str | None,
    timeout_s: float,
) -> Pipeline:
    """A pipeline for a module, a function that builds one, or a model file; see `gplan.pipeline`."""
    with random_state_kept():
        source = source_of(model, settings=settings, functions={"loss": loss}, seed=seed, weights=weights)
        if loss is None and source.file.has("loss"):
            loss = source.file.loss
        if inputs is None:
            inputs = example_inputs(source, plan)
        num_samples(inputs, usual=inputs)
        return Pipeline(source, plan, loss=loss, inputs=inputs, device=own_device(plan, device), timeout_s=timeout_s)


def example_inputs(source: Source, plan: Plan) -> Any:
    """Inputs as the model is called with: from its file, or as the plan describes them."""
    if {"example_inputs", "batches"} & source.file.functions.keys() or source.file.fixed_inputs is not None:
        return source.file.example_inputs(plan.microbatch_size)
    if not plan.model.inputs:
        raise UsageError(
            f"the plan does not say what {plan.model.name} is called with; pass inputs=..., a batch of any number of samples"
        )
    return parse_input_shapes(plan.model.inputs)


def own_device(plan: Plan, device: str | None) -> torch.device:
    """The device of this process: as asked for, else a GPU of its own if the plan was made for one, else the CPU."""
    if device is None:
        device = "cuda" if plan.device.kind == "cuda" and torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r} is not known; expected 'cpu', 'cuda' or 'cuda:1'") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device!r} was asked for; this process sees no GPU: use device='cpu'")
    if found.type != "cuda":
        return found
    index = found.index if found.index is not None else int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        who = f"device {device!r} is not there" if ":" in device else f"local rank {index} has no GPU of its own"
        raise UsageError(
            f"{who}; this host has {torch.cuda.device_count()}: start fewer processes, or use device='cpu'"
        )
    torch.cuda.set_device(index)  # on which events, synchronization and nccl's own tensors otherwise miss it
    return torch.device("cuda", index)
