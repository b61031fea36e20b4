"""Checks of what the receiving projects require of a plan.

Every check raises UsageError with what was found, what the receiver can express and what to do. Checks of values between
layers and of shared weights need the profile; without it they pass, and a note of the export says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gplan.core import Plan, Profile, Stage
from gplan.core.errors import UsageError
from gplan.schedules.registry import schedule_info


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan in the format of another project."""

    format: str
    text: str
    notes: tuple[str, ...] = ()  # what the text cannot express


_OF_ONE_CHUNK = {"interleaved-1f1b:1": "1f1b", "looped-bfs:1": "gpipe"}

MODEL_INPUT = "the model's input"


def check_order(plan: Plan, profile: Profile | None, *, receiver: str) -> None:
    """Raise UsageError unless the stages follow the profile's order, in which the model runs its layers."""
    names = tuple(layer.name for layer in profile.layers) if profile is not None else plan.layer_names
    strange = sorted(set(names) ^ set(plan.layer_names))
    if strange:
        owner = "the plan" if strange[0] in plan.layer_names else "the profile"
        raise UsageError(
            f"only {owner} has a layer {strange[0]}; expected the profile that the plan was made from; give it with --profile"
        )
    for found, expected in zip(plan.layer_names, names, strict=True):
        if found != expected:
            raise UsageError(
                f"the plan puts {found} where the model runs {expected}; {receiver} runs the layers in the model's own "
                "order; export to json, or keep the branches together with --keep-together and plan again"
            )


def check_layers_are_modules(plan: Plan, *, receiver: str) -> None:
    """Raise UsageError for layers that are single operations."""
    if plan.granularity != "layer":
        raise UsageError(
            f"the plan cuts between operations, such as {plan.layer_names[0]}; {receiver} cuts between modules; profile "
            "with --granularity layer and plan again"
        )


def check_one_pipeline(plan: Plan, *, receiver: str) -> None:
    """Raise UsageError for a plan with replicas."""
    if plan.num_replicas > 1:
        raise UsageError(
            f"the plan runs {plan.num_replicas} replicas; {receiver} runs one pipeline; plan with --k {plan.num_devices} alone"
        )


def schedule_name(plan: Plan, known: Mapping[str, str], *, receiver: str) -> str:
    """The receiver's name of the plan's schedule, for a receiver with one stage per device."""
    if plan.num_stages > plan.num_devices:
        choice = " or ".join(known)
        raise UsageError(
            f"the plan has {plan.num_stages} stages on {plan.num_devices} devices ({schedule_info(plan.schedule).title}); {receiver} holds "
            f"one stage per device; plan again with --schedule {choice}"
        )
    return rule_name(plan, known, receiver=receiver)


def rule_name(plan: Plan, known: Mapping[str, str], *, receiver: str) -> str:
    """The receiver's name of the plan's schedule, with any number of stages per device."""
    rule = plain_schedule(plan).partition(":")[0]
    return _word(rule, known, what="schedule", option="--schedule", receiver=receiver)


def plain_schedule(plan: Plan) -> str:
    """The common name of the plan's schedule; with one chunk per device that of the schedule without chunks."""
    title = schedule_info(plan.schedule).title
    return _OF_ONE_CHUNK.get(title, title)


def recompute_name(plan: Plan, known: Mapping[str, str], *, receiver: str) -> str:
    """The receiver's name of the plan's recompute mode."""
    return _word(plan.recompute, known, what="recompute", option="--recompute", receiver=receiver)


def modules_of(layer: str) -> tuple[str, ...]:
    """The modules of a layer: several if they could not be separated; "#2" marks a second call.

    >>> modules_of("blocks.3"), modules_of("relu#2"), modules_of("stem..blocks.0")
    (('blocks.3',), ('relu',), ('stem', 'blocks.0'))
    """
    return tuple(name.partition("#")[0] for name in layer.split(".."))


def check_single_modules(plan: Plan, *, receiver: str) -> None:
    """Raise UsageError unless every layer is one module that is called once, as in a sequence of modules."""
    for layer in plan.layer_names:
        if modules_of(layer) != (layer,):
            found = "several modules that cannot be cut apart" if ".." in layer else "a second call of a module"
            raise UsageError(
                f"layer {layer} is {found}; {receiver} takes a sequence of modules; write the model as an nn.Sequential, "
                "profile that and plan again"
            )


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
        for shared in profile.shared_weights
        if len({stage_of[profile.layers[layer].name] for layer in shared.layers}) > 1
    )


def check_whole_weights(plan: Plan, profile: Profile | None, *, receiver: str) -> None:
    """Raise UsageError if a parameter is used on several stages."""
    split = split_weights(plan, profile)
    if split:
        raise UsageError(
            f"{split[0]} is used on several stages; {receiver} does not sum its gradients; use it on one stage "
            "(--keep-together), or untie it"
        )


def boundaries(plan: Plan) -> tuple[int, ...]:
    """Stage i holds layers boundaries[i] to boundaries[i + 1] - 1 of the plan's order."""
    return (0, *(stage.end_layer for stage in plan.stages))


def balance(plan: Plan) -> tuple[int, ...]:
    """The number of layers of each stage."""
    return tuple(end - first for first, end in pairwise(boundaries(plan)))


def stage_comments(plan: Plan, *, what: str) -> tuple[str, ...]:
    """A comment line for every stage: its layers, and its rank if devices hold several stages."""
    is_chunked = plan.num_stages > plan.num_devices
    places = [f" on rank {device}" if is_chunked else "" for device in plan.devices]
    return tuple(f"# {what} {x.index}{place}: {_span(x)}" for x, place in zip(plan.stages, places, strict=True))


def quoted(names: Sequence[str]) -> str:
    """Names as a list of strings that is valid TOML, JSON and Python."""
    return json.dumps(list(names), ensure_ascii=False)


def _word(found: str, known: Mapping[str, str], *, what: str, option: str, receiver: str) -> str:
    if found not in known:
        choice = " or ".join(known)
        raise UsageError(
            f"the plan has {what} {found}; {receiver} can express {choice}; plan again with {option} {choice}"
        )
    return known[found]


def _span(stage: Stage) -> str:
    first, last = stage.layer_names[0], stage.layer_names[-1]
    return first if stage.num_layers == 1 else f"{first} to {last}, {stage.num_layers} layers"
