"""Plans for other trainers: functions from a plan to text.

A plan that the receiver cannot express is refused with the reason. Values that skip layers and shared weights are known
from the profile that the plan was made from; without it, a note says that they were not checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from gplan.core import Plan, Profile
from gplan.core.errors import UsageError
from gplan.interop.author_layers import authored_plan, authored_profile
from gplan.interop.export.layer_counts import to_deepspeed, to_inference, to_torchgpipe
from gplan.interop.export.megatron import HYBRID, to_megatron, to_verl
from gplan.interop.export.module_lists import to_automodel, to_torchtitan
from gplan.interop.export.nanotron import to_nanotron
from gplan.interop.export.requirements import Written
from gplan.interop.export.torch_pipelining import to_csv, to_pytorch
from gplan.interop.receiver_table import RECEIVERS
from gplan.interop.receivers import check_granularity, check_plan, special_layers, special_text
from gplan_profiler.analytic.decoder_profile import UNDIVIDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan in the format of another project."""

    format: str
    text: str
    notes: tuple[str, ...] = ()  # what the text cannot express


def to_json(plan: Plan, profile: Profile | None) -> Written:
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
        "stages": [
            {
                "index": stage.index,
                "rank": rank,
                "first_layer": stage.first_layer,
                "end_layer": stage.end_layer,
                "layers": list(stage.layer_names),
                "recompute_layers": list(stage.recompute_layers),
                "device": None if (place := stage.machine_device) is None else {"name": place.name, "host": place.host},
            }
            for stage, rank in zip(plan.stages, plan.devices, strict=True)
        ],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n", ()


FORMATS: dict[str, Callable[[Plan, Profile | None], Written]] = {
    "torchtitan": to_torchtitan,
    "megatron": to_megatron,
    "verl": to_verl,
    "automodel": to_automodel,
    "nanotron": to_nanotron,
    "deepspeed": to_deepspeed,
    "torchgpipe": to_torchgpipe,
    "pytorch": to_pytorch,
    "vllm": partial(to_inference, variable="VLLM_PP_LAYER_PARTITION"),
    "sglang": partial(to_inference, variable="SGLANG_PP_LAYER_PARTITION"),
    "csv": to_csv,
    "json": to_json,
}


def export(plan: Plan, *, to: str, profile: Profile | None = None) -> Export:
    """The plan in the syntax of another project; raises UsageError for what that project cannot express or run."""
    if to not in FORMATS:
        raise UsageError(f"format {to!r} is not known; expected one of {', '.join(FORMATS)}")
    if to not in RECEIVERS:
        text, given = FORMATS[to](plan, profile)
        return Export(format=to, text=text, notes=tuple(given))
    check_granularity(to, plan.model, plan.granularity, plan.layer_names[0])
    widths = dict(plan.model.settings)
    # A computed profile names the ranks with the same weights, and those of them with other data.
    if UNDIVIDED in widths:
        has_others = RECEIVERS[to].replicas
        replicas = plan.num_replicas * int(widths["data"]) // int(widths[UNDIVIDED]) if has_others else 1
        plan = replace(plan, num_replicas=replicas, sharding="none")  # the trainer has its own sharding
    plan = authored_plan(plan, receiver=to, title=RECEIVERS[to].title)
    whole = None if profile is None else authored_profile(profile)
    check_plan(to, plan, whole)
    text, given = FORMATS[to](plan, whole)
    receiver, notes = RECEIVERS[to], [*given]
    if missing := receiver.lacks & special_layers(whole):
        notes.append(
            f"{receiver.title}'s own models have no {special_text(missing)}: the model that you train must have that"
        )
    if HYBRID not in text:
        notes.append(f"the format, not this plan, was checked with {receiver.checked_with}: {receiver.how}")
    places = [plan.stages_of(device)[0].machine_device for device in range(plan.num_devices)]
    names = [x.name for x in places if x is not None]
    if names:
        notes.append(f"the ranks are meant for these devices, in this order: {', '.join(names)}")
    if profile is None:
        notes.append(
            "without the profile, the order of the layers, their kinds (such as Mamba-2), skip connections and shared weights were not checked"
        )
    return Export(format=to, text=text, notes=tuple(notes))
