"""Fused kernels: found in graphs and in torch's functions, kept and moved bytes by hand, parameters unchanged."""

from __future__ import annotations

import dataclasses
from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gplan.core.errors import UsageError
from profiler.analytic.computed_profile import ComputeOptions, computed_profile
from profiler.analytic.fusion import Fused
from profiler.analytic.hardware import FUSED_KERNELS, FusedKernel, load_hardware, parse_fused
from profiler.analytic.layer_work import LayerAnalysis, analyse
from profiler.analytic.shapes import AttentionShape
from profiler.capture.capture import capture
from profiler.capture.chain import flat_tensors
from profiler.model.load import model_in_memory

WIDTH, LENGTH, HEADS, GATED = 8, 6, 2, 16
X = 4 * LENGTH * WIDTH  # bytes of the hidden states


class RootNorm(nn.Module):
    """A norm written out, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """Attention written out, then a gated perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = RootNorm(), RootNorm()
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, GATED, bias=False), nn.Linear(WIDTH, GATED, bias=False)
        self.down = nn.Linear(GATED, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (query @ key.transpose(-1, -2) * 0.5).softmax(-1)
        x = x + self.out((scores @ value).transpose(1, 2).flatten(2))
        y = self.second(x)
        added: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + added


class Model(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


MODEL = Model()


@cache
def captured() -> tuple[Tensor, list[nn.Module]]:
    x = torch.randn(1, LENGTH, WIDTH, requires_grad=True)
    chain = capture(MODEL, x)
    return x, [chain.stage(i, i + 1) for i in range(len(chain))]


def analysed(kernels: tuple[FusedKernel, ...], fused: Fused | None = None) -> tuple[LayerAnalysis, ...]:
    x, layers = captured()

    def loss(outputs: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(outputs[0].flatten(0, 1), torch.zeros(LENGTH, dtype=torch.int64))

    return analyse(layers, flat_tensors(x, what="x"), loss, fused=fused or Fused(kernels=kernels))


def test_fused_kernels_keep_their_inputs() -> None:
    plain, found = analysed(()), Fused(kernels=FUSED_KERNELS)
    block = analysed((), found)[1]
    attention = 4 * LENGTH * HEADS + X  # a sum for each query, and the output
    kept = X + 3 * X + attention + X + X + X + 2 * 4 * LENGTH * GATED + 4 * LENGTH * GATED + X
    # norm's output, queries with keys and values, attention, its output in rows, sum, norm's output, gate and up, their
    # product, and the block's output, which the loss keeps
    assert block.memory.stash_bytes == kept
    assert block.memory.stash_bytes < plain[1].memory.stash_bytes
    assert (found.found["normalization"], found.found["activation"], found.found["attention"]) == (4, 2, 2)
    assert found.found["cross-entropy"] == 1
    loss, plain_loss = analysed(("cross-entropy",))[-1], plain[-1]
    assert loss.memory.stash_bytes < plain_loss.memory.stash_bytes


def test_a_fused_kernel_moves_its_inputs_and_results_once() -> None:
    norms = [x.work for x in analysed(("normalization",))[0].forward if x.work.kind == "normalization"]
    weight = 4 * WIDTH
    assert [x.num_bytes for x in norms] == [2 * X + weight, LENGTH * LENGTH * HEADS * 4 * 2, 2 * X + weight]
    gates = [
        x.work.num_bytes for x in analysed(("activation",))[0].forward if x.work.num_bytes == 3 * 4 * LENGTH * GATED
    ]
    assert len(gates) == 1
    back = [x.work for x in analysed(("normalization",))[1].backward if x.work.kind == "normalization"]
    assert back[0].num_bytes == 3 * X + 2 * weight  # input, gradient, gradient of the input; weight and its gradient


def test_torchs_attention_is_found_by_its_shape() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(F.scaled_dot_product_attention(x, x, x, is_causal=True))
            return found

    x = torch.randn(2, 3, 5, 4, requires_grad=True)
    chain = capture(nn.Sequential(Attention(), nn.Linear(4, 4)), x)
    layers = [chain.stage(i, i + 1) for i in range(len(chain))]
    first, *_ = analyse(layers, (x,), lambda y: y[0].sum(), fused=Fused(kernels=("attention",)))
    shapes = [x.shape for x in (*first.forward, *first.backward) if isinstance(x.shape, AttentionShape)]
    sizes = {"batch": 2, "sequence": 5, "heads": 3, "kv_heads": 3, "qk_dim": 4, "v_dim": 4, "dtype": "float32"}
    forward = AttentionShape(**sizes)  # type: ignore[arg-type]
    assert shapes == [forward, msgspec.structs.replace(forward, direction="backward")]


def test_torchs_attention_makes_rows_without_a_copy() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.heads(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
            found: Tensor = self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
            return found

    x = torch.randn(2, 16, 24, requires_grad=True)
    chain = capture(nn.Sequential(Attention(), nn.Linear(24, 24)), x)
    layers = [chain.stage(i, i + 1) for i in range(len(chain))]
    plain, fused = (
        analyse(layers, (x,), lambda y: y[0].sum(), fused=Fused(kernels=kernels))[0].memory.stash_bytes
        for kernels in ((), FUSED_KERNELS)
    )
    assert fused == plain


def test_a_computed_profile_states_what_was_fused() -> None:
    file = model_in_memory(MODEL, loss=lambda y, _: y.sum(), inputs=lambda n: torch.randn(n, LENGTH, WIDTH))
    options = ComputeOptions(hardware=load_hardware("h100"), microbatch_sizes=(1,), fused=FUSED_KERNELS)
    fused, plain = computed_profile(file, options), computed_profile(file, dataclasses.replace(options, fused=()))
    assert "counted as fused kernels: attention, normalization, activation" in fused.notes
    assert "to be fused, but found in no layer: cross-entropy" in fused.notes
    before, after = plain.layers[1].costs[0], fused.layers[1].costs[0]
    assert after.stash_bytes < before.stash_bytes
    assert after.forward.median_s < before.forward.median_s
    assert fused.num_parameters == plain.num_parameters


def test_kernels_that_are_not_known_are_named() -> None:
    assert parse_fused("all") == FUSED_KERNELS
    with pytest.raises(
        UsageError, match="no fused kernel is called 'swiglu'; expected all, none, or some of attention"
    ):
        parse_fused("attention,swiglu")
