"""Both halves of a backward equal the whole one, for any use of weights."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gplan_profiler.backward.split_backward import first_half

Stage = Callable[..., tuple[Tensor, ...]]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(numbers(*shape, seed=1) * 0.5)


W, V, TABLE, BIAS, OTHER_BIAS = weight(4, 4), weight(4, 4), weight(5, 4), weight(4), weight(4)
WHOLE, OTHER_WHOLE = weight(2, 4), weight(2, 4)
LSTM, BLOCK = nn.LSTM(4, 4), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
IDS = torch.tensor([1, 3])


class Written(torch.autograd.Function):
    """A product whose backward is written in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.T, x.T @ gradient


def written(x: Tensor, w: Tensor) -> Tensor:
    output: Tensor = Written.apply(x, w)  # type: ignore[no-untyped-call]
    return output


STAGES: dict[str, Stage] = {
    "one weight": lambda x, _: (torch.relu(x @ W),),
    "no weight": lambda x, _: (torch.relu(x),),
    "a weight that no input meets": lambda x, ids: (torch.relu(x @ W), F.embedding(ids, TABLE)),
    "no input that wants a gradient": lambda _, ids: (F.embedding(ids, TABLE) @ V,),
    "outputs of outputs that no input meets": lambda x, ids: (x @ W, q := F.embedding(ids, TABLE), q @ V),
    "an output on the way from an input to a weight": lambda x, ids: (q := F.embedding(ids, TABLE), x + q),
    "an input that passes by": lambda x, _: (x, x @ W),
    "a view for an output": lambda x, _: ((x @ W).view(8), (x @ V).chunk(2, 1)[1]),
    "an output without a gradient": lambda x, _: (x @ W, (x @ V).detach()),
    "one gradient for two weights": lambda x, _: (x + WHOLE + OTHER_WHOLE,),
    "a weight used twice": lambda x, _: (F.linear(torch.relu(F.linear(x, W, BIAS)), W, OTHER_BIAS),),
    "a weight used around another": lambda x, _: (torch.tanh(torch.tanh(torch.tanh(x @ W) @ V) @ W),),
    "a weight used on the way and beside it": lambda x, _: (torch.tanh(x @ W), torch.tanh(V @ W)),
    "operations written in Python": lambda x, _: (torch.relu(written(torch.relu(written(x, W)), V)),),
    "an output written in Python": lambda x, _: (written(torch.relu(x), W),),
    "a recurrent layer": lambda x, _: (LSTM(x)[0],),
    "a block": lambda x, _: (BLOCK(x[None])[0],),
}
WEIGHTS = [W, V, TABLE, BIAS, OTHER_BIAS, WHOLE, OTHER_WHOLE, *LSTM.parameters(), *BLOCK.parameters()]


def gradients(stage: Stage, *, in_halves: bool) -> list[Tensor | None]:
    """Of the weights and the input, added up over two micro-batches."""
    for parameter in WEIGHTS:
        parameter.grad = None
    of_inputs: list[Tensor | None] = []
    for microbatch in range(2):
        inputs = (numbers(2, 4, seed=2 + microbatch).requires_grad_(), IDS)
        outputs = stage(*inputs)
        given = [numbers(*x.shape, seed=5 + microbatch) if x.requires_grad else None for x in outputs]
        if in_halves:
            found, half = first_half(outputs, given, inputs)
            assert found[1] is None
            of_inputs.append(found[0])
            del outputs
            half.run()
        else:
            roots = [(x, y) for x, y in zip(outputs, given, strict=True) if y is not None]
            torch.autograd.backward([x for x, _ in roots], [y for _, y in roots])
            of_inputs.append(inputs[0].grad)
    return [None if x is None else x.clone() for x in [*(parameter.grad for parameter in WEIGHTS), *of_inputs]]


@pytest.mark.parametrize("name", STAGES)
def test_the_halves_together_are_the_whole(name: str) -> None:
    found, expected = (gradients(STAGES[name], in_halves=x) for x in (True, False))
    assert [x is None for x in found] == [x is None for x in expected]
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other)


def test_the_first_half_leaves_the_weights_alone() -> None:
    W.grad = None
    x = numbers(2, 4).requires_grad_()
    (found, _), half = first_half((x @ W, x @ W), (torch.ones(2, 4), None), (x, IDS))
    assert found is not None
    assert W.grad is None
    assert x.grad is None
    half.run()
    assert W.grad is not None
    assert x.grad is None


def test_without_gradients_there_is_nothing_to_do() -> None:
    found, half = first_half((IDS,), (None,), (IDS,))
    half.run()
    assert found == (None,)


def test_an_operation_that_only_the_first_half_needs_runs_once() -> None:
    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            runs.append(1)
            return gradient

    runs: list[int] = []
    x = numbers(2, 4).requires_grad_()
    output = Counted.apply(Counted.apply(x @ W) @ V)  # type: ignore[no-untyped-call]
    _, half = first_half((output,), (torch.ones(2, 4),), (x,))
    del output
    half.run()
    assert len(runs) == 2


def test_saved_tensors_live_until_the_second_half() -> None:
    class Kept:
        pass

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.kept = Kept()
            kept.append(weakref.ref(ctx.kept))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    kept: list[weakref.ref[Kept]] = []
    x = numbers(2, 4).requires_grad_()
    output = torch.tanh(Keeping.apply(x @ W) @ V)  # type: ignore[no-untyped-call]
    _, half = first_half((output,), (torch.ones(2, 4),), (x,))
    del output
    gc.collect()
    assert kept[0]() is not None  # before a weight that is still to come
    half.run()
    gc.collect()
    assert kept[0]() is None
