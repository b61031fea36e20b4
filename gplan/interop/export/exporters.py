"""Plans for other trainers: functions from a plan to text, one module for each receiving project.

A plan that the receiver cannot express is refused with the reason. Values that skip layers and shared weights are known
from the profile that the plan was made from; without it, a note says that they were not checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from gplan.core import Plan, Profile, Stage
from gplan.core.errors import UsageError
from gplan.interop.export.automodel import to_automodel
from gplan.interop.export.deepspeed import to_deepspeed
from gplan.interop.export.inference import to_inference
from gplan.interop.export.megatron import to_megatron, to_verl
from gplan.interop.export.requirements import Export
from gplan.interop.export.torch_pipelining import to_csv, to_pytorch
from gplan.interop.export.torchgpipe import to_torchgpipe
from gplan.interop.export.torchtitan import to_torchtitan
from gplan.interop.receivers import RECEIVERS


def to_json(plan: Plan, profile: Profile | None) -> Export:
    """Plain JSON for any plan: the stages and how to run them, without costs and proof; layers count along `stages`."""
    content = {
        "model": plan.model.name,
        "granularity": plan.granularity,
        "num_devices": plan.num_devices,
        "num_stages": plan.num_stages,
        "num_replicas": plan.num_replicas,
        "sharding": plan.sharding,
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "microbatch_size": plan.microbatch_size,
        "batch_size": plan.batch_size,
        "recompute": plan.recompute,
        "stages": [_stage(stage, rank) for stage, rank in zip(plan.stages, plan.devices, strict=True)],
    }
    return Export(format="json", text=json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _stage(stage: Stage, rank: int) -> dict[str, object]:
    return {
        "index": stage.index,
        "rank": rank,
        "first_layer": stage.first_layer,
        "end_layer": stage.end_layer,
        "layers": list(stage.layer_names),
        "recompute_layers": list(stage.recompute_layers),
        "device": None
        if stage.machine_device is None
        else {"name": stage.machine_device.name, "host": stage.machine_device.host},
    }


Exporter: TypeAlias = Callable[[Plan, Profile | None], Export]

FORMATS: dict[str, Exporter] = {
    "torchtitan": to_torchtitan,
    "megatron": to_megatron,
    "verl": to_verl,
    "automodel": to_automodel,
    "deepspeed": to_deepspeed,
    "torchgpipe": to_torchgpipe,
    "pytorch": to_pytorch,
    "vllm": to_inference("vllm"),
    "sglang": to_inference("sglang"),
    "csv": to_csv,
    "json": to_json,
}

_OF_ANY_PLAN = ("csv", "json")


def export(plan: Plan, *, to: str, profile: Profile | None = None) -> Export:
    """The plan in the syntax of another project; raises UsageError for what that project cannot express."""
    if to not in FORMATS:
        raise UsageError(f"format {to!r} is not known; expected one of {', '.join(FORMATS)}")
    made = FORMATS[to](plan, profile)
    return replace(made, notes=made.notes + _common_notes(plan, profile, to))


def _common_notes(plan: Plan, profile: Profile | None, to: str) -> tuple[str, ...]:
    if to in _OF_ANY_PLAN:
        return ()
    notes = [f"checked with {RECEIVERS[to].checked_with}: {RECEIVERS[to].how}"]
    places = [plan.stages_of(device)[0].machine_device for device in range(plan.num_devices)]
    names = [x.name for x in places if x is not None]
    if names:
        notes.append(f"the ranks are meant for these devices, in this order: {', '.join(names)}")
    if profile is None:
        notes.append(
            "without the profile, the order of the layers, what skips layers and shared weights were not checked"
        )
    return tuple(notes)
