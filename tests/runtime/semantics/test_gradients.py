"""Gradients do not depend on stages, micro-batches, schedule, recompute or engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

import gplan
from gplan.core import Plan
from tests.runtime.plans import recomputing
from tests.runtime.semantics.checks import (
    NUM_DEVICES,
    assert_same,
    both_engines,
    gradients_of,
    merged,
    plain_gradients,
    plan_of,
    with_microbatches,
)
from tests.runtime.semantics.models import Skipping, Subject, row, subject

ROW, SKIPPING = subject(row), subject(Skipping)


def trained(case: Subject, plans: Sequence[Plan], batch: Any) -> list[tuple[float, dict[str, Tensor]]]:
    """One step with each of some plans."""
    found = []
    for plan in plans:
        pipe = gplan.pipeline(case.build, plan, loss=case.loss)
        loss = pipe.step(*batch)
        found.append((loss.item(), gradients_of(pipe)))
    return found


def assert_gradients_are_plain(case: Subject, plans: Sequence[Plan], *, num_samples: int = 8) -> None:
    batch = case.batch(num_samples)
    loss, gradients = plain_gradients(case, batch)
    for parts in both_engines(plans[0].num_stages, lambda: trained(case, plans, batch)).values():
        for by_rank in zip(*parts, strict=True):
            assert [x for x, _ in by_rank] == pytest.approx([loss] * len(by_rank), rel=1e-5)
            assert_same(merged(x for _, x in by_rank), gradients)


@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_gradients_independent_of_plan(num_devices: int) -> None:
    choices = [("gpipe", "never"), ("gpipe", "except-last"), ("1f1b", "always"), ("1f1b", "except-last")]
    plans = [plan_of(ROW, num_devices, schedule=schedule, recompute=recompute) for schedule, recompute in choices]
    selected = recomputing(plans[-1], plans[-1].layer_names[::2])
    plans += [selected, replace(selected, schedule="gpipe")]
    plans += [with_microbatches(plans[3], number=number, size=8 // number) for number in (1, 8)]
    assert_gradients_are_plain(ROW, plans)


@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_skips_over_several_stages(num_devices: int) -> None:
    plan = plan_of(SKIPPING, num_devices, recompute="always")
    if num_devices != 3:
        plan = recomputing(replace(plan, schedule="1f1b"), plan.layer_names[1::2])
    assert_gradients_are_plain(SKIPPING, [plan])


@pytest.mark.parametrize("cuts", [("floors.0",), ("floors.3",), ("floors.1", "floors.2")])
def test_skips_cross_whatever_cut_there_is(cuts: tuple[str, ...]) -> None:
    plan = plan_of(SKIPPING, len(cuts) + 1, cut_after=cuts)
    assert all(stage.layer_names[-1] == cut for stage, cut in zip(plan.stages, cuts, strict=False))
    batch = SKIPPING.batch(8)
    ((_, found),) = trained(SKIPPING, [plan], batch)
    assert_same(found, plain_gradients(SKIPPING, batch)[1])


def test_model_in_memory_is_trained_itself() -> None:
    batch = ROW.batch(8)
    _, gradients = plain_gradients(ROW, batch)

    def script() -> list[dict[str, Tensor]]:
        model = ROW.build()
        model.load_state_dict(state)
        pipe = gplan.pipeline(model, plan_of(ROW, 3), loss=ROW.loss)
        pipe.step(*batch)
        held = dict(pipe.named_parameters())
        own = {name: x for name, x in model.named_parameters() if name in held}
        assert all(own[name] is x for name, x in held.items())
        return [gradients_of(pipe)]

    state = gplan.pipeline(ROW.build, plan_of(ROW, 1), loss=ROW.loss).full_state_dict()
    for parts in both_engines(3, script).values():
        assert_same(merged(x for (x,) in parts), gradients)
