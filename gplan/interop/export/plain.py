"""To plain JSON: what a program needs to run the plan, without the costs and the proof. Every plan can be expressed."""

from __future__ import annotations

import json

from gplan.interop.export.exported import Export
from gplan.nouns import Plan, Profile, Stage


def to_json(plan: Plan, profile: Profile | None) -> Export:
    """An object with the stages and the way to run them; layers are counted in the order of `stages`."""
    content = {
        "model": plan.model.name,
        "granularity": plan.granularity,
        "num_devices": plan.num_devices,
        "num_stages": plan.num_stages,
        "num_replicas": plan.num_replicas,
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
        "device": None if stage.place is None else {"name": stage.place.name, "host": stage.place.host},
    }
