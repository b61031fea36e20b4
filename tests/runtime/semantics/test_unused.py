"""Parameters that the loss does not use have no gradient, so optimizers leave them unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gplan
from tests.runtime.plans import scheduled
from tests.runtime.ranks import on_ranks
from tests.runtime.semantics.checks import (
    assert_same,
    both_engines,
    built,
    gradients_of,
    merged,
    plain_gradients,
    plan_of,
)
from tests.runtime.semantics.models import WIDTH, subject


class Asides(nn.Module):
    """Heads that the loss does not use, two with shared parameters, and one whose derivative is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.early, self.late = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.late.weight = self.early.weight
        self.zero = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.zero.weight)
        nn.init.zeros_(self.zero.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = torch.relu(self.first(x))
        early, root = self.early(x), self.zero(x).sqrt()
        x = torch.relu(self.second(x))
        x = torch.relu(self.third(x))
        return self.last(x), early, root, self.late(x)


def loss(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target)


ASIDES = subject(Asides, loss=loss)
CUTS = ("zero", "second", "third")


def trained(model: Any, backward: Any, parameters: list[nn.Parameter]) -> tuple[set[str], dict[str, Tensor]]:
    """The parameters with gradients after a step, and all values after three steps."""
    optimizer = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.5)
    for number in range(3):
        optimizer.zero_grad()
        backward(*ASIDES.batch(8, seed=number))
        optimizer.step()
    have = {name for name, x in model.named_parameters() if x.grad is not None}
    return have, {name: x.detach().clone() for name, x in model.named_parameters()}


def test_unused_parameters_keep_no_gradient() -> None:
    model = built(ASIDES)
    expected = trained(model, lambda x, y: loss(model(x), y).backward(), list(model.parameters()))  # type: ignore[no-untyped-call]
    assert not expected[0] & {"early.weight", "zero.weight", "late.bias"}
    for schedule, cuts in SCHEDULES.items():
        plan = scheduled(plan_of(ASIDES, len(cuts) + 1, cut_after=cuts), schedule)

        def script(plan: Any = plan) -> Any:
            pipe = gplan.pipeline(ASIDES.build, plan, loss=loss)
            return trained(pipe, pipe.step, list(pipe.parameters()))

        for engine, parts in both_engines(plan.num_devices, script).items():
            what = f"{schedule} {engine}"
            assert set().union(*(have for have, _ in parts)) == expected[0], what
            assert_same(merged(values for _, values in parts), expected[1], tolerance=1e-4, what=what)


SCHEDULES: dict[str, tuple[str, ...]] = {
    "gpipe": CUTS[:1],
    "1f1b": CUTS[:2],
    "zb-h1": CUTS[:2],
    "interleaved-1f1b:2": CUTS,
    "zb-v": CUTS,
}


@pytest.mark.parametrize("recompute", ["always", "except-last"])
def test_recompute_keeps_missing_gradients(recompute: Any) -> None:
    plan = plan_of(ASIDES, 2, cut_after=CUTS[:1], recompute=recompute)

    def script() -> set[str]:
        pipe = gplan.pipeline(ASIDES.build, plan, loss=loss)
        pipe.step(*ASIDES.batch(8))
        assert all(bool(x.grad.isfinite().all()) for x in pipe.parameters() if x.grad is not None)
        return {name for name, x in pipe.named_parameters() if x.grad is not None}

    for parts in both_engines(2, script).values():
        names = set().union(*parts)
        assert names == {
            f"{layer}.{kind}" for layer in ("first", "second", "third", "last") for kind in ("weight", "bias")
        }


class Heads(nn.Module):
    """Three heads of the inputs, one per stage; the outputs of the first two pass through later stages."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(head(x) for head in self.heads)


def some_loss(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    """The sum of the heads' losses without the head named in the first column."""
    left_out = int(target[0, 0])
    return sum((F.mse_loss(x, target) for i, x in enumerate(output) if i != left_out), torch.zeros(()))


HEADS = subject(Heads, loss=some_loss)
NONE_LEFT_OUT = 9.0


def heads_batch(left_out: dict[int, int]) -> tuple[Tensor, Tensor]:
    """Four micro-batches of two samples, two per replica, and the head that some leave out."""
    inputs, targets = HEADS.batch(8)
    targets[:, 0] = NONE_LEFT_OUT
    for microbatch, head in left_out.items():
        targets[2 * microbatch : 2 * microbatch + 2, 0] = head
    return inputs, targets


@pytest.mark.parametrize("head", [0, 1, 2])
def test_replicas_with_unused_stage(
    head: int,
) -> None:
    plan = replace(plan_of(HEADS, 3, num_microbatches=2, cut_after=("heads.0", "heads.1")), num_replicas=2)
    cases = ({1: head}, {1: head, 3: head}, {0: head, 1: head}, dict.fromkeys(range(4), head))

    def job(_rank: int) -> list[dict[str, Tensor]]:
        found = []
        for left_out in cases:
            pipe = gplan.pipeline(HEADS.build, plan, loss=some_loss, timeout_s=10.0)
            for _ in range(2):  # passes after the first look for fewer marks
                for parameter in pipe.parameters():
                    parameter.grad = None
                pipe.step(*heads_batch(left_out))
            found.append(gradients_of(pipe))
        return found

    parts = on_ranks(6, job)
    for number, left_out in enumerate(cases):
        model = built(HEADS)
        inputs, targets = (x.split(2) for x in heads_batch(left_out))
        for x, y in zip(inputs, targets, strict=True):
            (some_loss(model(x), y) / 4).backward()  # type: ignore[no-untyped-call]
        expected = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        assert_same(merged(part[number] for part in parts), expected, what=f"{left_out}")


def test_split_backward_without_reachable_weights() -> None:
    """The loss's graph is needed again in the second half."""
    plan = scheduled(plan_of(HEADS, 3, num_microbatches=4, cut_after=("heads.0", "heads.1")), "zb-h1")
    batch = heads_batch({})

    def script() -> dict[str, Tensor]:
        pipe = gplan.pipeline(HEADS.build, plan, loss=some_loss, timeout_s=10.0)
        pipe.step(*batch)
        return gradients_of(pipe)

    _, expected = plain_gradients(HEADS, batch)
    for engine, parts in both_engines(3, script).items():
        assert_same(merged(parts), expected, what=engine)
