"""A loss that is not finite names step, stage and layer: gplan run stops, a script is warned."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core import Constraints, Plan
from gplan.core.errors import ModelError, RunError
from gplan.runtime.pipeline import Pipeline
from gplan.runtime.run.run_options import RunOptions
from gplan_profiler.model.load import ModelFile, model_in_memory
from tests.runtime.plans import run_virtually, unmeasured_plan
from tests.runtime.ranks import on_ranks
from tests.runtime.test_sharded_replicas import Training
from tests.runtime.test_sharded_replicas import planned as sharded


class Floor(nn.Module):
    """One layer; infinities of a mask are within it."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("value", torch.tensor(value))
        self.register_buffer("mask", torch.full((4,), -math.inf))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.mix(x)) + torch.softmax(torch.cat([x, x + self.mask], 1), 1)[:, :4] + self.value
        return out


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Floor() for _ in range(4)))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 4, generator=generator)


def file_of(rate: float = 0.1, loss: Callable[..., Any] = loss, model: nn.Module | None = None) -> ModelFile:
    return model_in_memory(
        build() if model is None else model,
        loss=loss,
        optimizer=lambda x: torch.optim.SGD(x, lr=rate),
        batches=lambda n: iter(lambda: batch(n), None),
    )


def planned(num_replicas: int = 1) -> Plan:
    plan = unmeasured_plan(
        file_of(), num_devices=2, num_microbatches=4 // num_replicas, constraints=Constraints(cut_after=("1",))
    )
    return replace(plan, num_replicas=num_replicas)


def spoil(pipe: Pipeline, layer: str, value: float, *, parameter: bool) -> None:
    key = f"{layer}.mix.weight" if parameter else f"{layer}.value"
    state = pipe.state_dict()
    if key in state:
        with torch.no_grad():
            state[key].fill_(value)


@pytest.mark.parametrize(
    ("layer", "value", "parameter", "found"),
    [
        ("2", math.nan, False, "the output of layer 2 on stage 1 is the first that is not;"),
        ("0", math.inf, False, "the output of layer 0 on stage 0 is the first that is not;"),
        (
            "1",
            math.nan,
            True,
            "layer 1 on stage 0 is the first that is not; the weights of this stage are not finite either",
        ),
    ],
)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_script_is_warned(layer: str, value: float, parameter: bool, found: str, num_replicas: int) -> None:
    plan = planned(num_replicas)

    def script() -> tuple[list[str], dict[str, Tensor]]:
        pipe = gplan.pipeline(build, plan, loss=loss, timeout_s=20.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe.step(*batch())
            spoil(pipe, layer, value, parameter=parameter)
            assert not caught
            for _ in range(3):
                pipe.step(*batch())
        counts = {key: x for key, x in pipe.state_dict().items() if key.endswith("tracked")}
        return [str(x.message) for x in caught if "the loss is" in str(x.message)], counts

    for texts, counts in (alone := script(), *on_ranks(plan.num_ranks, lambda _rank: script())):
        assert all(found in x and "in step 2, not finite" in x for x in texts)
        assert all(int(x) == int(alone[1][key]) for key, x in counts.items())
    assert len(alone[0]) == 1


def test_run_stops() -> None:
    """A learning rate that is much too high."""
    with pytest.raises(
        RunError, match=r"the loss is (nan|inf) in step [23], not finite: the output of layer \d on stage \d is the"
    ):
        run_virtually(file_of(1e38), planned(), RunOptions(num_steps=5))


def test_loss_function() -> None:
    bad = file_of(loss=lambda output, target: loss(output, target) / 0.0)
    with pytest.raises(
        RunError, match="the loss is inf in step 1, not finite: the output of every layer is; see the loss"
    ):
        run_virtually(bad, planned(), RunOptions(num_steps=5))


def test_check_of_a_model_with_nan() -> None:
    model = build()
    with torch.no_grad():
        model[2].mix.weight.fill_(math.nan)  # type: ignore[index, union-attr, operator]
    with pytest.raises(
        ModelError, match=r"the plain model's loss is nan in the first step, .*the output of 2.mix \(Linear\)"
    ):
        run_virtually(file_of(model=model), planned(), RunOptions(num_steps=2, check=True))


def test_check_of_gradients_with_nan() -> None:
    bad = file_of(loss=lambda output, target: loss(output, target) + (output * 0.0).sqrt().sum())
    with pytest.raises(
        ModelError, match=r"gradients of 0.mix.weight, .* are not finite in the first step, its loss is"
    ):
        run_virtually(bad, planned(), RunOptions(num_steps=2, check=True))


def test_sharded_replicas() -> None:
    plan = sharded("weights")

    def job(rank: int) -> list[str]:
        run = Training(plan)
        run.steps(1)
        for name, parameter in run.pipe.named_parameters() if rank % 2 else ():  # of the last stage
            if name != "0.weight":  # tied: its copies must stay equal
                parameter.grad = torch.full_like(parameter, math.nan)
        run.optimizer.step()
        run.optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.pipe.step(*next(run.data))
            run.pipe.step(*next(run.data))
        return [str(x.message) for x in caught if "the loss is" in str(x.message)]

    first, *others = on_ranks(4, job)
    assert "in step 2, not finite: the output of layer" in first[0] and "the weights of this stage" in first[0]
    assert [len(first), *map(len, others)] == [1, 0, 0, 0]
