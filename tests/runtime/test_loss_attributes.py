"""Losses that read what stages do not hand on: attributes and other state that forwards set, weights of other stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gplan
from gplan.core.errors import ModelError
from gplan.runtime.pipeline import Pipeline
from gplan_profiler.model.load import model_in_memory
from tests.runtime.plans import plan_for, unmeasured_plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.aux: Any = torch.zeros(())
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu()
        self.aux = y.pow(2).mean()
        self.losses.append(self.aux)
        return x + y


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def read_aux(model: nn.Module) -> Tensor:
    return torch.stack([x.aux for x in model.modules() if isinstance(x, Block)]).sum()


def read_losses(model: nn.Module) -> Tensor:
    return torch.stack([y for x in model.modules() if isinstance(x, Block) for y in x.losses]).sum()


@pytest.mark.parametrize(("read", "name"), [(read_aux, "aux"), (read_losses, "losses")])
@pytest.mark.parametrize("make", [Blocks, lambda: nn.Sequential(Block(), Block(), nn.Linear(8, 5))])
def test_loss_that_reads_an_attribute_of_the_forward_is_refused(
    make: Callable[[], nn.Module], read: Callable[[nn.Module], Tensor], name: str
) -> None:
    model, inputs = make(), torch.randn(4, 8)
    plan = unmeasured_plan(model_in_memory(model, inputs=inputs), num_devices=2)
    pipe = gplan.pipeline(model, plan, loss=lambda output, y: cross_entropy(output, y) + read(model), inputs=inputs)
    with pytest.raises(ModelError, match=f"the loss reads the attribute {name} of Block"):
        pipe.step(torch.randn(plan.batch_size, 8), torch.randint(5, (plan.batch_size,)))


def test_attributes_that_the_loss_does_not_read_are_accepted() -> None:
    model, inputs = Blocks(), torch.randn(4, 8)
    plan = unmeasured_plan(model_in_memory(model, inputs=inputs), num_devices=2)
    pipe = gplan.pipeline(model, plan, loss=cross_entropy, inputs=inputs)
    x, y = torch.randn(plan.batch_size, 8), torch.randint(5, (plan.batch_size,))
    assert float(pipe.step(x, y)) == pytest.approx(float(cross_entropy(model(x), y).detach()), rel=1e-5)


class Store:
    """Where forwards keep what losses read, in all the ways that people write."""

    listed: ClassVar[list[Tensor]] = []
    named: ClassVar[dict[str, Tensor]] = {}
    latest: Any = 0.0
    calls = 0
    context: ContextVar[Any] = ContextVar("context", default=0.0)
    tensor = torch.zeros(())
    queue: ClassVar[deque[Tensor]] = deque(maxlen=3)


def remembered() -> Any:
    return getattr(remembered, "aux", 0.0)


def count(_value: Tensor) -> None:
    Store.calls += 1


WAYS: dict[str, tuple[Callable[[Tensor], object], Callable[[], Any]]] = {
    "listed": (Store.listed.append, lambda: sum(Store.listed)),
    "named": (lambda x: Store.named.update(aux=x), lambda: Store.named["aux"]),
    "latest": (lambda x: setattr(Store, "latest", x), lambda: Store.latest),
    "calls": (count, lambda: min(Store.calls, 100)),
    "context": (Store.context.set, Store.context.get),
    "tensor": (lambda x: Store.tensor.copy_(x.detach()), lambda: Store.tensor),
    "queue": (Store.queue.append, lambda: sum(Store.queue)),
    "aux": (lambda x: setattr(remembered, "aux", x), lambda: getattr(remembered, "aux", 0.0)),
}


class Keeping(nn.Module):
    """Keeps the mean square of a layer's output outside the model."""

    def __init__(self, keep: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.head, self.keep = nn.Linear(8, 5), keep

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x).relu()
        self.keep(y.pow(2).mean())
        return self.head(y)


@pytest.mark.parametrize("in_profile", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_loss_that_reads_state_which_the_forward_keeps_outside_is_refused(way: str, in_profile: bool) -> None:
    keep, kept = WAYS[way]
    inputs, target = torch.randn(4, 8), torch.randint(5, (4,))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output, y) + kept()

    def batches(num_samples: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield inputs[:num_samples], target[:num_samples]

    def train() -> None:
        model = Keeping(keep)
        given = {"loss": loss, "batches": batches} if in_profile else {"inputs": inputs}
        plan = plan_for(model_in_memory(model, **given), num_devices=2)
        gplan.pipeline(model, plan, loss=loss, inputs=inputs)

    with pytest.raises(ModelError, match=f"the loss reads .*{way}.*, which the forward of Keeping changes"):
        train()


class Weighted(nn.Module):
    """Has what losses read in a plain loop: weights of all layers, a buffer, weights of the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.log_variance = nn.Parameter(torch.zeros(()))
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.largest.copy_(y.detach().abs().max())
        return self.head(self.second(y))


PENALTIES: dict[str, tuple[Callable[[Weighted], Tensor], str]] = {
    "all weights": (
        lambda m: torch.stack([x.pow(2).sum() for x in m.parameters()]).sum(),
        "the parameter log_variance",
    ),
    "a norm": (lambda m: torch.nn.utils.get_total_norm([*m.first.parameters()]), "the parameter first.weight"),
    "values": (lambda m: m.first.bias.detach().sum(), "the parameter first.bias"),
    "weight of the loss": (lambda m: m.log_variance.exp(), "the parameter log_variance"),
    "buffer": (lambda m: m.largest, "the buffer largest"),
}


def pipeline_with_penalty(penalty: Callable[[Any], Tensor]) -> tuple[Pipeline, Callable[[Tensor, Tensor], Tensor]]:
    model, inputs = Weighted(), torch.randn(4, 8)
    plan = unmeasured_plan(model_in_memory(model, inputs=inputs), num_devices=2)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output, y) + penalty(model)

    return gplan.pipeline(model, plan, loss=loss, inputs=inputs), lambda x, y: loss(model(x), y)


@pytest.mark.parametrize("what", PENALTIES)
def test_loss_that_reads_what_other_stages_hold_is_refused(what: str) -> None:
    penalty, name = PENALTIES[what]
    pipe, _ = pipeline_with_penalty(penalty)
    size = pipe.plan.batch_size
    with pytest.raises(ModelError, match=f"the loss reads {name}"):
        pipe.step(torch.randn(size, 8), torch.randint(5, (size,)))


@pytest.mark.parametrize(
    "penalty",
    [
        lambda m: m.head.weight.pow(2).sum(),  # is on the last stage
        lambda m: m.weights.sum(),  # no forward writes it
        lambda m: torch.ones((), device=next(m.parameters()).device).to(next(m.parameters())),
    ],
)
def test_loss_that_reads_what_the_last_stage_has_is_accepted(penalty: Callable[[Any], Tensor]) -> None:
    pipe, plain = pipeline_with_penalty(penalty)
    size = pipe.plan.batch_size
    x, y = torch.randn(size, 8), torch.randint(5, (size,))
    assert float(pipe.step(x, y)) == pytest.approx(float(plain(x, y).detach()), rel=1e-5)


@pytest.mark.parametrize("make", [lambda: nn.Parameter(torch.zeros(())), lambda: torch.zeros((), requires_grad=True)])
def test_parameter_of_the_loss_is_refused_with_replicas_only(make: Callable[[], Tensor]) -> None:
    model, inputs, scale = Blocks(), torch.randn(4, 8), make()
    file = model_in_memory(model, inputs=inputs)
    x, y = torch.randn(4, 8), torch.randint(5, (4,))
    for num_replicas in (1, 2):
        plan = unmeasured_plan(file, num_devices=2, num_microbatches=2 // num_replicas, num_replicas=num_replicas)
        pipe = gplan.pipeline(model, plan, loss=lambda output, y: cross_entropy(output * scale.exp(), y), inputs=inputs)
        if num_replicas == 1:
            assert float(pipe.step(x, y)) == pytest.approx(float(cross_entropy(model(x), y).detach()), rel=1e-5)
        else:
            with pytest.raises(ModelError, match="the loss has a parameter of its own"):
                pipe.step(x, y)
