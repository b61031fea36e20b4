"""Plans that recompute the layers that a test names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gplan.core import Plan


def recomputing(plan: Plan, layers: Collection[str]) -> Plan:
    """The same plan with recompute "selected" for these layers, wherever they lie; its costs stay what they were."""
    assert {*layers} <= {*plan.layer_names}
    stages = tuple(
        replace(stage, recompute_layers=tuple(x for x in stage.layer_names if x in layers)) for stage in plan.stages
    )
    return replace(plan, recompute="selected", stages=stages)
