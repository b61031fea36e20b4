"""Tables 2 and 3: throughput against K and M, normalised as in the paper, by GPipe's partition rule and by gplan.

GPipe's code balances the FLOPs of the layers' forwards (`gplan/partition/baselines.py`); gplan minimises the simulated step. Both are
priced by the same analytic profile and the same simulator, without a limit of memory: the paper says that it changed
the batch where it did not fit, not how. Throughput is that of one mini-batch of fixed size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import gplan
from gplan.core import Constraints, Plan, Profile, StageCost
from gplan.core.errors import NoPlanError
from gplan.partition.baselines import cumulative_share
from paper.early import recomputing_ahead_s
from paper.profiles import without_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One K and M of a table: seconds of a step, None where the rule has no plan."""

    num_devices: int
    num_microbatches: int
    rule_s: float | None
    best_s: float
    ahead_s: float | None  # the rule's plan, if recomputes did not wait for gradients
    rule_cuts: tuple[int, ...]
    best_cuts: tuple[int, ...]
    rule_imbalance: float | None
    bubble: float  # of gplan's plan, like all that follows
    imbalance: float  # the largest stage over the mean, less 1
    recompute_share: float  # of the time that devices compute
    optimizer_share: float  # of the step, on the device with the most of it
    transfer_share: float  # of the step: what one micro-batch travels over all cuts, forward and back
    is_proven: bool


def cells(
    profile: Profile, *, batch_size: int, device_counts: Sequence[int], microbatch_counts: Sequence[int]
) -> list[Cell]:
    """Every K and M of a table for a mini-batch of that many samples, rows first."""
    free = without_limit(profile)
    return [
        _cell(free, batch_size=batch_size, num_devices=k, num_microbatches=m)
        for m in microbatch_counts
        for k in device_counts
    ]


def _cell(profile: Profile, *, batch_size: int, num_devices: int, num_microbatches: int) -> Cell:
    asked = {
        "num_devices": num_devices,
        "num_microbatches": num_microbatches,
        "microbatch_size": batch_size // num_microbatches,
        "schedule": "gpipe",
        "recompute": "always",
    }
    best = gplan.balance(profile, **asked)  # type: ignore[arg-type]
    rule = plan_by_rule(profile, asked)
    costs = [stage.cost for stage in best.stages]
    computing_s = sum(map(_computing_s, costs))
    return Cell(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        rule_s=rule.prediction.step_s if rule else None,
        best_s=best.prediction.step_s,
        ahead_s=_ahead_s(rule) if rule else None,
        rule_cuts=rule.cuts if rule else (),
        best_cuts=best.cuts,
        bubble=best.prediction.bubble,
        rule_imbalance=_imbalance(rule) if rule else None,
        imbalance=_imbalance(best),
        recompute_share=sum(x.recompute_s for x in costs) / computing_s,
        optimizer_share=max(x.optimizer_s for x in costs) / best.prediction.step_s,
        transfer_share=sum(x.activation_s + x.gradient_s for x in costs) / best.prediction.step_s,
        is_proven=best.proof.is_proven,
    )


def _computing_s(cost: StageCost) -> float:
    return cost.forward_s + cost.backward_s + cost.recompute_s


def _imbalance(plan: Plan) -> float:
    computing = [_computing_s(stage.cost) for stage in plan.stages]
    return max(computing) / (sum(computing) / len(computing)) - 1.0


def _ahead_s(plan: Plan) -> float:
    return recomputing_ahead_s([stage.cost for stage in plan.stages], num_microbatches=plan.num_microbatches)


def plan_by_rule(profile: Profile, asked: Mapping[str, object]) -> Plan | None:
    """The plan with GPipe's cuts; None where its rule leaves a stage empty."""
    flops = [float(sum(x.num_flops for x in layer.costs[0].forward_work)) for layer in profile.layers]
    try:
        cuts = cumulative_share(flops, num_stages=int(asked["num_devices"]))  # type: ignore[call-overload]
    except NoPlanError:
        return None
    names = tuple(profile.layers[cut - 1].name for cut in cuts)
    return gplan.balance(profile, constraints=Constraints(cut_after=names), **asked)  # type: ignore[arg-type]


def normalised_seconds(found: Sequence[Cell], name: str) -> dict[tuple[int, int], float | None]:
    """By (K, M): how much faster than the first cell a step is, of one of the seconds that cells have."""
    seconds = {(x.num_devices, x.num_microbatches): getattr(x, name) for x in found}
    base = getattr(found[0], name)
    return {key: base / value if base and value else None for key, value in seconds.items()}
