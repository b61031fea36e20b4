"""torch's clipping of a pipeline's gradients is that of the plain model, however the parameters are named."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import gplan
from gplan.core.errors import GplanError, RunError, UsageError
from gplan.runtime.pipeline import Pipeline
from tests.runtime.ranks import on_ranks
from tests.runtime.semantics.checks import assert_same, built, gradients_of, merged, plain_gradients, plan_of
from tests.runtime.semantics.models import Subject, Tied, row, subject, token_subject
from tests.runtime.test_sharded_replicas import MOST_NORM, Training, plain, planned


def frozen() -> nn.Module:
    """No gradients on the first stage."""
    model = row()
    model[:2].requires_grad_(False)
    return model


ROW, TIED, FROZEN = subject(row), token_subject(Tied), subject(frozen)

Clip = Callable[[Sequence[Tensor]], Tensor]


def in_two_calls(parameters: Sequence[Tensor]) -> Tensor:
    norm = nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)
    return norm


def by_value(parameters: Sequence[Tensor]) -> Tensor:
    if any(x.grad is not None for x in parameters):  # torch refuses to clip no gradients
        clip_grad_value_(parameters, 1e-3)
    return torch.zeros(())


CLIPS: dict[str, Clip] = {
    "the usual call": lambda x: clip_grad_norm_(x, 0.1),
    "another norm": lambda x: clip_grad_norm_(x, 0.1, norm_type=math.inf),
    "by an optimizer's groups": lambda x: clip_grad_norm_(torch.optim.SGD(x).param_groups[0]["params"], 0.1),
    "in two calls": in_two_calls,
    "by value": by_value,
}


@pytest.mark.parametrize(
    ("case", "cuts"),
    [(ROW, ()), (TIED, ("first", "third")), (FROZEN, ("1", "2"))],
    ids=["row", "tied", "a frozen stage"],
)
def test_clipping_by_torch(case: Subject, cuts: Sequence[str]) -> None:
    plan = plan_of(case, 3, cut_after=cuts)

    def job(_rank: int) -> list[tuple[float, dict[str, Tensor]]]:
        pipe, found = gplan.pipeline(case.build, plan, loss=case.loss, timeout_s=20.0), []
        for clip in CLIPS.values():
            pipe.step(*case.batch(8))
            found.append((float(clip(list(pipe.parameters()))), gradients_of(pipe)))
            for parameter in pipe.parameters():
                parameter.grad = None
        return found

    parts = on_ranks(3, job)
    for number, clip in enumerate(CLIPS.values()):
        model = built(case)
        plain_gradients(case, case.batch(8), model=model)
        norm = float(clip(list(model.parameters())))
        assert [x[number][0] for x in parts] == [pytest.approx(norm, rel=1e-5)] * 3
        clipped = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        assert_same(merged(x[number][1] for x in parts), clipped)


def test_clipping_of_sharded_replicas() -> None:
    def job(_rank: int) -> list[float]:
        run = Training(planned("weights"))
        norms = []
        for _ in range(3):
            run.pipe.step(*next(run.data))
            norms.append(float(clip_grad_norm_(run.pipe.parameters(), MOST_NORM)))
            run.optimizer.step()
            run.optimizer.zero_grad()
        return norms

    expected = [norm for _, norm in plain()[0]]
    assert on_ranks(4, job) == [pytest.approx(expected, rel=1e-4)] * 4


def test_other_models_are_clipped_as_before() -> None:
    plan = plan_of(ROW, 2)

    def job(rank: int) -> float:
        pipe = gplan.pipeline(row, plan, loss=ROW.loss, timeout_s=20.0)
        pipe.step(*ROW.batch(8))
        own = nn.Linear(2, 1, bias=False)
        own.weight.grad = torch.full((1, 2), float(rank))
        return float(clip_grad_norm_(own.parameters(), 1.0))

    assert on_ranks(2, job) == [0.0, pytest.approx(math.sqrt(2.0))]


def test_norm_that_is_not_finite() -> None:
    plan = plan_of(ROW, 2)

    def job(rank: int) -> tuple[bool, str]:
        pipe = gplan.pipeline(row, plan, loss=ROW.loss, timeout_s=20.0)
        pipe.step(*ROW.batch(8))
        if rank == 1:
            for parameter in pipe.parameters():
                parameter.grad = torch.full_like(parameter, math.nan)
        with pytest.raises(RuntimeError) as caught:
            clip_grad_norm_(pipe.parameters(), 1.0, error_if_nonfinite=True)
        return bool(nn.utils.get_total_norm([x.grad for x in pipe.parameters() if x.grad is not None]).isnan()), str(
            caught.value
        )

    assert all(is_nan and "is non-finite" in text for is_nan, text in on_ranks(2, job))


def test_clipping_on_one_rank_only() -> None:
    def clips_alone(pipe: Pipeline) -> None:
        if pipe.rank == 0:
            clip_grad_norm_(pipe.parameters(), 1.0)
        pipe.step(*ROW.batch(8))

    plan = plan_of(ROW, 2)

    def job(rank: int) -> str:
        pipe = gplan.pipeline(row, plan, loss=ROW.loss, timeout_s=20.0)
        for _ in range(12):
            pipe.step(*ROW.batch(8))
        with pytest.raises(GplanError) as caught:
            clips_alone(pipe)
        assert isinstance(caught.value, (UsageError, RunError)[rank])
        return str(caught.value)

    assert "pipe.clip_grad_norm_ by rank 0; pipe.step by rank 1" in on_ranks(2, job)[0]
