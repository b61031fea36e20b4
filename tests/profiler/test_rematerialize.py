"""Recompute: how often functions run, what is kept, and bitwise equal gradients."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from gplan_profiler.backward.rematerialize import noting_saves, recomputed, share_run_again, without_checkpointing
from gplan_profiler.capture.chain import Tensors
from gplan_profiler.memory.allocations import now_ns, traced_allocations

WIDTH = 64
Net = Callable[[Tensor], Tensor]


class Counted(nn.Module):
    """A module that counts its forwards."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.inner, self.num_forwards = nn.Sequential(*children), 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return self.inner(x)


class Scaled(torch.autograd.Function):
    """x * w, that saves an input, a parameter and its output, and notes where they lie in the backward."""

    seen: tuple[int, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        Scaled.seen = tuple(t.data_ptr() for t in ctx.saved_tensors[:2])
        return gradient * w, (gradient * y / w).sum(0) + 0 * x.sum(0)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.scale)


class Nested(nn.Module):
    """The author's own checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Force(nn.Module):
    """A layer that takes a gradient in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = mlp()

    def forward(self, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)
        return x + self.energy(force)


class Picky(nn.Module):
    """Integers, a mask, and a block without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            place = x.argmax(1).remainder(5)
            scale = x.abs().mean(1, keepdim=True)
        return torch.where(x > 0, x * scale, x) + self.table(place)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.BatchNorm1d(WIDTH), nn.ELU(1.0, True)),
    "custom function": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Custom(), nn.Tanh()),
    "own checkpoint": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Nested(), nn.Tanh()),
    "own gradient": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Force(), nn.Tanh()),
    "integers": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Picky(), nn.Linear(WIDTH, 1), nn.Flatten(0)),
    "lstm": lambda: nn.Sequential(nn.LSTM(WIDTH, WIDTH), First(), nn.Linear(WIDTH, WIDTH)),
}  # fmt: skip


class First(nn.Module):
    def forward(self, x: tuple[Tensor, Any]) -> Tensor:
        return x[0]


def again(net: Net, x: Tensor, around: Callable[[], Any] = nullcontext) -> Tensor:
    """The net, whose forward runs again in the backward."""

    def run(*given: Tensor) -> Tensors:
        return (net(*given),)

    (found,) = recomputed(run, (x,), again=around)
    return found


def rows(number: int = 8) -> Tensor:
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def whole(output: Tensor, x: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """All gradients in one backward."""
    return list(torch.autograd.grad(output.square().sum(), [x, *parameters]))


def in_parts(output: Tensor, x: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """First that of the input, then those of the parameters one by one, each in a backward of its own."""
    total = output.square().sum()
    wanted = [x, *parameters]
    return [torch.autograd.grad(total, [y], retain_graph=i + 1 < len(wanted))[0] for i, y in enumerate(wanted)]


def built(name: str) -> Counted:
    torch.manual_seed(0)
    return Counted(NETS[name]())


@pytest.mark.parametrize("backward", [whole, in_parts])
@pytest.mark.parametrize("name", NETS)
def test_recompute_gradients_are_bitwise_equal(name: str, backward: Any) -> None:
    plain, net, x = built(name), built(name), rows()
    expected = backward(plain(x), x, list(plain.parameters()))
    found = backward(again(net, x), x, list(net.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    asked_before = name == "own gradient"  # in the forward, of what was there so far
    assert net.num_forwards == 2 + asked_before


def test_second_run_ends_at_the_last_saved_tensor() -> None:
    last, x = Counted(nn.Flatten(0)), rows()
    again(nn.Sequential(nn.Linear(WIDTH, WIDTH), last), x).sum().backward()  # type: ignore[no-untyped-call]
    assert last.num_forwards == 1


def test_without_gradients_nothing_is_kept() -> None:
    net, x = built("mlp"), rows()
    with torch.no_grad():
        assert not again(net, x).requires_grad
    assert net.num_forwards == 1


def test_leaves_are_saved_without_copies() -> None:
    net, x = Custom(), rows()
    again(net, x).sum().backward()  # type: ignore[no-untyped-call]
    assert Scaled.seen == (x.data_ptr(), net.scale.data_ptr())


def test_inputs_that_no_operation_keeps_go_with_the_second_run() -> None:
    x, added = rows(), torch.randn(8, WIDTH)

    def run(*given: Tensor) -> Tensors:
        return ((given[0] + given[1]).exp(),)

    (output,) = recomputed(run, (x, added), again=nullcontext)
    is_there = weakref.ref(added)
    del added
    assert is_there() is not None
    torch.autograd.grad(output.sum(), [x], retain_graph=True)
    assert is_there() is None


def test_the_second_run_has_the_autocast_of_the_first() -> None:
    net, plain, x = built("mlp"), built("mlp"), rows()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, expected = again(net, x), plain(x)
    found, wanted = (whole(y, x, list(z.parameters())) for y, z in ((output, net), (expected, plain)))
    assert output.dtype == torch.bfloat16
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_context_of_the_second_run() -> None:
    events: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        events.append("in")
        yield
        events.append("out")

    def net(x: Tensor) -> Tensor:
        events.append("run")
        return x.exp()

    again(net, rows(), around).sum().backward()  # type: ignore[no-untyped-call]
    assert events == ["run", "in", "run", "out"]


def peaks(net: Net, backward: Any) -> tuple[int, int, int]:
    """Bytes held after the forward, at most in the backward, and after it with the gradients, above the input's."""
    parameters, x = list(net.parameters()), rows(NUM_ROWS)  # type: ignore[attr-defined]
    backward(net(x), x, parameters)
    gc.disable()
    try:
        with traced_allocations() as trace:
            output = net(x)
            between_ns = now_ns()
            found = backward(output, x, parameters)
            del output
            end_ns = now_ns()
            assert found
    finally:
        gc.enable()
    held = sum(trace.alive(0, end_ns, end_ns).values())
    return sum(trace.alive(0, between_ns, between_ns).values()), trace.peak_bytes(between_ns, end_ns), held


class Row(nn.Module):
    """Four nets in a row, run as `how` says."""

    def __init__(self, how: Callable[[Net, Tensor], Tensor], *, in_one: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.nets, self.how, self.in_one = nn.Sequential(*(mlp() for _ in range(4))), how, in_one

    def forward(self, x: Tensor) -> Tensor:
        for net in [self.nets] if self.in_one else self.nets:
            x = self.how(net, x)
        return x


def plainly(net: Net, x: Tensor) -> Tensor:
    return net(x)


def by_torch(net: Net, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(net, x, use_reentrant=False)
    return found


NUM_ROWS = 256
SLACK_BYTES = 1024  # for numbers that code keeps


@pytest.mark.parametrize("in_one", [True, False])
def test_memory_matches_torch_checkpoint(in_one: bool) -> None:
    kept, peak, after = peaks(Row(again, in_one=in_one), whole)
    kept_by_torch, peak_by_torch, after_by_torch = peaks(Row(by_torch, in_one=in_one), whole)
    assert kept <= kept_by_torch + SLACK_BYTES
    assert peak <= peak_by_torch + SLACK_BYTES
    assert after <= after_by_torch
    stash_kept, stash_peak, _ = peaks(Row(plainly, in_one=in_one), whole)
    assert kept < stash_kept / 3
    assert in_one or peak < stash_peak - 2 * (stash_kept // 4)  # one net's stash at a time


def test_memory_of_backward_in_parts() -> None:
    kept, peak, after = peaks(Row(again, in_one=True), in_parts)
    stash_kept, stash_peak, stash_after = peaks(Row(plainly, in_one=True), in_parts)
    output_bytes = rows(NUM_ROWS).nbytes  # which the last operation keeps: the one that was handed on, and another
    assert kept < stash_kept / 3
    assert peak <= stash_peak + output_bytes + SLACK_BYTES
    assert after <= stash_after


def test_dropped_graph_is_freed() -> None:
    net, x = built("mlp"), rows()
    gc.disable()
    try:
        with traced_allocations() as trace:
            output = again(net, x)
            found = torch.autograd.grad(output.sum(), [x], retain_graph=True)
            del output
            end_ns = now_ns()
    finally:
        gc.enable()
    assert sum(trace.alive(0, end_ns, end_ns).values()) == found[0].nbytes


def test_second_run_with_another_shape_is_refused() -> None:
    sizes = iter([4, 3])

    def net(x: Tensor) -> Tensor:
        return functional.pad(x[:, : next(sizes)].exp(), (0, 1)).exp()

    with pytest.raises(RuntimeError, match=r"shape \(8, 3\), float32, on cpu .* saved a tensor of shape \(8, 4\)"):
        again(net, rows()).sum().backward()  # type: ignore[no-untyped-call]


def test_second_run_with_fewer_tensors_is_refused() -> None:
    counts = iter([3, 2])

    def net(x: Tensor) -> Tensor:
        for _ in range(next(counts)):
            x = x.exp()
        return x

    with pytest.raises(RuntimeError, match="saves 2 tensors for the backward, where it saved 3"):
        again(net, rows()).sum().backward()  # type: ignore[no-untyped-call]


def test_an_input_that_was_written_into_meanwhile_is_refused() -> None:
    x = torch.randn(3, WIDTH)
    output = again(nn.Linear(WIDTH, WIDTH), x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="was written into between its forward and its backward"):
        output.sum().backward()  # type: ignore[no-untyped-call]


def test_write_after_use_is_refused() -> None:
    def net(x: Tensor) -> Tensor:
        y = x.exp()
        z = y.mul_(2)
        return z.exp()

    with pytest.raises(RuntimeError, match=r"shape \(8, 64\) that the backward needs was written in place"):
        again(net, rows()).sum().backward()  # type: ignore[no-untyped-call]


def test_a_second_run_ends_when_the_last_tensor_is_saved() -> None:
    """By a clock that stands still but for the work: three parts until the last tensor is saved, and one after it."""
    now_s = 0.0

    def run(x: Tensor) -> Tensors:
        nonlocal now_s
        now_s += 3.0
        kept = torch.tanh(x)
        now_s += 1.0
        return (kept + 1,)

    share, _ = share_run_again(run, (torch.ones(2, requires_grad=True),), now=lambda: now_s)
    assert share == 0.75


def test_share_of_a_forward_that_is_run_again() -> None:
    """A second run ends where the last tensor is saved: before the product of the head, whose input is saved."""
    ticks = iter(range(100))
    head = nn.Linear(4, 1000)
    share, (logits,) = share_run_again(
        lambda x: (head(torch.tanh(x)),), (torch.ones(2, 4, requires_grad=True),), now=lambda: next(ticks)
    )
    assert logits.shape == (2, 1000)
    assert 0 < share < 1
    assert share_run_again(lambda x: (x + 1,), (torch.ones(2, requires_grad=True),), now=lambda: next(ticks))[0] == 0


def test_noted_output_is_freed() -> None:
    inputs = torch.ones(3, requires_grad=True)
    gc.disable()
    try:
        (output,) = noting_saves(lambda x: (x.exp(),), lambda _: None)(inputs)
        gone = weakref.ref(output)
        del output
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_own_checkpoints_can_be_left_out(use_reentrant: bool, parts: int) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3)))
    calls: list[object] = []
    layers[0].register_forward_pre_hook(lambda *_: calls.append(None))
    x = torch.ones(1, 2, requires_grad=True)

    def gradients() -> tuple[Tensor, ...]:
        calls.clear()
        found = checkpoint_sequential(layers, parts, x, use_reentrant=use_reentrant)
        return torch.autograd.grad(checkpoint(torch.sum, found, use_reentrant=False), [*layers.parameters()])

    if not use_reentrant:  # which torch.autograd.grad cannot pass
        expected = gradients()
        assert len(calls) == (2 if parts > 1 else 1)
    with without_checkpointing() as left_out:
        found = gradients()
    assert (len(calls), len(left_out)) == (1, parts)
    plain = torch.autograd.grad(layers(x).sum(), [*layers.parameters()])
    for gradient, other in zip(found, plain if use_reentrant else expected, strict=True):
        torch.testing.assert_close(gradient, other)
