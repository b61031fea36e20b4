"""Layers get real weights with the author's values and ties, and are restored."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrizations

from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import TensorSpec
from gplan_profiler.model.lazy_build import build_without_weights, to_fake_tensors
from gplan_profiler.model.materialise import materialised, real_like
from tests.profiler.models import ConvNet, Tied


def lazily(build: type[nn.Module] | object) -> nn.Module:
    model = build_without_weights(build, what="the model")  # type: ignore[arg-type]
    to_fake_tensors(model)
    return model  # type: ignore[no-any-return]


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)))


class Scale(nn.Module):
    """A norm and a table without any rule for their values; the table's dtype is given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(500)), nn.Parameter(torch.ones(500))
        self.table = nn.Parameter(torch.zeros(500, 4, dtype=dtype))
        self.kept = torch.arange(3.0)
        self.register_buffer("places", self.kept)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


@pytest.mark.parametrize(
    ("build", "inputs"),
    [(ConvNet, torch.randn(2, 3, 8, 8)), (Tied, torch.randint(0, 11, (2, 5))), (blocks, torch.randn(2, 3, 16))],
    ids=["convolutional", "tied", "a sequence"],
)
def test_each_lazy_layer_materialises(build: object, inputs: Tensor) -> None:
    model = lazily(build)
    chain, tensors = capture(model, inputs), (inputs,)
    for layer in range(len(chain)):
        stage = chain.stage(layer, layer + 1)
        before = stage.state_dict(keep_vars=True)
        with materialised(stage, seed=1):
            outputs = stage(*tensors)
            wanted = [x for x in outputs if x.requires_grad]
            torch.autograd.backward(wanted, real_like(wanted, seed=2))
            assert all(x.grad is not None and x.grad.isfinite().all() for x in stage.parameters())
            tensors = tuple(x.detach() for x in outputs)
        after = stage.state_dict(keep_vars=True)
        assert list(after) == list(before) and all(after[name] is x for name, x in before.items())
    assert all(isinstance(x, FakeTensor) and x.grad is None for x in model.parameters())


def test_materialise_is_seeded() -> None:
    model = lazily(lambda: nn.Linear(5, 5))
    state, drawn = torch.get_rng_state(), []
    for seed in (1, 1, 2):
        with materialised(model, seed=seed):
            drawn.append(model.weight.detach().clone())
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn])
def test_default_values(dtype: torch.dtype) -> None:
    model = lazily(lambda: Scale(dtype))
    with materialised(model, seed=0):
        assert torch.equal(model.weight, torch.ones(500)) and torch.equal(model.bias, torch.zeros(500))
        assert model.table.dtype == dtype
        values = model.table.detach().to(torch.complex64 if dtype.is_complex else torch.float32)
        assert values.isfinite().all() and math.isclose(values.std(), 0.02, rel_tol=0.15)


def test_what_is_real_is_not_touched() -> None:
    model = lazily(Scale)
    with materialised(model, seed=0):
        assert model.places is model.kept
    assert torch.equal(model.places, torch.arange(3.0))


def test_ties_strides_and_frozen_weights_are_kept() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
        model[1].weight = model[0].weight
        model[0].bias.requires_grad_(False)
        return model

    model, real = lazily(build), build()
    with materialised(model, seed=0):
        assert model[0].weight is model[1].weight
        assert model[0].weight.stride() == real[0].weight.stride()
        assert not model[0].bias.requires_grad and model[1].bias.requires_grad
        assert not isinstance(model[0].weight, FakeTensor)


def test_a_parametrized_weight_is_finite() -> None:
    model = lazily(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))))
    with materialised(model, seed=0):
        assert model(torch.ones(1, 4)).isfinite().all()


def test_it_is_fake_again_after_an_error() -> None:
    model = lazily(lambda: nn.Linear(5, 5))
    with pytest.raises(RuntimeError, match="mid-way"), materialised(model, seed=0):
        raise RuntimeError("mid-way")
    assert isinstance(model.weight, FakeTensor)


@pytest.mark.parametrize(
    "like", [torch.rand(3, 4, 5).transpose(0, 2), torch.rand(2, 1, 5).expand(2, 3, 5), torch.rand(2, 6)[:, ::2]]
)
def test_real_like_draws_in_the_strides_of_a_stage(like: torch.Tensor) -> None:
    spec = TensorSpec.of(like)
    (found,) = real_like([spec], seed=0)
    assert found.shape == like.shape and found.stride() == like.stride()
    assert torch.equal(spec.laid_out(like.contiguous()), like)
    assert TensorSpec.of(like.contiguous()) == spec  # what another device sends


def test_real_like_draws_what_a_boundary_would_hold() -> None:
    specs = [
        TensorSpec(shape=(50, 20), dtype=dtype, requires_grad=dtype.is_floating_point)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    ]
    values = real_like(specs, seed=3)
    assert tuple(TensorSpec.of(x) for x in values) == tuple(specs)
    floats, _, integers, booleans = values
    assert math.isclose(floats.detach().std(), 1.0, rel_tol=0.1)
    assert set(integers.unique().tolist()) == {0, 1} and booleans.any() and not booleans.all()
    assert all(torch.equal(a, b) for a, b in zip(values, real_like(specs, seed=3), strict=True))
