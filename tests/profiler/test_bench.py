"""The first run of a bench names the layer that fails."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gplan.core.errors import ModelError
from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import TensorSpec
from gplan_profiler.model.error_location import is_out_of_memory
from gplan_profiler.timing.bench import (
    Bench,
    Composed,
    rehearse,
    run_naming_errors,
    split_backward_obstacle,
    sum_of_outputs,
)


def bench_of(*layers: nn.Module) -> Bench:
    return Bench(
        names=tuple("abc"[: len(layers)]),
        keys=tuple(str(i) for i in range(len(layers))),
        layers=layers,
        stage=Composed(layers),
        inputs=(torch.ones(2, 4),),
        loss=sum_of_outputs,
    )


class Layer(nn.Module):
    """A linear layer that gives a tuple, as the layers of a chain do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.inner(x),)


class Learning(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            self.inner.bias.add_(1)
        return super().forward(x)


class Swapping(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.inner.weight.data = self.inner.weight.data.clone()
        return super().forward(x)


class Failing(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        raise ValueError("no such luck")


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise RuntimeError("cannot go back")


class OneWay(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (NoBackward.apply(self.inner(x)),)


class Exploding(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.inner(x) / 0,)


class Recomputing(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (checkpoint(self.inner, x, use_reentrant=True),)


class EndsInView(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.inner(x).flatten(0).view(2, 4),)


def test_a_backward_that_cannot_be_split_is_named_by_its_layer() -> None:
    assert split_backward_obstacle(bench_of(Layer(), EndsInView(), Layer())) == ""
    found = split_backward_obstacle(bench_of(Layer(), Recomputing(), Layer()))
    assert found.startswith("layer b: ") and "checkpoint" in found.lower()


def test_layers_that_behave_have_no_notes() -> None:
    assert rehearse(bench_of(Layer(), Layer())) == ()


def test_a_layer_that_fails_alone_is_named_with_its_own_words() -> None:
    with pytest.raises(ModelError, match=r"layer b fails in its forward pass: ValueError: no such luck"):
        rehearse(bench_of(Layer(), Failing()))


def test_a_backward_that_fails_is_named_too() -> None:
    with pytest.raises(ModelError, match=r"layer b fails in its backward pass: RuntimeError: cannot go back"):
        rehearse(bench_of(Layer(), OneWay(), Layer()))


def test_a_loss_in_bfloat16_names_the_remedy() -> None:
    def mixed_types() -> None:  # what torch 2.11 answers to the mean square of a bfloat16 and a float32 tensor
        raise RuntimeError("Found dtype Float but expected BFloat16")

    with pytest.raises(ModelError, match=r"the loss fails .* in float32, as in loss\(output\.float\(\), \.\.\.\)$"):
        run_naming_errors("the loss", "backward", mixed_types)


@pytest.mark.parametrize("layer", [Learning, Swapping])
def test_a_layer_that_changes_its_own_parameters_is_refused(layer: type[Layer]) -> None:
    with pytest.raises(ModelError, match=r"layer b changes its own parameter inner\.(bias|weight).*register_buffer"):
        rehearse(bench_of(Layer(), layer()))


def test_non_finite_layer_is_noted() -> None:
    assert rehearse(bench_of(Layer(), Exploding(), Layer())) == (
        "layer b returns values that are not finite: check its weights, its inputs and its dtype",
    )


class Masking(Layer):
    """Makes a mask if it was not given one, and hands it on."""

    def __init__(self, hidden: float) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        mask = torch.full((2, 2), self.hidden).triu(1) if mask is None else mask
        return self.inner(mask.softmax(1) @ x), mask


class Scores(Layer):
    """Attention's scores with an additive mask: infinities where gradients pass."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.inner(x) + torch.full((2, 4), -torch.inf).triu(1),)


class Weights(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.inner(x.softmax(1)),)


def test_infinities_that_the_next_layer_ends_are_no_fault() -> None:
    assert rehearse(bench_of(Layer(), Scores(), Weights())) == ()
    (note,) = rehearse(bench_of(Scores(), Weights(), Exploding()))
    assert note.startswith("layer c returns values that are not finite")


def test_a_mask_may_have_infinities_but_no_nan() -> None:
    assert rehearse(bench_of(Masking(-torch.inf), Masking(0.0))) == ()
    (note,) = rehearse(bench_of(Masking(torch.nan), Masking(0.0)))
    assert note.startswith("layer a returns values that are not finite")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_memory_that_is_out_names_the_layer_and_the_remedy(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(ModelError, match=r"blocks\.7 runs out of memory in its forward pass; .*--microbatch-size"):
        run_naming_errors("blocks.7", "forward", fail)


def test_a_real_request_for_too_much_memory_is_recognised() -> None:
    with pytest.raises(ModelError, match="huge runs out of memory") as caught:
        run_naming_errors("huge", "forward", partial(torch.empty, 2**60, dtype=torch.uint8))
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_a_layer_runs_with_the_strides_of_its_stage() -> None:
    """The layer before it in the model makes other strides than the one before it among those that are measured."""
    seen: list[tuple[int, ...]] = []
    bench = replace(
        bench_of(nn.Identity(), nn.Identity()), specs=((), (TensorSpec.of(torch.ones(4, 2).t()),)),
    )  # fmt: skip
    bench.forward(lambda place, leaves: seen.append(leaves[0].stride()) or leaves)  # type: ignore[func-returns-value]
    assert seen == [(4, 1), (1, 2)]


class Turning(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) * 2


@pytest.mark.parametrize("sequential", [True, False])
def test_a_layer_keeps_the_strides_of_its_outputs_unless_it_sends_them(sequential: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Turning(), Turning()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    chain = capture(nn.Sequential(Turning(), Turning()) if sequential else Model(), torch.rand(2, 3, 4))
    (sent,), (kept,) = (chain.stage(0, 1, sends=x)(torch.rand(2, 3, 4)) for x in (True, False))
    assert (sent.stride(), kept.stride()) == ((12, 3, 1), (12, 1, 4))
    assert [x.strides for x in chain.specs(1)] == [kept.stride()]
