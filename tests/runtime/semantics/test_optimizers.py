"""Optimizers, schedulers, clipping, accumulation and autocast, as with the plain model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core.errors import UsageError
from gplan.runtime.pipeline import Pipeline
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
from tests.runtime.semantics.models import WIDTH, Floor, Subject, Tied, row, rows, subject, token_subject

ROW, TIED = subject(row), token_subject(Tied)
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda x: torch.optim.SGD(x, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda x: torch.optim.AdamW(x, lr=0.01),
    "Adam with amsgrad": lambda x: torch.optim.Adam(x, lr=0.01, amsgrad=True, foreach=False),
    "RMSprop": lambda x: torch.optim.RMSprop(x, lr=0.01, centered=True),
    "Adafactor": lambda x: torch.optim.Adafactor(x, lr=0.01),
}


def optimized(
    model: Any, step: Callable[[Tensor, Tensor], Tensor], clip: Any, make: MakeOptimizer, case: Subject
) -> Any:
    """Five steps, the last on fewer samples; losses, norms, learning rates and final state."""
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=10, cycle_momentum=False)
    losses, norms, rates = [], [], []
    for number in range(5):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        losses.append(step(*case.batch(8 if number < 4 else 7, seed=number)).item())
        norms.append(float(clip(0.5)))
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return losses, norms, rates, {name: x.clone() for name, x in model.state_dict().items()}


def plainly(case: Subject, make: MakeOptimizer) -> Any:
    model = built(case)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = case.loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return optimized(model, step, lambda most: nn.utils.clip_grad_norm_(model.parameters(), most), make, case)


@pytest.mark.parametrize(
    ("case", "num_devices", "names"),
    [(ROW, 2, tuple(OPTIMIZERS)), (ROW, 3, ("SGD",)), (ROW, 4, ("AdamW",)), (TIED, 3, ("AdamW",))],
    ids=["row-2", "row-3", "row-4", "tied-3"],
)
def test_optimizers_and_scheduler(case: Subject, num_devices: int, names: Sequence[str]) -> None:

    def script() -> list[Any]:
        found = []
        for name in names:
            pipe = gplan.pipeline(case.build, plan_of(case, num_devices, schedule="1f1b"), loss=case.loss)
            found.append(optimized(pipe, pipe.step, pipe.clip_grad_norm_, OPTIMIZERS[name], case))
        return found

    plain = [plainly(case, OPTIMIZERS[name]) for name in names]
    for parts in both_engines(num_devices, script).values():
        for expected, by_rank in zip(plain, zip(*parts, strict=True), strict=True):
            for losses, norms, rates, _ in by_rank:
                assert losses == pytest.approx(expected[0], rel=1e-4)
                assert norms == pytest.approx(expected[1], rel=1e-3)
                assert rates == expected[2]
            assert_same(merged(x for *_, x in by_rank), expected[3], tolerance=1e-3)


def frozen_and_double() -> nn.Module:
    """float64, with two frozen layers."""
    model = row().double()
    model[:2].requires_grad_(False)
    return model


DOUBLE = Subject(
    build=frozen_and_double,
    inputs=lambda generator, n: rows(generator, n).double(),
    targets=lambda generator, n: rows(generator, n).double(),
    loss=nn.functional.mse_loss,
)


@pytest.mark.parametrize("case", [TIED, DOUBLE], ids=["tied", "double and frozen"])
def test_gradient_norm_over_stages(case: Subject) -> None:
    """A frozen stage once sent a float32 maximum where others expected float64."""
    cuts = ("first", "third") if case is TIED else ("1", "2")
    norm_types = (2.0, 1.0, 3.0, 0.5, math.inf)

    def script() -> list[tuple[float, dict[str, Tensor]]]:
        found = []
        pipe = gplan.pipeline(case.build, plan_of(case, 3, cut_after=cuts), loss=case.loss)
        for norm_type in norm_types:
            pipe.step(*case.batch(8))
            found.append((float(pipe.clip_grad_norm_(0.1, norm_type=norm_type)), gradients_of(pipe)))
            for parameter in pipe.parameters():
                parameter.grad = None
        return found

    engines = both_engines(3, script)
    for number, norm_type in enumerate(norm_types):
        model = built(case)
        plain_gradients(case, case.batch(8), model=model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type)
        clipped = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        for parts in engines.values():
            assert [x[number][0] for x in parts] == [pytest.approx(float(norm), rel=1e-5)] * len(parts)
            assert_same(merged(x[number][1] for x in parts), clipped)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_nan_gradients_give_nan_norm(norm_type: float) -> None:
    def script() -> bool:
        pipe = gplan.pipeline(row, plan_of(ROW, 2), loss=ROW.loss)
        pipe.step(*ROW.batch(8))
        for name, parameter in pipe.named_parameters():
            if name == "4.mix.bias" and parameter.grad is not None:
                parameter.grad[0] = math.nan
        return bool(pipe.clip_grad_norm_(1.0, norm_type=norm_type).isnan())

    assert both_engines(2, script) == {"virtual": [True], "torch": [True, True]}


def test_a_norm_that_is_none_is_refused() -> None:
    pipe = gplan.pipeline(row, plan_of(ROW, 2), loss=ROW.loss)
    for norm_type in (0.0, -1.0, math.nan):
        with pytest.raises(UsageError, match=r"norm_type is .*; expected a positive number, or float\('inf'\)"):
            pipe.clip_grad_norm_(1.0, norm_type=norm_type)


@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_accumulated_steps_equal_one(num_devices: int) -> None:
    inputs, targets = ROW.batch(24)
    _, expected = plain_gradients(ROW, (inputs, targets))

    def script() -> tuple[float, dict[str, Tensor]]:
        pipe = gplan.pipeline(row, plan_of(ROW, num_devices), loss=ROW.loss)
        losses = [pipe.step(x, y, scale=1 / 3) for x, y in zip(inputs.chunk(3), targets.chunk(3), strict=True)]
        return sum(losses).item() / 3, gradients_of(pipe)  # type: ignore[union-attr]

    whole = plain_gradients(ROW, (inputs, targets))[0]
    for parts in both_engines(num_devices, script).values():
        assert [x for x, _ in parts] == [pytest.approx(whole, rel=1e-5)] * len(parts)
        assert_same(merged(x for _, x in parts), expected)


@pytest.mark.parametrize("scale", [0.0, math.nan, math.inf])
def test_invalid_scale_refused(scale: float) -> None:
    pipe = gplan.pipeline(row, plan_of(ROW, 2), loss=ROW.loss)
    with pytest.raises(UsageError, match="scale is .*; expected a finite number other than 0, such as 1/n"):
        pipe.step(*ROW.batch(8), scale=scale)
    assert not gradients_of(pipe)


def test_step_under_no_grad_refused() -> None:
    @torch.no_grad()
    def script() -> Tensor:
        return gplan.pipeline(row, plan_of(ROW, 2), loss=ROW.loss).step(*ROW.batch(8))

    for text in failures(2, script):
        assert "step was called within torch.no_grad(), which forbids gradients; call it outside, or eval_step" in text


@pytest.mark.parametrize("case", [ROW, TIED], ids=["sequence", "traced"])
def test_autocast_equals_plain_model(case: Subject) -> None:
    batch, model = case.batch(8), built(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = case.loss(model(batch[0]), batch[1])
    loss.backward()  # type: ignore[no-untyped-call]
    expected = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    def script() -> list[tuple[float, float, dict[str, Tensor]]]:
        return [autocast_step(gplan.pipeline(case.build, plan, loss=case.loss), batch) for plan in plans]

    plans = [plan_of(case, 2, schedule="1f1b", recompute="always")]
    if case is ROW:  # which is captured at once
        plans.append(plan_of(case, 2))
    for parts in both_engines(2, script).values():
        for by_rank in zip(*parts, strict=True):
            for evaluated, trained, _ in by_rank:
                assert (evaluated, trained) == (pytest.approx(loss.item(), rel=1e-3), evaluated)
            assert_same(merged(x for *_, x in by_rank), expected, tolerance=2e-2)
            plain = plain_gradients(case, batch)[1]
            assert any(not torch.equal(x[name], plain[name]) for *_, x in by_rank for name in x)


def autocast_step(pipe: Pipeline, batch: Any) -> tuple[float, float, dict[str, Tensor]]:
    """An evaluation and a step in one autocast block, which caches cast weights."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        evaluated = pipe.eval_step(*batch)
        trained = pipe.step(*batch)
    return evaluated.item(), trained.item(), gradients_of(pipe)


def test_optimizer_of_stage_without_parameters() -> None:
    def build() -> nn.Module:
        return nn.Sequential(Floor(), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    case = subject(build)

    def script() -> list[float]:
        pipe = gplan.pipeline(build, plan_of(case, 3, cut_after=("0", "1")), loss=case.loss)
        found: list[float] = []
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        for number in range(3):
            found.append(pipe.step(*case.batch(8, seed=number)).item())
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        return found

    engines = both_engines(3, script)
    assert engines["torch"] == [pytest.approx(engines["virtual"][0], rel=1e-5)] * 3
    assert len(set(engines["virtual"][0])) == 3
