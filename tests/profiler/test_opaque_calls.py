"""Custom autograd functions in a trace: each call is one operation with its own backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gplan.core.errors import ModelError
from gplan_profiler.capture.capture import exported

ROWS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Tenfold(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _options: object = None) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 10.0, None


kept_apply: Callable[[Tensor], Tensor] = Tenfold.apply


class Reading(torch.autograd.Function):
    """Applies what it is given, and so reads more than its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
        return apply(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Row(nn.Module):
    """Layers in a row that call a function between their two halves."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor], depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Half(call) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Half(nn.Module):
    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.call = nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.call(self.mix, self.mix(x)))


def tenfold(_mix: nn.Module, x: Tensor) -> Tensor:
    return Tenfold.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def gradients(model: nn.Module, run: Callable[[Tensor], Any]) -> list[Tensor]:
    model.zero_grad()
    run(ROWS).sum().backward()
    return [x.grad.clone() for x in model.parameters() if x.grad is not None]


def assert_trains_alike(model: nn.Module) -> None:
    chain = exported(model, ROWS)
    expected = gradients(model, model)
    found = gradients(model, lambda x: chain.stage(0, len(chain))(x)[0])
    assert len(found) == len(expected) > 0
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_custom_backward_in_repeated_blocks() -> None:
    model = Row(tenfold)
    assert_trains_alike(model)


def test_apply_under_a_name_of_its_own_keeps_its_backward() -> None:
    """`scan = Scan.apply` is bound when the model's file is imported; its forward was traced, without its backward."""
    assert_trains_alike(Row(lambda _mix, x: kept_apply(x)))


def test_custom_function_layers_alike() -> None:
    def structures(call: Callable[[nn.Module, Tensor], Tensor]) -> list[Any]:
        chain = exported(Row(call), ROWS)
        return [chain.structure(layer) for layer in range(1, len(chain))]

    first, *others = structures(tenfold)
    assert all(x == first for x in others)
    doubled = structures(lambda _mix, x: Tenfold.apply(x, "other"))  # type: ignore[no-untyped-call]
    assert doubled[0] == doubled[1] != first


def test_custom_function_may_draw() -> None:
    assert exported(Row(tenfold), ROWS).draws(0)
    assert not exported(Row(lambda _mix, x: x), ROWS).draws(0)


@pytest.mark.parametrize(
    ("call", "draws"),
    [
        (lambda x: F.scaled_dot_product_attention(x, x, x), False),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), True),
        (lambda x: F.dropout(x, 0.0), False),
        (lambda x: F.dropout(x, 0.5), True),
        (lambda x: F.dropout(x, 0.5, training=False), False),
        (lambda x: x + torch.rand_like(x), True),
        (lambda x: x * torch.bernoulli(x.sigmoid()), True),
    ],
    ids=["attention", "attention with dropout", "dropout of 0", "dropout", "dropout in evaluation", "noise", "coin"],
)
def test_a_layer_draws_unless_its_dropout_drops_nothing(call: Callable[[Tensor], Tensor], draws: bool) -> None:
    assert exported(Row(lambda _mix, x: call(x)), ROWS).draws(0) is draws


def test_within_autocast_and_without_gradients_it_is_kept_too() -> None:
    def within(_mix: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            products: Tensor = Tenfold.apply(x @ x.t())  # type: ignore[no-untyped-call]
        return products.float() @ x

    def without(_mix: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale: Tensor = Tenfold.apply(x)  # type: ignore[no-untyped-call]
        return tenfold(_mix, x) * scale

    assert_trains_alike(Row(within))
    assert_trains_alike(Row(without))


def test_custom_function_reading_other_parameters_is_named() -> None:
    model = Row(lambda mix, x: Reading.apply(x, mix))  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match="custom autograd function Reading reads a tensor.*not among its arguments"):
        exported(model, ROWS)


def test_function_argument_of_custom_function() -> None:
    assert_trains_alike(Row(lambda _mix, x: Reading.apply(x, torch.sin)))  # type: ignore[no-untyped-call]


def test_torch_is_afterwards_as_it_was() -> None:
    before = torch.autograd.Function.__dict__["apply"]
    exported(Row(tenfold), ROWS)
    with pytest.raises(ModelError):
        exported(Row(lambda mix, x: Reading.apply(x, mix)), ROWS)  # type: ignore[no-untyped-call]
    assert torch.autograd.Function.__dict__["apply"] is before
    assert Tenfold.apply.__func__ is before.__func__
