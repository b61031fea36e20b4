"""Mean and sum losses, mini-batches of every size, and invalid losses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core import LossReduction
from gplan.core.errors import ModelError, UsageError
from gplan.runtime.validation import check_reduction
from tests.runtime.semantics.checks import (
    NUM_DEVICES,
    assert_same,
    both_engines,
    failures,
    gradients_of,
    merged,
    plain_gradients,
    plan_of,
)
from tests.runtime.semantics.models import Subject, Tied, mean_loss, row, subject, sum_loss, token_subject

MEAN, SUM, TOKENS = subject(row), subject(row, loss=sum_loss), token_subject(Tied)


def one_step_each(case: Subject, num_devices: int, sizes: tuple[int, ...]) -> list[tuple[float, dict[str, Tensor]]]:
    """One step on a mini-batch of each size, with separate gradients."""
    pipe = gplan.pipeline(case.build, plan_of(case, num_devices, schedule="1f1b"), loss=case.loss)
    found = []
    for size in sizes:
        loss = pipe.step(*case.batch(size))
        found.append((loss.item(), gradients_of(pipe)))
        for parameter in pipe.parameters():
            parameter.grad = None
    return found


@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_any_batch_size_weights_samples_equally(num_devices: int) -> None:
    sizes = (8, 7, 6, 5, 2, 1, 8)  # of 4 micro-batches of 2
    assert [plan_of(case, num_devices).loss_reduction for case in (MEAN, SUM)] == ["mean", "sum"]
    plain = [plain_gradients(case, case.batch(size)) for case in (MEAN, SUM) for size in sizes]

    def script() -> list[tuple[float, dict[str, Tensor]]]:
        return [x for case in (MEAN, SUM) for x in one_step_each(case, num_devices, sizes)]

    for parts in both_engines(num_devices, script).values():
        for (loss, gradients), by_rank in zip(plain, zip(*parts, strict=True), strict=True):
            assert [x for x, _ in by_rank] == pytest.approx([loss] * len(by_rank), rel=1e-5)
            assert_same(merged(x for _, x in by_rank), gradients)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_unused_outputs_are_released(recompute: str) -> None:
    given: list[weakref.ref[Tensor]] = []
    left: list[int] = []

    def loss(output: Tensor, _target: Tensor) -> Tensor:
        left.append(sum(x() is not None for x in given))
        given.append(weakref.ref(output))
        return output.sum()  # whose gradient needs no values

    plan = plan_of(SUM, 2, recompute=recompute)

    def script() -> list[int]:
        pipe = gplan.pipeline(SUM.build, plan, loss=loss)
        pipe.step(*SUM.batch(8))  # the first one tries the loss
        given.clear()
        left.clear()
        pipe.step(*SUM.batch(8))
        return list(left)

    for engine, parts in both_engines(2, script).items():
        assert parts[-1] == [0] * 4, engine


def test_token_mean_loss() -> None:
    (loss, gradients), odd = plain_gradients(TOKENS, TOKENS.batch(8)), plain_gradients(TOKENS, TOKENS.batch(3))
    for parts in both_engines(2, lambda: one_step_each(TOKENS, 2, (8, 3))).values():
        whole, part = zip(*parts, strict=True)
        assert (whole[0][0], part[0][0]) == (pytest.approx(loss, rel=1e-5), pytest.approx(odd[0], rel=1e-5))
        assert_same(merged(x for _, x in whole), gradients)
        assert_same(merged(x for _, x in part), odd[1])


def stepped(loss: Any, *, num_devices: int = 2) -> Callable[[], object]:
    return lambda: gplan.pipeline(MEAN.build, plan_of(MEAN, num_devices), loss=loss).step(*MEAN.batch(8))


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (
            lambda x, y: (x - y).sum(1),
            r"the loss returned a tensor of shape \(2,\); expected a tensor with a single number for all samples together: end it with .mean\(\)",
        ),
        (lambda x, y: mean_loss(x, y).reshape(1), r"the loss returned a tensor of shape \(1,\)"),
        (lambda x, y: None, "the loss returned a NoneType; expected a tensor with a single number"),
        (lambda x, y: mean_loss(x, y).item(), "the loss returned a float; expected a tensor with a single number"),
        (lambda x, y: (mean_loss(x, y), x), "the loss returned a tuple"),
        (lambda x, y: mean_loss(x, y).detach(), r"has no gradient; expected .* without detach\(\)"),
        (lambda x, y: x.argmax(), "torch.int64 tensor that has no gradient"),
        (lambda x, y: mean_loss(x, y) + 0j, "torch.complex64 tensor that has no gradient"),
    ],
)
def test_invalid_loss_refused(loss: Any, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        stepped(loss)()


def test_detached_loss_refused_on_all_ranks() -> None:
    virtual, _, last = failures(2, stepped(lambda x, y: mean_loss(x, y).detach()))
    assert virtual == last
    assert "has no gradient" in last


def test_missing_loss_named() -> None:
    for text in failures(2, stepped("mse")):
        assert "the loss is a str; expected a function: loss(output, target)" in text
    for text in failures(2, stepped(None)):
        assert "there is no loss; pass one: gplan.pipeline(model, plan, loss=" in text


@pytest.mark.parametrize(("planned", "found"), [("mean", "sum"), ("sum", "mean")])
def test_wrong_loss_reduction_refused(planned: LossReduction, found: str) -> None:
    plan = replace(plan_of(MEAN, 2), loss_reduction=planned)
    losses = {"mean": mean_loss, "sum": sum_loss}
    gplan.pipeline(row, plan, loss=losses[planned]).step(*MEAN.batch(8))
    with pytest.raises(
        UsageError, match=rf"the loss is a {found} over .*; the plan is for a {planned}: .*balance again"
    ):
        gplan.pipeline(row, plan, loss=losses[found]).step(*MEAN.batch(8))


def test_undecidable_loss_reduction_allowed() -> None:
    def check(loss: Any, output: Tensor, expected: LossReduction) -> None:
        target, value = torch.zeros_like(output), loss(output, torch.zeros_like(output))
        check_reduction(loss, output, target, value=value, num_rows=len(output), expected=expected)

    output = torch.ones(4, 3)
    reductions: tuple[LossReduction, ...] = ("mean", "sum")
    for expected in reductions:
        check(lambda x, _: torch.tensor(2.0), output, expected)
        check(lambda x, _: x.norm(), torch.ones(4, 3).cumsum(0), expected)
        check(sum_loss, output[:1], expected)
    check(lambda x, _: x.std(), torch.arange(12.0).reshape(4, 3), "mean")
    with pytest.raises(UsageError, match=r"is a sum over the samples \(506 for 4, 55 and 451 for both halves\)"):
        check(sum_loss, torch.arange(12.0).reshape(4, 3), "mean")


def test_a_mean_over_what_counts_is_no_sum() -> None:
    """It fits neither, as the micro-batches have other numbers of tokens that count."""
    loss = partial(nn.functional.cross_entropy, ignore_index=-100)
    output, target = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, -100, 2])
    value = loss(output, target)
    check_reduction(loss, output, target, value=value, num_rows=4, expected="mean")
    with pytest.raises(UsageError, match=r"the loss is a mean over .*; the plan is for a sum"):
        check_reduction(loss, output, target, value=value, num_rows=4, expected="sum")


def test_a_contrastive_loss_is_neither() -> None:
    """Its negatives are those of the micro-batch, so the halves have fewer."""

    def clip(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output @ target.T, torch.arange(len(output)))

    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        output, target = (torch.randn(2 + seed % 7, 4, generator=generator) for _ in range(2))
        value = clip(output, target)
        check_reduction(clip, output, target, value=value, num_rows=len(output), expected="mean")


def test_a_loss_that_counts_its_calls_is_refused() -> None:
    calls = list[int]()

    def counting(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        return (output - target).pow(2).mean() * len(calls)

    pipe = gplan.pipeline(row, plan_of(MEAN, 2), loss=counting)
    with pytest.raises(UsageError, match="for the same output and targets: it keeps values from call to call"):
        pipe.step(*MEAN.batch(8))


def test_bfloat16_loss_reduction() -> None:
    case = Subject(
        build=lambda: row().bfloat16(),
        inputs=lambda generator, n: MEAN.inputs(generator, n).bfloat16(),
        targets=lambda generator, n: MEAN.targets(generator, n).bfloat16(),
        loss=mean_loss,
    )
    plan = plan_of(case, 2)
    assert plan.loss_reduction == "mean"
    pipe = gplan.pipeline(case.build, plan, loss=mean_loss)
    pipe.step(*case.batch(8))
    with pytest.raises(UsageError, match="is a sum"):
        gplan.pipeline(case.build, plan, loss=sum_loss).step(*case.batch(8))
