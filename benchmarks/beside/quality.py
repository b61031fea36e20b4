"""How good everybody's cut is: the largest stage it leaves over the smallest possible, by one measured profile.

All cuts are priced by gplan's cost model with the objective `max-stage`, without transfers and without gplan's own
engine, which no other project accounts for: seconds that a stage computes for a micro-batch, forward and backward. The
optimum is proven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from torch import nn

import gplan
from beside.contenders import Cuts
from beside.models import NUM_MICROBATCHES
from gplan.core import Constraints, Plan, Profile
from gplan.core.errors import NoPlanError
from gplan.core.machine import FREE_LINK
from gplan.partition.baselines import block_partition, equal_counts, least_spread

DEVICE_COUNTS = (2, 4, 8)


def plan_with(
    profile: Profile,
    cuts: Cuts,
    *,
    schedule: str = "gpipe",
    recompute: str = "never",
    minimize: str = "step-time",
) -> Plan:
    """gplan's plan that is cut before these layers."""
    constraints = Constraints(cut_after=tuple(profile.layers[cut - 1].name for cut in cuts))
    return gplan.balance(
        profile,
        num_devices=len(cuts) + 1,
        num_microbatches=NUM_MICROBATCHES,
        schedule=schedule,
        recompute=recompute,
        minimize=minimize,
        constraints=constraints,
    )


def cut_rules(profile: Profile, model: nn.Sequential, block: str) -> dict[str, Callable[[int], Cuts]]:
    """What others cut by: K to cuts; they raise NoPlanError where they have none.

    DeepSpeed's `type:regex` counts the layers whose class is `block` (deepspeed/runtime/pipe/module.py,
    _partition_layers).
    """
    num_parameters = [sum(x.numel() for x in layer.parameters() if x.requires_grad) for layer in model]
    seconds = [x.costs[0].forward.median_s + x.costs[0].backward.median_s for x in profile.layers]
    is_block = [float(type(layer).__name__ == block) for layer in model]
    return {
        "torchgpipe's rule, gplan's profile": lambda k: block_partition(seconds, num_stages=k),
        "equal layer counts": lambda k: tuple(len(model) * i // k for i in range(1, k)),
        "DeepSpeed, uniform": lambda k: equal_counts(len(model), num_stages=k),
        "DeepSpeed, by parameters": lambda k: least_spread(num_parameters, num_stages=k),
        "DeepSpeed, by type": lambda k: least_spread(is_block, num_stages=k),
    }


def rated(
    profile: Profile, rules: Mapping[str, Callable[[int], Cuts]], *, given: Mapping[tuple[str, int], Cuts]
) -> Iterator[dict[str, object]]:
    """A row for each rule and K, and for each of the cuts that are `given` by name and K."""
    compute_only = replace(profile, engine=None, link=FREE_LINK)
    for k in DEVICE_COUNTS:
        optimum = gplan.balance(compute_only, num_devices=k, num_microbatches=NUM_MICROBATCHES, minimize="max-stage")
        if not optimum.proof.is_proven:
            raise ValueError(f"the optimum for {k} devices is not proven; expected so few layers to be")
        found: dict[str, Cuts | str] = {name: cuts for (name, of), cuts in given.items() if of == k}
        found |= {name: cuts_or_reason(rule, k) for name, rule in rules.items()}
        found["gplan, for the step"] = gplan.balance(profile, num_devices=k, num_microbatches=NUM_MICROBATCHES).cuts
        found["gplan, for the largest stage"] = optimum.cuts
        for name, cuts in found.items():
            row: dict[str, object] = {"k": k, "rule": name, "optimum_s": optimum.proof.objective_s}
            if isinstance(cuts, str):
                yield row | {"no_plan": cuts}
                continue
            largest_s = plan_with(compute_only, cuts, minimize="max-stage").proof.objective_s
            yield row | {"cuts": list(cuts), "largest_s": largest_s, "ratio": largest_s / optimum.proof.objective_s}


def cuts_or_reason(rule: Callable[[int], Cuts], k: int) -> Cuts | str:
    """What a rule cuts K stages by, or why it has no plan for them."""
    try:
        return rule(k)
    except NoPlanError as error:
        return str(error)
