"""Workspaces, leftovers and pending bytes of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gplan_profiler.analytic.layer_work import analyse
from gplan_profiler.backward.split_backward import SecondHalf, first_half
from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import Chain, Tensors, detached, flat_tensors
from gplan_profiler.memory.allocations import StorageRecorder, now_ns, traced_allocations
from gplan_profiler.memory.layer_memory import (
    HalvesBytes,
    LayerBytes,
    allocate_gradients,
    halves_bytes,
    measure_bytes,
    measure_halves,
    pass_in_halves,
)
from tests.profiler.models import SmallUNet

ROWS, WIDTH = 64, 32
NUM_BYTES = ROWS * WIDTH * 4  # of every tensor between layers


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensors:
        return (self.layer(x),)


class Middle(First):
    """Hands on what it reads."""

    def forward(self, x: Tensor) -> Tensors:
        return x, self.layer(x)


class Multiplied(nn.Module):
    """Keeps both for its backward, and makes a gradient of each."""

    def forward(self, x: Tensor, y: Tensor) -> Tensors:
        return (x * y,)


class Joined(nn.Module):
    """Keeps neither, and its gradients are parts of the one that it is given."""

    def forward(self, x: Tensor, y: Tensor) -> Tensors:
        return (torch.cat([x, y]),)


class Scaled(nn.Module):
    """Makes a gradient of its own."""

    def forward(self, x: Tensor) -> Tensors:
        return (2 * x,)


def measured(last: nn.Module) -> tuple[LayerBytes, ...]:
    layers = nn.ModuleList([First(), Middle(), last])
    allocate_gradients(layers)
    return measure_bytes(list(layers), (torch.randn(ROWS, WIDTH),), lambda tensors: tensors[0].pow(2).mean())


def left(layer: LayerBytes, num_later: int) -> int:
    return sum(x.num_bytes for x in layer.leftovers if x.num_later == num_later)


def test_leftover_of_a_later_layer() -> None:
    _, middle, _, loss = measured(Multiplied())
    assert left(middle, 1) == pytest.approx(NUM_BYTES, abs=64)  # two gradients, without y, which is gone; x is not yet
    assert loss.leftovers == ()


def test_pending_view_of_a_gradient_is_charged_once() -> None:
    _, middle, _, _ = measured(Joined())
    assert left(middle, 1) == pytest.approx(0, abs=64)
    assert left(middle, 2) == pytest.approx(2 * NUM_BYTES, abs=64)


@pytest.mark.parametrize(("last", "expected"), [(Joined, [NUM_BYTES, NUM_BYTES]), (Multiplied, [0, 0])])
def test_gradients_that_are_views(last: type[nn.Module], expected: list[int]) -> None:
    layers = nn.ModuleList([First(), Middle(), last(), Scaled()])
    allocate_gradients(layers)
    found = measure_bytes(list(layers), (torch.randn(ROWS, WIDTH),), lambda tensors: tensors[0].pow(2).mean())
    first, middle = found[0].crossing[0], found[1].crossing[1]
    assert [first.viewed_bytes, middle.viewed_bytes] == expected
    assert found[2].crossing[0].viewed_bytes == 0


class GivesEveryGradient(torch.autograd.Function):
    """Returns the gradient that it received for both inputs, whether they require one or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return 2 * gradient, gradient


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensors:
        return (GivesEveryGradient.apply(x, mask),)  # type: ignore[no-untyped-call]


class WithMask(First):
    def forward(self, x: Tensor) -> Tensors:
        return self.layer(x), torch.ones(ROWS, WIDTH)


class PassesMask(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensors:
        return 2 * x, mask


def test_tensor_without_a_gradient_has_no_viewed_bytes() -> None:
    layers = nn.ModuleList([WithMask(), PassesMask(), Masked()])
    allocate_gradients(layers)
    found = measure_bytes(list(layers), (torch.randn(ROWS, WIDTH),), lambda tensors: tensors[0].pow(2).mean())
    mask = found[0].crossing[1]
    assert (mask.gradient_bytes, mask.viewed_bytes) == (0, 0)


class Tied(nn.Module):
    """An embedding whose table is also the head's weight."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num_tokens, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, num_tokens, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.table(tokens)))
        return out


def test_gradients_of_tied_layers_are_measured_apart() -> None:
    num_tokens = 10_000
    table_bytes = num_tokens * WIDTH * 4
    _, layers, tensors = captured(Tied(num_tokens), torch.randint(num_tokens, (2, 4)))
    table, middle, head, _ = measure_bytes(layers, tensors, lambda x: x[0].sum())
    assert table.backward_workspace_bytes == pytest.approx(2 * table_bytes, rel=0.02)
    assert left(table, 2) == table_bytes  # the sum with the gradient of the head, where both are on one stage
    assert left(middle, 1) < 0.02 * table_bytes
    logits_bytes = 2 * 4 * num_tokens * 4
    assert head.backward_workspace_bytes == pytest.approx(table_bytes + logits_bytes, rel=0.02)


class TiedThrice(nn.Module):
    """A table that two embeddings and the head use, as in an encoder with a decoder."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(num_tokens, WIDTH), nn.Embedding(num_tokens, WIDTH)
        self.head = nn.Linear(WIDTH, num_tokens, bias=False)
        self.other.weight = self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(tokens) + self.other(tokens))
        return out


@pytest.mark.parametrize("follow", [measure_bytes, lambda *x: [y.memory for y in analyse(*x)]])
def test_sum_of_tied_gradients_is_a_tensor_of_its_own_only_where_the_first_is_a_view(follow: Any) -> None:
    num_tokens = 10_000
    table_bytes = num_tokens * WIDTH * 4
    chain, layers, tensors = captured(TiedThrice(num_tokens), torch.randint(num_tokens, (2, 4)))
    found = follow(layers, tensors, lambda x: x[0].sum())
    names = [x.partition(".")[0] for x in chain.names]
    table, other, head = (names.index(x) for x in ("table", "other", "head"))
    assert left(found[table], other - table) == pytest.approx(0, abs=0.02 * table_bytes)
    assert left(found[other], head - other) == pytest.approx(table_bytes, rel=0.02)
    assert left(found[table], head - table) == pytest.approx(0, abs=0.02 * table_bytes)


def test_outputs_that_only_later_layers_save() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.MaxPool1d(2), nn.Linear(4, 4), nn.Sigmoid())
    _, layers, tensors = captured(model, torch.randn(3, 8))
    linear, relu, pool, last, sigmoid, _ = measure_bytes(layers, tensors, lambda x: x[0].sum())
    assert [x.output.saved_later_bytes for x in (linear, relu, pool, last, sigmoid)] == [0, 0, 3 * 4 * 4, 0, 0]
    analysed = [x.memory.output for x in analyse(layers, tensors, lambda x: x[0].sum())]
    assert analysed[:-1] == [x.output for x in (linear, relu, pool, last, sigmoid)]


@pytest.mark.parametrize(("loss", "expected"), [(torch.sum, 3 * 4 * 4), (lambda x: x.pow(2).sum(), 0)])
def test_output_that_only_its_layer_keeps(loss: Callable[[Tensor], Tensor], expected: int) -> None:
    _, layers, tensors = captured(nn.Sequential(nn.Linear(8, 4), nn.Sigmoid()), torch.randn(3, 8))
    for found in (measure_bytes(layers, tensors, lambda x: loss(x[0])), analyse(layers, tensors, lambda x: loss(x[0]))):
        memory = found[-1] if isinstance(found[-1], LayerBytes) else found[-1].memory
        assert memory.fields(on_gpu=False)["unkept_output_bytes"] == expected


def test_workspace_without_later_readers() -> None:
    """Without what the others did before, the first layer's backward needs a gradient of its weight."""
    first, *_ = measured(Multiplied())
    assert first.backward_workspace_bytes - left(first, 1) - left(first, 2) <= NUM_BYTES + WIDTH * WIDTH * 4


NUM_MICROBATCHES = 4


class Block(nn.Module):
    """Attention and a perceptron, each added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Recurrent(nn.Module):
    """An LSTM of one layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)[0]
        return x + found


class Residual(nn.Module):
    """Convolutions with batch norm and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


MODELS: dict[str, tuple[nn.Module, Tensor]] = {
    "transformer": (nn.Sequential(nn.Linear(32, 32), *(Block(32) for _ in range(4))), torch.randn(2, 24, 32)),
    "convolutions": (nn.Sequential(nn.Conv2d(3, 8, 1), *(Residual(8) for _ in range(4))), torch.randn(2, 3, 16, 16)),
    "recurrent": (nn.Sequential(nn.Linear(32, 32), *(Recurrent(32) for _ in range(4))), torch.randn(2, 24, 32)),
}


def sum_of_squares(tensors: Tensors) -> Tensor:
    return torch.stack([x.square().sum() for x in tensors if x.requires_grad]).sum()


def captured(model: nn.Module, inputs: Tensor) -> tuple[Chain, list[nn.Module], Tensors]:
    allocate_gradients(model)
    chain = capture(model, inputs)
    return chain, [chain.stage(i, i + 1) for i in range(len(chain))], flat_tensors(inputs, what="the inputs")


def pending_of(layers: Sequence[nn.Module], tensors: Tensors) -> list[int]:
    return [x.pending_bytes for x in measure_halves(layers, tensors, sum_of_squares)]


def held_between_the_halves(stage: nn.Module, entering: Tensors) -> tuple[int, int, int]:
    """Bytes that a stage holds after the forwards and first halves of some micro-batches, without what it sent.

    And the most that the first of these halves takes above what is there, and a second one.
    """
    inputs = [detached(tuple(x.clone() for x in entering)) for _ in range(NUM_MICROBATCHES)]
    received = [[torch.ones_like(x) for x in stage(*inputs[0])] for _ in inputs]
    with traced_allocations() as trace:
        start = now_ns()
        outputs = [stage(*x) for x in inputs]
        rests: list[SecondHalf] = []
        ends = [now_ns()]
        while outputs:
            m = len(rests)
            rests.append(first_half(outputs.pop(0), received[m], inputs[m])[1])
            ends.append(now_ns())
        end = ends[-1]
        rests.pop().run()
        after = now_ns()
    held = sum(trace.alive(start, end, end).values())
    first, second = (trace.peak_bytes(x, y) - trace.peak_bytes(x, x) for x, y in ((ends[0], ends[1]), (end, after)))
    return held, first, second


@pytest.mark.parametrize("name", MODELS)
def test_stage_memory_is_stashes_and_pending(name: str) -> None:
    chain, layers, tensors = captured(*MODELS[name])
    stashes = [x.stash_bytes for x in measure_bytes(layers, tensors, sum_of_squares)]
    halves = measure_halves(layers, tensors, sum_of_squares)
    pending = [x.pending_bytes for x in halves]
    entering, leaving = (chain.stage(0, end)(*tensors) for end in (2, 4))
    held, most_first, most_second = held_between_the_halves(chain.stage(2, 4), entering)
    expected = NUM_MICROBATCHES * sum(stashes[2:4] + list(pending[2:4]))
    sent = NUM_MICROBATCHES * sum(x.nbytes for x in (*entering, *leaving))  # counts where the layers beside it keep it
    assert held <= expected <= held + sent
    assert expected == pytest.approx(held, rel=0.1)
    own, last = (x.weight_workspace_bytes or 0 for x in halves[2:4])
    assert max(last, own - stashes[3] - pending[3]) == pytest.approx(most_second, rel=0.05)
    own, last = (x.input_workspace_bytes or 0 for x in halves[2:4])
    assert max(last, own + halves[3].grown_bytes) == pytest.approx(most_first, rel=0.1)


def test_what_waits_is_charged_to_the_layer_that_made_it() -> None:
    model = nn.Sequential(
        nn.Linear(6, 7), nn.Sigmoid(), nn.Linear(7, 8), nn.Sigmoid(), nn.Linear(8, 9), nn.Linear(9, 2)
    )
    _, layers, tensors = captured(model, torch.randn(3, 6))
    *pending, loss = pending_of(layers, tensors)
    gradient_of_third, gradient_of_fifth, output = 3 * 8 * 4, 3 * 9 * 4, 3 * 2 * 4
    assert pending == [0, 0, 0, gradient_of_third, 0, gradient_of_fifth - output]  # which the loss no longer keeps
    assert loss <= output  # the gradient of it


def test_values_that_pass_layers_by_leave_every_layer_its_own() -> None:
    _, layers, tensors = captured(SmallUNet(), torch.randn(2, 3, 8, 8))
    pending = pending_of(layers, tensors)
    assert sum(x > 0 for x in pending) >= 3


@pytest.mark.parametrize("name", MODELS)
def test_following_storages_finds_what_the_allocator_holds(name: str) -> None:
    _, layers, tensors = captured(*MODELS[name])
    parameters = [tuple(x.parameters()) for x in layers]
    with StorageRecorder() as recorder:
        passage = pass_in_halves(layers, parameters, tensors, sum_of_squares, now=recorder.now)
    found, expected = halves_bytes(recorder.trace(), passage), measure_halves(layers, tensors, sum_of_squares)
    fields = ["pending_bytes", "grown_bytes"] + ["weight_workspace_bytes"] * (
        name == "transformer"
    )  # else with buffers
    for field in fields:
        assert [getattr(x, field) for x in found] == [getattr(x, field) for x in expected]


def test_both_halves_together_are_a_whole_backward() -> None:
    model, inputs = MODELS["transformer"]
    _, layers, tensors = captured(model, inputs)
    sum_of_squares((model(inputs),)).backward()
    whole = [x.grad for x in model[1:].parameters()]  # type: ignore[index]
    allocate_gradients(model)
    measure_halves(layers, tensors, sum_of_squares)
    for parameter, expected in zip(model[1:].parameters(), whole, strict=True):  # type: ignore[index]
        assert torch.allclose(parameter.grad, expected, atol=1e-5)  # type: ignore[arg-type]


def test_a_model_of_which_nothing_is_trained_has_no_halves() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).requires_grad_(False)
    _, layers, tensors = captured(model, torch.randn(3, 4))
    assert measure_halves(layers, tensors, lambda tensors: tensors[0].sum()) == (HalvesBytes(),) * 3


def test_a_first_half_frees_at_most_the_stash() -> None:
    """The passes that measure them may differ, as where routing is random."""
    measured = LayerBytes(
        stash_bytes=8,
        forward_workspace_bytes=0,
        backward_workspace_bytes=0,
        crossing=(),
        halves=HalvesBytes(pending_bytes=-12),
    )
    assert measured.fields(on_gpu=False)["pending_bytes"] == -8
