"""Evaluation: the plain model's outputs and losses for any number of samples, without effect on training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core.errors import UsageError
from gplan.runtime.pipeline import Pipeline
from gplan.runtime.virtual_engine import VirtualEngine
from tests.runtime.semantics.checks import NUM_DEVICES, assert_same, both_engines, gradients_of, merged, plan_of
from tests.runtime.semantics.models import (
    Floor,
    Subject,
    dropping_row,
    dropping_tower,
    mean_loss,
    normed_row,
    row,
    rows,
    subject,
    sum_loss,
)

NORMED, TOWER = subject(normed_row), subject(dropping_tower)
SUM = subject(dropping_row, loss=sum_loss)
SIZES = (7, 1, 21)


def trained(case: Subject, num_devices: int, **options: Any) -> Pipeline:
    """A pipeline after three steps."""
    pipe = gplan.pipeline(case.build, plan_of(case, num_devices, **options), loss=case.loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
    for number in range(3):
        pipe.step(*case.batch(8, seed=number))
        optimizer.step()
        optimizer.zero_grad()
    return pipe


def evaluated(
    case: Subject, num_devices: int
) -> tuple[dict[str, Tensor], list[float], list[Tensor | None], list[bool]]:
    """State after some steps, losses and outputs for several numbers of samples, and whether there are no gradients."""
    pipe = trained(case, num_devices, recompute="always")
    losses, outputs = [], []
    for size in SIZES:
        losses.append(pipe.eval_step(*case.batch(size)).item())
        outputs.append(pipe.predict(case.batch(size)[0]))
    return pipe.full_state_dict(), losses, outputs, [x.grad is None for x in pipe.parameters()]


@pytest.mark.parametrize(
    ("case", "num_devices"),
    [*((NORMED, k) for k in NUM_DEVICES), (SUM, 2)],
    ids=[*(f"batch-norm-{k}" for k in NUM_DEVICES), "sum-2"],
)
def test_eval_losses_and_outputs(case: Subject, num_devices: int) -> None:
    for engine, parts in both_engines(num_devices, lambda: evaluated(case, num_devices)).items():
        model = case.build().eval()
        model.load_state_dict(parts[0][0])
        with torch.no_grad():
            expected = [model(case.batch(size)[0]) for size in SIZES]
        losses = [case.loss(x, case.batch(n)[1]).item() for x, n in zip(expected, SIZES, strict=True)]
        assert [x for _, x, _, _ in parts] == [pytest.approx(losses, rel=1e-5)] * len(parts)
        for found, output in zip(parts[-1][2], expected, strict=True):
            assert found is not None and not found.requires_grad
            torch.testing.assert_close(found, output)
        if engine == "torch":
            assert all(x is None for _, _, outputs, _ in parts[:-1] for x in outputs)
        assert all(is_none for _, _, _, flags in parts for is_none in flags)


def test_a_traced_model_is_evaluated_too() -> None:
    for parts in both_engines(2, lambda: evaluated(TOWER, 2)).values():
        model = TOWER.build().eval()
        model.load_state_dict(parts[0][0])
        for found, size in zip(parts[-1][2], SIZES, strict=True):
            torch.testing.assert_close(found, model(TOWER.batch(size)[0]).detach())


@pytest.mark.parametrize("case", [NORMED, TOWER], ids=["sequence", "traced"])
def test_evaluation_does_not_affect_training(case: Subject) -> None:
    def script(evaluates: bool) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        pipe = trained(case, 2)
        if evaluates:
            pipe.eval_step(*case.batch(13, seed=5))
            pipe.predict(case.batch(3, seed=6)[0])
            with torch.inference_mode():
                pipe.eval_step(*case.batch(8, seed=7))
        loss = pipe.step(*case.batch(8, seed=4))
        return loss.item(), gradients_of(pipe), pipe.full_state_dict()

    loss, gradients, state = script(evaluates=False)
    for parts in both_engines(2, lambda: script(evaluates=True)).values():
        assert [x for x, _, _ in parts] == [pytest.approx(loss, rel=1e-6)] * len(parts)
        assert_same(merged(x for _, x, _ in parts), gradients)
        assert_same(parts[0][2], state)


@pytest.mark.parametrize("case", [subject(dropping_row), TOWER], ids=["sequence", "traced"])
def test_user_modes_are_kept(case: Subject) -> None:
    """A sequence in evaluation mode trained without dropout; a traced model did not: such a step is refused."""
    plan, batch = plan_of(case, 2), case.batch(8)
    state = case.build().state_dict()

    def losses(before: bool, after: bool) -> tuple[float, ...]:
        model = case.build()
        model.load_state_dict(state)
        model.train(before)
        pipe = gplan.pipeline(model, plan, loss=case.loss)
        model.train(after)
        modes = [x.training for x in model.modules()]
        found = (pipe.step(*batch).item(), pipe.eval_step(*batch).item(), pipe.step(*batch).item())
        assert [x.training for x in model.modules()] == modes
        return found

    expected = losses(True, True)
    assert len(set(expected)) == 3
    assert losses(False, True) == expected
    for before in (True, False):
        with pytest.raises(UsageError, match="is in evaluation mode; pipe.step expects training mode"):
            losses(before, False)


def test_norm_in_eval_mode_does_not_learn() -> None:
    model = nn.Sequential(Floor(), nn.BatchNorm1d(6), Floor())
    model[1].eval()
    case = subject(lambda: model)
    pipe = gplan.pipeline(model, plan_of(case, 2), loss=case.loss)
    pipe.step(*case.batch(8))
    assert torch.equal(model[1].running_mean, torch.zeros(6))  # type: ignore[arg-type]
    pipe.eval_step(*case.batch(8))
    assert (model.training, model[1].training) == (True, False)


class Several(nn.Module):
    """Outputs per sample and others; an early layer's output is passed on to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.floors = nn.ModuleList(Floor() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        early = self.floors[0](x)
        sums = early.sum(0)
        last = self.floors[2](self.floors[1](early))
        others = {"places": torch.arange(3), "sums": sums, "none": None, "three": 3}
        return {"last": last, "early": early, "inputs": x, **others}


def test_predict_joins_nested_outputs() -> None:
    """Values that are not per sample came several times, and receive buffers were reused."""
    case = Subject(build=Several, inputs=rows, targets=rows, loss=lambda x, y: mean_loss(x["last"], y))
    inputs, _ = case.batch(13)
    model = Several().eval()
    state = model.state_dict()

    def script() -> Any:
        pipe = gplan.pipeline(Several, plan_of(case, 3, num_microbatches=2), loss=case.loss)
        pipe.load_state_dict(state)
        return pipe.predict(inputs)

    expected = model(inputs)
    for parts in both_engines(3, script).values():
        found = parts[-1]
        assert (found["none"], found["three"], found["places"].tolist()) == (None, 3, [0, 1, 2])
        torch.testing.assert_close(found["sums"], model(inputs[:2])["sums"].detach())  # of the first micro-batch
        for name in ("last", "early", "inputs"):
            torch.testing.assert_close(found[name], expected[name].detach())


def test_recorder_does_not_grow() -> None:
    case = subject(row)
    pipe = gplan.pipeline(row, plan_of(case, 2), loss=case.loss)
    engine = pipe.runner.engine
    assert isinstance(engine, VirtualEngine)
    found = set()
    for num_rounds in (1, 3):
        for _ in range(num_rounds):
            pipe.step(*case.batch(8))
            pipe.eval_step(*case.batch(8))
            pipe.predict(case.batch(8)[0])
        found.add((len(engine.recorder.take()), len(engine.action_starts_ns)))
    assert len(found) == 1
