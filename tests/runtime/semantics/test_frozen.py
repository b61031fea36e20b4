"""Frozen layers and stages without trainable parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gplan
from tests.runtime.plans import new_captures
from tests.runtime.semantics.checks import (
    NUM_DEVICES,
    assert_same,
    both_engines,
    built,
    failures,
    gradients_of,
    merged,
    plain_gradients,
    plan_of,
)
from tests.runtime.semantics.models import Floor, Subject, Tower, row, subject


class Waves(nn.Module):
    """A layer without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) + x


def frozen_row(*names: str) -> Callable[[], nn.Module]:
    """A row with some frozen layers."""

    def build() -> nn.Module:
        model = row()
        for name in names:
            model.get_submodule(name).requires_grad_(False)
        return model

    return build


def bare_row() -> nn.Module:
    """Layers with parameters and others without."""
    return nn.Sequential(Waves(), Floor(), Waves(), Waves(), Floor(), Waves())


def frozen_tower() -> nn.Module:
    """A traced model with two frozen layers and a frozen bias."""
    model = Tower()
    model.floors[:2].requires_grad_(False)
    model.get_parameter("floors.3.mix.bias").requires_grad_(False)
    return model


FIRST, MIDDLE, LAST, ALL_BUT_HEAD = (
    subject(frozen_row(*names)) for names in (("0", "1"), ("1", "2"), ("3", "4"), ("0", "1", "2", "3"))
)
BARE, TOWER = subject(bare_row), subject(frozen_tower)


def gradients(case: Subject, num_devices: int, cuts: tuple[str, ...]) -> list[dict[str, Tensor]]:
    """Gradients with and without recompute, of a mini-batch that does not divide."""
    found = []
    for recompute, schedule in (("never", "gpipe"), ("always", "1f1b")):
        plan = plan_of(case, num_devices, cut_after=cuts, recompute=recompute, schedule=schedule)
        pipe = gplan.pipeline(case.build, plan, loss=case.loss)
        optimizer = torch.optim.AdamW(pipe.parameters())  # which refuses an empty list
        pipe.step(*case.batch(7))
        found.append(gradients_of(pipe))
        optimizer.step()
    return found


# By K: what trains where.
STAGES: dict[int, dict[str, tuple[Subject, tuple[str, ...]]]] = {
    2: {
        "a frozen first stage": (FIRST, ("1",)),
        "half of what is frozen": (FIRST, ("0",)),
        "a last stage without parameters": (BARE, ("4",)),
        "a traced model": (TOWER, ("floors.1",)),
    },
    3: {
        "two frozen stages at the beginning": (FIRST, ("0", "1")),
        "a frozen stage in the middle": (MIDDLE, ("0", "2")),
        "a frozen last stage": (LAST, ("0", "2")),
        "a middle stage without parameters": (BARE, ("1", "3")),
        "a first stage without parameters": (BARE, ("0", "2")),
    },
    4: {
        "all frozen but the head": (ALL_BUT_HEAD, ("0", "1", "3")),
        "a first and a last stage without parameters": (BARE, ("0", "3", "4")),
    },
}


@pytest.mark.parametrize("num_devices", STAGES)
def test_frozen_layers_gradients(num_devices: int) -> None:
    cases = STAGES[num_devices]
    plain = {what: plain_gradients(case, case.batch(7))[1] for what, (case, _) in cases.items()}

    def script() -> dict[str, list[dict[str, Tensor]]]:
        return {what: gradients(case, num_devices, cuts) for what, (case, cuts) in cases.items()}

    for parts in both_engines(num_devices, script).values():
        for what, expected in plain.items():
            for number in range(2):
                assert_same(merged(x[what][number] for x in parts), expected, what=what)


def test_no_gradient_sent_to_frozen_stage() -> None:
    def script() -> list[tuple[bool, ...]]:
        pipe = gplan.pipeline(FIRST.build, plan_of(FIRST, 3, cut_after=("0", "1")), loss=FIRST.loss)
        pipe.step(*FIRST.batch(8))
        return [tuple(x.requires_grad for x in pipe.parameters())]

    with new_captures() as captures:
        pipe = gplan.pipeline(FIRST.build, plan_of(FIRST, 3, cut_after=("0", "1")), loss=FIRST.loss)
        pipe.step(*FIRST.batch(8))
        (captured,) = captures()
    assert not any(x.requires_grad for i in (1, 2) for x in captured.boundary(i))
    for parts in both_engines(3, script).values():
        assert sum((flags for (flags,) in parts), ()) == (False,) * 4 + (True,) * 6


@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_frozen_parameters_unchanged(num_devices: int) -> None:
    def script() -> dict[str, Tensor]:
        pipe = gplan.pipeline(MIDDLE.build, plan_of(MIDDLE, num_devices), loss=MIDDLE.loss)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.5)
        for number in range(2):
            pipe.step(*MIDDLE.batch(8, seed=number))
            optimizer.step()
            optimizer.zero_grad()
        return pipe.full_state_dict()

    before = built(MIDDLE).state_dict()
    for parts in both_engines(num_devices, script).values():
        changed = {name for name, x in parts[0].items() if not torch.equal(x, before[name])}
        assert changed == {name for name in before if name[0] in "034"}


def test_all_frozen_refused() -> None:
    case = subject(frozen_row("0", "1", "2", "3", "4"))
    for text in failures(2, lambda: gplan.pipeline(case.build, plan_of(case, 2), loss=case.loss).step(*case.batch(8))):
        assert "every parameter of the model is frozen; expected one that needs a gradient, or use eval_step" in text


@pytest.mark.parametrize("freezes", [True, False])
def test_freezing_after_construction_refused(freezes: bool) -> None:
    case = subject(row) if freezes else FIRST
    plan = plan_of(case, 2, cut_after=("1",))

    def script() -> Any:
        model = case.build()
        pipe = gplan.pipeline(model, plan, loss=case.loss)
        model.requires_grad_(not freezes)
        return pipe.step(*case.batch(8))

    now = "is frozen since" if freezes else "is no longer frozen since"
    virtual, first, _ = failures(2, script)
    assert now in virtual
    assert now in first
