"""Profiles and plans whose divided layers are whole again, as trainers see them: they cut between the author's modules.

What was divided is in `ModelId.divided` (gplan_profiler/capture/division.py). The layers of one module that follow each
other are one layer here. Only names, values, shared weights and stages are those of whole layers; costs are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from gplan.core import Plan, Profile
from gplan.core.errors import UsageError


def author_layers(names: Sequence[str], divided: Sequence[str]) -> tuple[tuple[str, range], ...]:
    """The author's layers, each with the layers that are its parts.

    >>> author_layers(["stem", "h.0.mlp", "h.0.out", "h.1", "head"], ["h.0"])
    (('stem', range(0, 1)), ('h.0', range(1, 3)), ('h.1', range(3, 4)), ('head', range(4, 5)))
    """

    def author(name: str) -> str:
        ends = (name.split("..")[0], name.split("..")[-1])
        owners = [min((x for x in divided if f"{end}.".startswith(f"{x}.")), key=len, default=end) for end in ends]
        return "..".join(dict.fromkeys(owners))

    found, times = list[tuple[str, range]](), Counter[str]()
    for name, layers in groupby(range(len(names)), key=lambda i: author(names[i])):
        places = list(layers)
        times[name] += 1
        again = f"#{times[name]}" if times[name] > 1 else ""
        found.append((name + again, range(places[0], places[-1] + 1)))
    return tuple(found)


def authored_profile(profile: Profile) -> Profile:
    """The profile with whole layers; itself if nothing was divided."""
    if not profile.model.divided:
        return profile
    parts = author_layers([layer.name for layer in profile.layers], profile.model.divided)
    place = {layer: i for i, (_, layers) in enumerate(parts) for layer in layers} | {len(profile.layers): len(parts)}
    values = []
    for value in profile.values:
        producer = None if value.producer is None else place[value.producer]
        consumers = tuple(sorted({place[x] for x in value.consumers} - {producer}))
        if consumers:
            values.append(replace(value, producer=producer, consumers=consumers))
    shared = []
    for weight in profile.shared_weights:
        users = tuple(sorted({place[x] for x in weight.layers}))
        if len(users) > 1:
            shared.append(replace(weight, layers=users))
    layers = []
    for name, own in parts:
        layer = profile.layers[own.start]
        costs = tuple(replace(x, leftovers=()) for x in layer.costs)
        layers.append(replace(layer, name=name, same_as=None, costs=costs))
    return replace(
        profile,
        model=replace(profile.model, divided=()),
        layers=tuple(layers),
        values=tuple(values),
        shared_weights=tuple(shared),
    )


def authored_plan(plan: Plan, *, receiver: str, title: str) -> Plan:
    """The plan with whole layers; raises UsageError where it cuts one apart."""
    if not plan.model.divided:
        return plan
    parts = author_layers(plan.layer_names, plan.model.divided)
    for name, layers in parts:
        for cut in plan.cuts:
            if layers.start < cut < layers.stop:
                raise UsageError(
                    f"the plan cuts {name} apart, before {plan.layer_names[cut]}; {title} cuts between whole modules; plan "
                    f"again with --for {receiver}"
                )
    starts = [layers.start for _, layers in parts]
    stages = []
    for stage in plan.stages:
        own = [(name, layers) for name, layers in parts if stage.first_layer <= layers.start < stage.end_layer]
        first = starts.index(stage.first_layer)
        sums = [
            tuple(sum(seconds[i - stage.first_layer] for i in layers) for _, layers in own)
            for seconds in (stage.layer_forward_s, stage.layer_backward_s)
        ]
        stages.append(
            replace(
                stage,
                first_layer=first,
                end_layer=first + len(own),
                layer_names=tuple(name for name, _ in own),
                layer_forward_s=sums[0],
                layer_backward_s=sums[1],
            )
        )
    return replace(plan, stages=tuple(stages), model=replace(plan.model, divided=()))
