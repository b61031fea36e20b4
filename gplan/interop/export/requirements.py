"""What the receiving projects ask of a plan, and how a plan that does not meet it is refused.

Every check raises UsageError with what was found, what the receiver can express and what to do. Those that look at
what passes between layers need the profile; without it they find nothing, and the export says that it was not checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gplan.core import Plan, Profile, Stage
from gplan.core.errors import UsageError
from gplan.schedules.registry import schedule_info

# What an export is: text in the syntax of the receiving project, and what the text cannot say.


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan as another project reads it."""

    format: str
    text: str
    notes: tuple[str, ...] = ()  # what a reader must know or do beside


_OF_ONE_CHUNK = {"interleaved-1f1b:1": "1f1b", "looped-bfs:1": "gpipe"}

MODEL_INPUT = "the model's input"


def check_order(plan: Plan, profile: Profile | None, *, receiver: str) -> None:
    """The stages follow the profile's order, which is the order in which the model runs its layers."""
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
    """The layers are what the author wrote as units, not single operations."""
    if plan.granularity != "layer":
        raise UsageError(
            f"the plan cuts between operations, such as {plan.layer_names[0]}; {receiver} cuts between modules; profile "
            "with --granularity layer and plan again"
        )


def check_one_pipeline(plan: Plan, *, receiver: str) -> None:
    """The plan has no replicas."""
    if plan.num_replicas > 1:
        raise UsageError(
            f"the plan runs {plan.num_replicas} replicas; {receiver} runs one pipeline; plan with --k {plan.num_devices} alone"
        )


def schedule_name(plan: Plan, known: Mapping[str, str], *, receiver: str) -> str:
    """What the receiver, which holds one stage on a device, calls the plan's schedule."""
    if plan.num_stages > plan.num_devices:
        choice = " or ".join(known)
        raise UsageError(
            f"the plan has {plan.num_stages} stages on {plan.num_devices} devices ({schedule_info(plan.schedule).title}); {receiver} holds "
            f"one stage on a device; plan again with --schedule {choice}"
        )
    return rule_name(plan, known, receiver=receiver)


def rule_name(plan: Plan, known: Mapping[str, str], *, receiver: str) -> str:
    """What the receiver calls the rule of the plan's schedule, with however many chunks a device."""
    rule = plain_schedule(plan).partition(":")[0]
    return _word(rule, known, what="schedule", option="--schedule", receiver=receiver)


def plain_schedule(plan: Plan) -> str:
    """What people call the plan's schedule; one of chunks that has one chunk a device as what it is then.

    No text of a custom order.
    """
    title = schedule_info(plan.schedule).title
    return _OF_ONE_CHUNK.get(title, title)


def recompute_name(plan: Plan, known: Mapping[str, str], *, receiver: str) -> str:
    """What the receiver calls the plan's way of recomputing."""
    return _word(plan.recompute, known, what="recompute", option="--recompute", receiver=receiver)


def modules_of(layer: str) -> tuple[str, ...]:
    """The modules that a layer's name stands for: several where they could not be cut apart; "#2" is a second call.

    >>> modules_of("blocks.3"), modules_of("relu#2"), modules_of("stem..blocks.0")
    (('blocks.3',), ('relu',), ('stem', 'blocks.0'))
    """
    return tuple(name.partition("#")[0] for name in layer.split(".."))


def check_single_modules(plan: Plan, *, receiver: str) -> None:
    """Every layer is one module that is called once, so that the layers can be the children of a sequence."""
    for layer in plan.layer_names:
        if modules_of(layer) != (layer,):
            found = "several modules that cannot be cut apart" if ".." in layer else "a second call of a module"
            raise UsageError(
                f"layer {layer} is {found}; {receiver} takes a sequence of modules; write the model as an nn.Sequential, "
                "profile that and plan again"
            )


def skipping_values(plan: Plan, profile: Profile | None) -> tuple[str, ...]:
    """Which layers make values that cross a cut without the layer before the cut passing them on."""
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


def torn_weights(plan: Plan, profile: Profile | None) -> tuple[str, ...]:
    """Which parameters are used by layers of several stages."""
    if profile is None:
        return ()
    stage_of = {name: stage.index for stage in plan.stages for name in stage.layer_names}
    return tuple(
        shared.name
        for shared in profile.shared_weights
        if len({stage_of[profile.layers[layer].name] for layer in shared.layers}) > 1
    )


def check_whole_weights(plan: Plan, profile: Profile | None, *, receiver: str) -> None:
    """No parameter is used on several stages."""
    torn = torn_weights(plan, profile)
    if torn:
        raise UsageError(
            f"{torn[0]} is used on several stages; {receiver} does not add up its gradients; use it on one stage "
            "(--keep-together), or untie it"
        )


def boundaries(plan: Plan) -> tuple[int, ...]:
    """The places in the plan's order where stages begin and end, one more than stages.

    A stage i holds layers boundaries[i] to boundaries[i + 1] - 1.
    """
    return (0, *(stage.end_layer for stage in plan.stages))


def balance(plan: Plan) -> tuple[int, ...]:
    """How many layers each stage holds."""
    return tuple(end - first for first, end in pairwise(boundaries(plan)))


def stage_comments(plan: Plan, *, what: str) -> tuple[str, ...]:
    """A line of comment for every stage: which layers it holds, and where, if devices hold several."""
    is_chunked = plan.num_stages > plan.num_devices
    places = [f" on rank {device}" if is_chunked else "" for device in plan.devices]
    return tuple(f"# {what} {x.index}{place}: {_span(x)}" for x, place in zip(plan.stages, places, strict=True))


def quoted(names: Sequence[str]) -> str:
    """Names as a list of strings that TOML, JSON and Python all read alike."""
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
