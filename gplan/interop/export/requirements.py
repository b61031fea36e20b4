"""What exports have in common: parts of plans and profiles that several of them describe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeAlias

from gplan.core import Plan, Profile
from gplan.interop.receivers import MODEL_INPUT

Written: TypeAlias = tuple[str, Sequence[str]]
"""A plan in the syntax of another project, and notes on what that cannot express."""

BY_BLOCK = "recomputes block by block, the plan stage by stage: time and memory will differ"
"""The end of a note on a trainer."""


def skipping_values(plan: Plan, profile: Profile | None) -> tuple[str, ...]:
    """The layers whose outputs cross a cut other than from the layer before the cut: skip connections."""
    if profile is None:
        return ()
    crossing = {
        value.producer
        for value in profile.values
        for cut in plan.cuts
        if (value.producer is None or value.producer < cut - 1) and value.consumers[-1] >= cut
    }
    makers = sorted(-1 if x is None else x for x in crossing)
    return tuple(MODEL_INPUT if x < 0 else profile.layers[x].name for x in makers)


def split_weights(plan: Plan, profile: Profile | None) -> tuple[str, ...]:
    """The parameters that are used on several stages."""
    if profile is None:
        return ()
    stage_of = {name: stage.index for stage in plan.stages for name in stage.layer_names}
    return tuple(
        shared.name
        for shared in profile.tied_weights
        if len({stage_of[profile.layers[layer].name] for layer in shared.layers}) > 1
    )


def stage_comments(plan: Plan, *, what: str) -> str:
    """A comment line for every stage: its layers in order, and its rank if devices hold several stages."""
    comments = []
    for x, device in zip(plan.stages, plan.devices, strict=True):
        place = f" on rank {device}" if plan.num_stages > plan.num_devices else ""
        comments.append(f"# {what} {x.index}{place}: {json.dumps(x.layer_names)}")  # a line break would end the comment
    return "\n".join(comments)


def quoted(names: Sequence[str]) -> str:
    """Names as a list of strings that is valid JSON and Python."""
    return json.dumps(list(names), ensure_ascii=False)


def widths_of_model(profile: Profile | None, title: str) -> list[str]:
    """A note on the widths of a computed profile for a trainer that has only a pipeline and replicas; nothing where they are 1."""
    found = [f"{x} {y}" for x, y in computed_widths(profile).items() if x in ("tensor", "context", "expert") and y > 1]
    return [f"the plan counts with {', '.join(found)}, which {title} leaves to the model itself"] if found else []


def computed_widths(profile: Profile | None) -> dict[str, int]:
    """The widths of a computed profile by their names, such as tensor; none of a measured one."""
    if profile is None or not profile.sums_in_place:
        return {}
    return {name: int(value) for name, value in profile.model.settings if value.isdecimal()}
