"""Parameters used by several stages have one value and one gradient."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core import ActionKind
from gplan.runtime.virtual_engine import DeviceGradients
from tests.runtime.ranks import on_ranks
from tests.runtime.semantics.checks import (
    assert_same,
    both_engines,
    built,
    gradients_of,
    merged,
    plan_of,
)
from tests.runtime.semantics.models import Subject, Tied, TiedThrice, token_subject

TIED, THRICE = token_subject(Tied), token_subject(TiedThrice)
CUTS: dict[int, tuple[str, ...]] = {2: ("second",), 3: ("first", "third"), 4: ("embedding", "first", "third")}


def trained_plainly(case: Subject) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    model = built(case)
    found: tuple[list[float], dict[str, Tensor], dict[str, Tensor]] = _trained(
        model, lambda x, y: _backward(case, model, x, y), case, list(model.parameters())
    )
    return found


def _backward(case: Subject, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = case.loss(model(x), y)
    (loss / 2).backward()  # type: ignore[no-untyped-call]
    return loss


def _trained(model: Any, step: Any, case: Subject, parameters: list[nn.Parameter]) -> Any:
    """Two optimizer steps of two mini-batches each; also returns the last gradients."""
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for number in range(4):
        losses.append(step(*case.batch(8, seed=number)).item())
        if number % 2:
            gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
    return losses, gradients, {name: x.clone() for name, x in model.state_dict().items()}


@pytest.mark.parametrize(
    ("case", "cuts"),
    [(TIED, CUTS[2]), (TIED, CUTS[3]), (TIED, CUTS[4]), (THRICE, ("embedding", "second"))],
    ids=["2 of 2 stages", "2 of 3 stages", "2 of 4 stages", "3 of 3 stages"],
)
def test_tied_weights_sum_gradients(case: Subject, cuts: tuple[str, ...]) -> None:
    num_stages = len(cuts) + 1
    plan = plan_of(case, num_stages, cut_after=cuts, schedule="1f1b")

    def script() -> Any:
        pipe = gplan.pipeline(case.build, plan, loss=case.loss)
        return _trained(pipe, lambda x, y: pipe.step(x, y, scale=0.5), case, list(pipe.parameters()))

    losses, gradients, state = trained_plainly(case)
    for parts in both_engines(num_stages, script).values():
        assert [x for x, _, _ in parts] == [pytest.approx(losses, rel=1e-4)] * len(parts)
        assert_same(merged(x for _, x, _ in parts), gradients, tolerance=1e-4)
        assert_same(merged(x for _, _, x in parts), state, tolerance=1e-4)


def test_tied_copies_start_equal() -> None:
    def script() -> dict[str, Tensor]:
        torch.manual_seed(os.getpid())
        return gplan.pipeline(Tied(), plan_of(TIED, 2, cut_after=CUTS[2]), loss=TIED.loss).state_dict()

    for parts in both_engines(2, script).values():
        state = merged(parts)
        assert torch.equal(state["embedding.weight"], state["head.weight"])


def test_frozen_tied_weight() -> None:
    def frozen() -> Tied:
        model = Tied()
        model.embedding.weight.requires_grad_(False)
        return model

    def script() -> dict[str, Tensor]:
        pipe = gplan.pipeline(case.build, plan, loss=case.loss)
        pipe.step(*case.batch(8))
        return gradients_of(pipe)

    case = token_subject(frozen)
    plan, model = plan_of(case, 2, cut_after=CUTS[2]), built(case)
    case.loss(model(case.batch(8)[0]), case.batch(8)[1]).backward()  # type: ignore[no-untyped-call]
    expected = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    assert "embedding.weight" not in expected
    for parts in both_engines(2, script).values():
        assert_same(merged(parts), expected)


def test_each_virtual_device_has_its_own_gradient() -> None:
    weight, gradients = nn.Parameter(torch.ones(3)), DeviceGradients()
    weight.grad = torch.full((3,), 100.0)
    with gradients.apart([weight]):
        for device, factor in ((0, 1.0), (1, 10.0), (0, 1.0)):
            gradients.enter(device)
            (factor * weight).sum().backward()  # type: ignore[no-untyped-call]
        assert weight.grad.tolist() == [2.0] * 3
    assert weight.grad.tolist() == [112.0] * 3


def test_waiting_is_not_part_of_update() -> None:
    plan = plan_of(TIED, 2, cut_after=CUTS[2])

    def script(_rank: int) -> dict[ActionKind, tuple[float, float]]:
        pipe = gplan.pipeline(TIED.build, plan, loss=TIED.loss)
        pipe.step(*TIED.batch(8))
        return {x.action.kind: (x.start_s, x.end_s) for x in pipe.runner.engine.recorder.take()}  # the last of each

    first, last = on_ranks(2, script)
    assert last[ActionKind.OPTIMIZER][0] >= first[ActionKind.BACKWARD][1] > last[ActionKind.BACKWARD][1]
