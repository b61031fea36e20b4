"""Mixtures of experts train on both engines as the plain model does, micro-batch by micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import gplan
from tests.profiler.experts import MODELS, loss, tokens
from tests.runtime.semantics.checks import (
    MICROBATCH_SIZE,
    assert_same,
    both_engines,
    built,
    gradients_of,
    merged,
    plan_of,
)
from tests.runtime.semantics.models import Subject

NUM_MICROBATCHES = 4
INPUTS, TARGETS = (tokens(NUM_MICROBATCHES * MICROBATCH_SIZE, seed=seed) for seed in (0, 1))
SUBJECTS = {
    kind: Subject(
        build=MODELS[kind],
        inputs=lambda _, n: tokens(n),
        targets=lambda _, n: tokens(n, seed=1),
        loss=loss,
        loss_reduction="mean",
    )
    for kind in ("grouped, auxiliary loss", "looped, auxiliary loss", "balanced")
}


@pytest.mark.parametrize("kind", SUBJECTS)
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_routed_layers_train_as_the_plain_model(kind: str, recompute: Any) -> None:
    subject = SUBJECTS[kind]
    plan = plan_of(subject, 2, num_microbatches=NUM_MICROBATCHES, recompute=recompute)
    assert any("depends on routing" in note for note in plan.notes)

    def script() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        pipe = gplan.pipeline(built(subject), plan, loss=loss, inputs=INPUTS)
        pipe.step(INPUTS, TARGETS)
        return gradients_of(pipe), pipe.full_state_dict()

    plain = built(subject)
    for inputs, targets in zip(INPUTS.split(MICROBATCH_SIZE), TARGETS.split(MICROBATCH_SIZE), strict=True):
        (loss(plain(inputs), targets) / NUM_MICROBATCHES).backward()  # type: ignore[no-untyped-call]
    expected = {name: x.grad for name, x in plain.named_parameters() if x.grad is not None}
    for engine, found in both_engines(2, script).items():
        assert_same(merged(part for part, _ in found), expected, what=engine)
        assert_same(merged(state for _, state in found), plain.state_dict(), what=engine)
