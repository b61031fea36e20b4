"""What the receivers' own parsers and splitters make of an export: for each, the stages as they have them.

Every function imports its receiver when it is called, and returns the stages of an exported text as lists of the layers'
names, to be compared with the plan's. Nothing here needs a GPU or more than one process.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from gplan.core import Plan
from gplan.interop.export.exporters import export
from gplan.interop.receivers import child_name

Stages = list[list[str]]

PACKAGES = {
    "torchtitan": "torchtitan",
    "megatron": "megatron-core",
    "verl": "megatron-core",
    "automodel": "nemo-automodel",
    "deepspeed": "deepspeed",
    "torchgpipe": "torchgpipe",
    "pytorch": "torch",
    "sglang": "sglang",
}


def installed(receiver: str) -> str | None:
    """The version of a receiver's package, None where it is not installed."""
    try:
        return version(PACKAGES[receiver])
    except (KeyError, PackageNotFoundError):
        return None


def executed(text: str, **names: Any) -> dict[str, Any]:
    """What an exported Python module defines."""
    found: dict[str, Any] = dict(names)
    exec(compile(text, "exported", "exec"), found)
    return found


# Megatron-core, also for verl


def arguments(text: str) -> dict[str, str]:
    """Of an exported command line, as a shell hands them to the program."""
    words = shlex.split(text.replace("\\\n", " "))
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {name: "" if value.startswith("--") else value for name, value in pairs if name.startswith("--")}


def megatron(plan: Plan) -> Stages:
    """Parsed and validated by PipelineParallelLayerLayout; stage s is on rank s mod K."""
    found = arguments(export(plan, to="megatron").text)
    layout, num_layers = found["--pipeline-model-parallel-layout"], int(found["--num-layers"])
    predictions = int(found.get("--mtp-num-layers", 0)) or None
    return _megatron_stages(plan, layout, int(found["--pipeline-model-parallel-size"]), num_layers, predictions)


def verl(plan: Plan) -> Stages:
    """The value of the override, which verl hands to Megatron-core's TransformerConfig."""
    text = export(plan, to="verl").text
    found = dict(word.lstrip("+").partition("=")[::2] for word in shlex.split(text.replace("\\\n", " ")))
    prefix = "actor_rollout_ref.actor.megatron"
    overrides = {x.rpartition(".")[2]: value for x, value in found.items() if "override_transformer_config" in x}
    layout = overrides["pipeline_model_parallel_layout"].strip('"')
    num_layers = sum(_ENTRY.fullmatch(x) is not None for x in plan.layer_names)
    predictions = int(overrides.get("mtp_num_layers", 0)) or None
    return _megatron_stages(plan, layout, int(found[f"{prefix}.pipeline_model_parallel_size"]), num_layers, predictions)


_ENTRY = re.compile(r"layers\.\d+")


def _megatron_stages(
    plan: Plan, layout: str, num_ranks: int, num_layers: int | None, predictions: int | None
) -> Stages:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    parsed = PipelineParallelLayerLayout(layout, num_ranks)
    parsed.validate_layer_layout(num_layers=num_layers, mtp_num_layers=predictions)
    names = plan.layer_names
    blocks = [i for i, name in enumerate(names) if _ENTRY.fullmatch(name)]
    predicted = [i for i, name in enumerate(names) if name.startswith("mtp.")]
    end = (predicted or blocks)[-1] + 1
    given: dict[Any, Iterator[list[str]]] = {
        LayerType.embedding: iter([list(names[: blocks[0]])]),
        LayerType.decoder: iter([[names[i]] for i in blocks]),
        LayerType.mtp: iter([[names[i]] for i in predicted]),
        LayerType.loss: iter([list(names[end:])]),
    }
    stages = []
    for stage in range(parsed.pipeline_model_parallel_size * parsed.virtual_pipeline_model_parallel_size):
        kinds = parsed.layout[stage % num_ranks][stage // num_ranks]
        stages.append([name for kind in kinds for name in next(given[kind])])
    return stages


# torchtitan and NeMo Automodel


def torchtitan(plan: Plan) -> Stages:
    """`planned` amends the debug model's Trainer.Config; its `_split_module` splits a model of the plan's layers."""
    from torchtitan.distributed.pipeline_parallel import _get_pp_rank_to_stage_indices_mapping, _split_module

    config = executed(export(plan, to="torchtitan").text)["planned"](_debug_config())
    parallelism = config.parallelism
    parts = parallelism.module_fqns_per_model_part
    for rank in range(plan.num_devices):
        found = _get_pp_rank_to_stage_indices_mapping(
            rank, parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule, len(parts)
        )
        assert sorted(found) == [x.index for x in plan.stages_of(rank)], "torchtitan puts stages elsewhere"
    is_hugging_face = plan.layer_names[0].startswith("model.")
    names = tuple(map(child_name, plan.layer_names))
    model = _titan_model(names)
    split = _split_by_backend(model, parts) if is_hugging_face else [_owners(_split_module(model, x)) for x in parts]
    original = dict(zip(names, plan.layer_names, strict=True))
    return [[original[name] for name in stage] for stage in split]


def _split_by_backend(model: Any, parts: Stages) -> Stages:
    """The splitter of torchtitan's transformers backend, which leaves an identity where a module is taken away."""
    from torchtitan.experiments.transformers_modeling_backend import pipeline

    found = list[list[str]]()

    def stage(module: Any, *_arguments: Any, **_options: Any) -> Any:
        assert isinstance(module.rotary_emb, type(model.rotary_emb)), "a stage has no rotary positions"
        found.append(_owners(module))
        return SimpleNamespace(submod=module)

    with patch.object(pipeline, "PipelineStage", stage):
        mesh = SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 1, get_group=lambda _: None)
        pipeline.pipeline_module_split(model, mesh, "Interleaved1F1B", "cpu", parts)
    return found


@cache
def _debug_config() -> Any:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.training.disable_cuda_graphs = True
    return config


@cache
def _titan_model(names: tuple[str, ...]) -> Any:
    """A model with a parameter in every layer."""
    from torch import nn
    from torchtitan.protocols.module import ModuleDict

    model = nn.Module()
    for name in names:
        parent, _, entry = name.rpartition(".")
        if parent and not hasattr(model, parent):
            setattr(model, parent, ModuleDict())
        if parent:
            getattr(model, parent)[entry] = nn.Linear(1, 1, bias=False)
        else:
            setattr(model, name, nn.Linear(1, 1, bias=False))
    model.rotary_emb = nn.Dropout(0.0)  # stands for what every stage of a Hugging Face model has
    return model


def _owners(module: Any) -> list[str]:
    return [name.removesuffix(".weight") for name, _ in module.named_parameters()]


def automodel(plan: Plan) -> Stages:
    """`split_model_into_stages` splits a model of the plan's layers, rank by rank; its stages are kept, not started."""
    from nemo_automodel.components.distributed.pipelining import functional

    config = executed(export(plan, to="automodel").text)["PIPELINE"]
    model, found = _hugging_face_like(plan.layer_names), dict[int, list[str]]()

    def stage(module: Any, index: int, *_arguments: Any, **_options: Any) -> Any:
        found[index] = _owners(module)
        return SimpleNamespace(submod=module)

    with patch.object(functional, "PipelineStage", stage), patch.object(functional, "patch_hf_model_for_pp", _nothing):
        for rank in range(plan.num_devices):
            mesh = SimpleNamespace(
                get_local_rank=lambda rank=rank: rank, size=lambda: plan.num_devices, get_group=lambda _: None
            )
            functional.split_model_into_stages(
                model, mesh, "pp", config.pp_schedule, "cpu", module_names_per_stage=config.module_fqns_per_model_part
            )
            assert set(found) >= {x.index for x in plan.stages_of(rank)}, "Automodel puts stages elsewhere"
    return [found[i] for i in range(plan.num_stages)]


def _nothing(*_arguments: Any, **_options: Any) -> None:
    """Leaves a model's forward as it is."""


@cache
def _hugging_face_like(names: tuple[str, ...]) -> Any:
    """A model with a list `model.layers` and a parameter in every layer."""
    from torch import nn

    inner, model = nn.Module(), nn.Module()
    for name in names:
        parent, _, child = name.rpartition(".")
        if parent == "model":
            setattr(inner, child, nn.Linear(1, 1, bias=False))
        elif parent and not hasattr(inner, "layers"):
            inner.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for x in names if ".layers." in x)
        elif not parent:
            model.model = inner
            setattr(model, child, nn.Linear(1, 1, bias=False))
    inner.rotary_emb = nn.Identity()
    return model


# DeepSpeed, torchgpipe, SGLang


def deepspeed(plan: Plan) -> Stages:
    """The exported subclass divides the layers by its base class's own bounds, on every rank without a process group."""
    found = executed(export(plan, to="deepspeed").text)
    stages, names = [], list(plan.layer_names)
    for rank in range(plan.num_stages):
        made = object.__new__(found["PlannedPipelineModule"])
        made.__dict__.update(
            num_stages=found["ARGUMENTS"]["num_stages"], global_rank=rank, _layer_specs=names, _num_layers=len(names),
            _topo=SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank), get_dim=lambda _: plan.num_stages),
        )  # fmt: skip
        made._partition_layers(method="parameters")
        stages.append(names[made._local_start : made._local_stop])
        owners = {made.stage_owner(i) for i in range(made._local_start, made._local_stop)}
        assert owners == {rank}, "DeepSpeed has another owner"
    return stages


def torchgpipe(plan: Plan) -> Stages:
    """GPipe splits a Sequential of the plan's layers."""
    import torchgpipe as package
    from torch import nn

    model, real = nn.Sequential(), package.GPipe
    for name in plan.layer_names:
        model.add_module(name.replace(".", "_"), nn.Linear(1, 1, bias=False))

    def on_cpu(module: nn.Sequential, **options: Any) -> Any:
        return real(module, devices=["cpu"] * plan.num_stages, **options)

    with patch.object(package, "GPipe", on_cpu):
        made = executed(export(plan, to="torchgpipe").text, model=model)["model"]
    names = iter(plan.layer_names)
    return [[next(names) for _ in partition] for partition in made.partitions]


def sglang(plan: Plan) -> Stages:
    """get_pp_indices reads the variable on every rank."""
    name, _, value = export(plan, to="sglang").text.strip().removeprefix("export ").partition("=")
    blocks = [i for i, layer in enumerate(plan.layer_names) if _ENTRY.fullmatch(layer)]
    stages = []
    with patch.dict("os.environ", {name: value}):
        for rank in range(plan.num_stages):
            first, end = _sglang_indices()(len(blocks), rank, plan.num_stages)
            bounds = [0 if rank == 0 else blocks[first], len(plan.layer_names) if end == len(blocks) else blocks[end]]
            stages.append(list(plan.layer_names[slice(*bounds)]))
    return stages


@cache
def _sglang_indices() -> Callable[[int, int, int], tuple[int, int]]:
    """The one function of the installed file: importing the package needs a GPU's libraries."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations, "sglang is installed"
    text = Path(spec.submodule_search_locations[0], "srt", "distributed", "utils.py").read_text()
    own = [x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef) and x.name == "get_pp_indices"]
    names: dict[str, Any] = {"os": os, "Tuple": tuple}
    exec(compile(ast.Module(body=list(own), type_ignores=[]), "sglang", "exec"), names)
    found: Callable[[int, int, int], tuple[int, int]] = names["get_pp_indices"]
    return found


READERS: dict[str, Callable[[Plan], Stages]] = {
    x.__name__: x for x in (torchtitan, megatron, verl, automodel, deepspeed, torchgpipe, sglang)
}


@contextmanager
def quiet() -> Iterator[None]:
    """Without the receivers' own log lines and warnings."""
    import logging
    import warnings

    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
