"""Small profiles with a known bottleneck, and plans and settings for them."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from typing import Any

from gplan.core import Link, Plan, Profile, Value, ValueCost
from gplan.core.progress import no_progress
from gplan.evaluate.options import Option, OptionKind, evaluate_options
from gplan.evaluate.replanning import PlanSettings
from gplan.strategy_search.planner import balance
from tests.made import make_profile
from tests.scheduled import OWN

ONE_GB_PER_S = Link(latency_s=0.0, bytes_per_s=1e9)


def setting(**given: object) -> PlanSettings:
    """Two stages, four micro-batches of one sample, GPipe, no recompute, no limit, for the step;
    but for what is given."""
    usual: dict[str, object] = {
        "num_devices": 2, "num_microbatches": 4, "microbatch_size": 1, "schedule": "gpipe", "recompute": "never",
        "minimize": "step-time", "memory_bytes": None,
    }  # fmt: skip
    return PlanSettings(**{**usual, **given})  # type: ignore[arg-type]


CHUNKED: tuple[dict[str, Any], ...] = (
    {"schedule": "interleaved-1f1b:2"},
    {"schedule": "zb-v"},
    {"schedule": OWN, "num_microbatches": 2},
)
"""What is given for settings of two devices, of which one or both have several stages."""


def plan_of(profile: Profile, **given: object) -> Plan:
    """The plan of `balance` for such a `setting`."""
    wanted = setting(**given)
    return balance(profile, **{x.name: getattr(wanted, x.name) for x in fields(wanted)})


def tried(profile: Profile, asked: PlanSettings, *, options_s: float = 60.0) -> dict[OptionKind, list[Option]]:
    """All options by their kind."""
    found: dict[OptionKind, list[Option]] = {}
    deadline_s = time.perf_counter() + options_s
    for option in evaluate_options(profile, asked, deadline_s=deadline_s, progress=no_progress):
        found.setdefault(option.kind, []).append(option)
    return found


def recompute_bound() -> Profile:
    """Three equal layers that keep 10 bytes each of a micro-batch: where 70 bytes are all,
    one of them is recomputed."""
    return make_profile([1.0, 1.0, 1.0], stash_bytes=10)


def memory_bound() -> Profile:
    """A device of 60 bytes holds a or b, c, d, not a and b: the cut after a takes 63 s a step, the one after b 54 s."""
    return make_profile([1.0, 3.0, 1.0, 1.0], weight_bytes=[10, 10, 0, 0])


def cut_bound() -> Profile:
    """Two equal layers, and a second each way between them: of 12 s, 2 s are transfers."""
    return make_profile([1.0, 1.0], [1.0, 1.0], output_bytes=10**9, link=ONE_GB_PER_S)


def two_towers() -> Profile:
    """Layers a and b both feed c; b alone and then a with c are two equal stages,
    in another order than the profile's."""
    cost = ValueCost(microbatch_size=1, num_bytes=0)
    values = tuple(Value(producer=i, consumers=(2,), costs=(cost,)) for i in (0, 1))
    return replace(make_profile([1.0, 2.0, 1.0]), values=values)


def uneven(num_layers: int = 8) -> Profile:
    """Layers that differ, with transfers that take time."""
    return make_profile(
        [1.0, 4.0, 2.0, 5.0, 1.0, 3.0, 2.0, 6.0][:num_layers],
        output_bytes=10**9,
        optimizer_s=3.0,
        weight_bytes=8,
        link=ONE_GB_PER_S,
    )


def split(profile: Profile) -> Profile:
    """The same with backwards of two equal halves."""
    layers = []
    for layer in profile.layers:
        halves = [cost.backward.times(0.5) for cost in layer.costs]
        costs = (replace(x, input_gradient=y, weight_gradient=y) for x, y in zip(layer.costs, halves, strict=True))
        layers.append(replace(layer, costs=tuple(costs)))
    return replace(profile, layers=tuple(layers))
