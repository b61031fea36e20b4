"""Dropout depends on seed, step, micro-batch and layer only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gplan
from gplan.core import Plan
from tests.runtime.plans import recomputing
from tests.runtime.semantics.checks import assert_same, both_engines, gradients_of, merged, plan_of
from tests.runtime.semantics.models import Subject, dropping_row, dropping_tower, subject

ROW, TOWER = subject(dropping_row), subject(dropping_tower)
Steps = tuple[list[float], dict[str, Tensor]]


def two_steps(case: Subject, plan: Plan, *, seed: int = 0, num_samples: int = 8) -> Steps:
    """Losses of two steps on the same mini-batch, and the sum of their gradients."""
    pipe = gplan.pipeline(case.build, plan, loss=case.loss, seed=seed)
    losses = [pipe.step(*case.batch(num_samples)).item() for _ in range(2)]
    return losses, gradients_of(pipe)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_dropout_independent_of_plan_and_engine(num_devices: int) -> None:
    plan = plan_of(ROW, num_devices)
    plans = [replace(plan, schedule="1f1b", recompute="always"), replace(plan, recompute="except-last")]
    plans += [recomputing(plan, plan.layer_names[::2]), plan_of(ROW, num_devices, cut_after=["0"])]
    losses, gradients = two_steps(ROW, plan_of(ROW, 1))
    for parts in both_engines(num_devices, lambda: [two_steps(ROW, x) for x in plans]).values():
        for by_rank in zip(*parts, strict=True):
            assert [x for x, _ in by_rank] == [pytest.approx(losses, rel=1e-6)] * len(by_rank)
            assert_same(merged(x for _, x in by_rank), gradients)


def test_a_traced_model_drops_the_same_too() -> None:
    losses, gradients = two_steps(TOWER, plan_of(TOWER, 1))
    plan = plan_of(TOWER, 3, schedule="1f1b", recompute="always")
    for parts in both_engines(3, lambda: two_steps(TOWER, plan)).values():
        assert [x for x, _ in parts] == [pytest.approx(losses, rel=1e-6)] * len(parts)
        assert_same(merged(x for _, x in parts), gradients)


def test_recompute_replays_dropout() -> None:
    plan = plan_of(ROW, 2)
    kept, replayed = (two_steps(ROW, replace(plan, recompute=x), num_samples=7)[1] for x in ("never", "always"))
    assert all(torch.equal(kept[name], x) for name, x in replayed.items())


def test_dropout_depends_on_step_and_seed() -> None:
    plan, state = plan_of(ROW, 2), gplan.pipeline(dropping_row, plan_of(ROW, 1)).full_state_dict()

    def losses(seed: int) -> list[float]:
        pipe = gplan.pipeline(dropping_row, plan, loss=ROW.loss, seed=seed)
        pipe.load_state_dict(state)
        return [pipe.step(*ROW.batch(8)).item() for _ in range(3)]

    assert losses(1) == losses(1)
    assert len({*losses(1), *losses(2)}) == 6


def test_dropout_differs_by_microbatch_and_layer() -> None:
    class Dropped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(x * self.weight, 0.5, self.training)

    seen: list[Tensor] = []

    def loss(output: Tensor, _target: Tensor) -> Tensor:
        seen.append(output.detach() > 0)
        return output.mean()

    case = Subject(
        build=lambda: torch.nn.Sequential(Dropped(), Dropped()),
        inputs=lambda _, n: torch.ones(n, 64),
        targets=lambda _, n: torch.ones(n, 64),
        loss=lambda output, _: output.mean(),
    )
    pipe = gplan.pipeline(case.build, plan_of(case, 2), loss=loss)
    pipe.eval_step(*case.batch(2))  # the first loss is looked at three times
    seen.clear()
    pipe.step(*case.batch(8))
    assert len({tuple(x.flatten().tolist()) for x in seen}) == 4
    share = torch.stack(seen).float().mean().item()
    assert 0.15 < share < 0.35  # a quarter, as two layers that drew alike would leave a half


def test_global_generator_unchanged() -> None:
    """Otherwise a script that draws its batches would get different ones on each rank."""

    def draws() -> list[float]:
        torch.manual_seed(7)
        pipe = gplan.pipeline(case.build, plan, loss=case.loss, seed=3)
        found = [torch.rand(()).item()]
        pipe.step(*batch)
        found.append(torch.rand(()).item())
        pipe.eval_step(*batch)
        pipe.predict(batch[0])
        return [*found, torch.rand(()).item()]

    torch.manual_seed(7)
    expected = [torch.rand(()).item() for _ in range(3)]
    for case in (ROW, TOWER):
        plan, batch = plan_of(case, 2), case.batch(7)
        for parts in both_engines(2, draws).values():
            assert parts == [expected] * len(parts)
