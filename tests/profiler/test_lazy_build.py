"""Models without weights: what becomes fake, what stays real, and which code is refused."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrizations

from gplan.core.errors import ModelError
from gplan_profiler.model.lazy_build import build_without_weights, fake_mode_of, lost_values_note, to_fake_tensors
from tests.profiler.models import Branching, ConvNet, Tied


def lazily(build: Callable[[], nn.Module]) -> nn.Module:
    model = build_without_weights(build, what="the model")
    to_fake_tensors(model)
    return model


def description(model: nn.Module) -> dict[str, tuple[object, ...]]:
    """All that tells a model's tensors apart but their values."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: (tuple(x.shape), x.stride(), x.dtype, x.requires_grad) for name, x in named}


class Vision(nn.Module):
    """Stochastic depth from linspace, read as numbers; parameters made of constants and of noise; a mask."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        rates = [x.item() for x in torch.linspace(0, 0.1, 3)]
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(5, width) * 0.02)
        self.scales = nn.ParameterList([nn.Parameter(1e-6 * torch.ones(width)) for _ in rates])
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 16, dropout=x) for x in rates)
        self.register_buffer("mask", torch.empty(5, 5).fill_(-torch.inf).triu_(1), persistent=False)
        self.turns = torch.polar(torch.ones(5, 4), torch.arange(20.0).view(5, 4))
        for block in self.blocks:
            nn.init.normal_(block.linear1.weight, generator=torch.Generator().manual_seed(1))


class Loads(nn.Module):
    """Copies values into its weights, freezes them, and changes its dtype and device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)
        self.first.load_state_dict(nn.Linear(3, 3).state_dict())
        self.norm.load_state_dict({"weight": torch.ones(3), "bias": torch.ones(3)}, assign=True)
        self.first.weight.data.copy_(torch.eye(3))
        self.norm.weight.data[0] = 2.0
        self.first.requires_grad_(False)
        self.to("cpu").to(torch.bfloat16).to(device="cpu", dtype=torch.float16).cpu()


class OldStyle(nn.Module):
    """Uninitialised tensors by their class, a number drawn while building, a weight in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.Tensor(3, 3))
        nn.init.orthogonal_(self.weight)
        self.wide = torch.rand(1).item() < 2.0
        self.extra = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64), requires_grad=False)


class MixesLarge(nn.Module):
    """Computes with a large random and a small real tensor, which only works if both are on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 300) * torch.linspace(0, 1, 300))
        self.norm = nn.BatchNorm1d(300)
        self.register_buffer("places", torch.arange(300))
        self.register_buffer("angles", torch.linspace(0, 1, 300))


BUILDERS = {
    "a convolutional net": ConvNet,
    "tied weights": Tied,
    "stochastic depth": Vision,
    "loaded weights": Loads,
    "old style": OldStyle,
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
    "recurrent": lambda: nn.LSTM(4, 8, 2),
    "copies of a layer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "half": lambda: nn.Linear(3, 3).half(),
    "all on meta": MixesLarge,
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_fake_parameters_keep_attributes(build: Callable[[], nn.Module]) -> None:
    with warnings.catch_warnings(action="ignore"):
        lazy, real = lazily(build), build()
    assert description(lazy) == description(real)
    assert all(isinstance(x, FakeTensor) and isinstance(x, nn.Parameter) for x in lazy.parameters())
    assert {x.device.type for x in lazy.parameters()} == {"cpu"}
    assert len(list(lazy.parameters())) == len(list(real.parameters()))


@pytest.mark.parametrize("build", [ConvNet, Vision], ids=["batch norm", "masks"])
def test_buffers_keep_the_values_that_the_code_computed(build: Callable[[], nn.Module]) -> None:
    lazy, real = lazily(build), build()
    assert all(torch.equal(a, b) for a, b in zip(lazy.buffers(), real.buffers(), strict=True))
    assert "turns" not in vars(real) or torch.equal(lazy.turns, real.turns)


def test_tied_parameters_stay_one() -> None:
    lazy = lazily(Tied)
    assert lazy.head.weight is lazy.embedding.weight


def test_all_fakes_are_of_one_mode_under_which_the_model_runs() -> None:
    lazy = lazily(Tied)
    mode = fake_mode_of(lazy)
    assert mode is not None
    with mode:
        assert lazy(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 11)


def test_a_real_model_has_no_fake_mode_and_stays_as_it_is() -> None:
    real = Tied()
    before = list(real.parameters())
    assert to_fake_tensors(real) == ()
    assert all(a is b for a, b in zip(before, real.parameters(), strict=True))
    assert fake_mode_of(real) is None


def test_meta_model_becomes_fake() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    assert to_fake_tensors(model) == ()
    assert all(isinstance(x, FakeTensor) for x in model.parameters())
    assert torch.equal(model[1].running_var, torch.ones(3))
    before = list(model.parameters())
    assert to_fake_tensors(model) == () and next(model.parameters()) is before[0]


def test_buffers_whose_values_are_lost_are_named_and_finite() -> None:
    model = build_without_weights(MixesLarge, what="the model")
    assert to_fake_tensors(model) == ("places", "angles")
    assert torch.equal(model.places, torch.zeros(300, dtype=torch.int64))
    assert torch.equal(model.angles, torch.ones(300))
    assert torch.equal(model.norm.running_var, torch.ones(300))


def test_a_note_says_what_was_lost_and_how_much_more() -> None:
    assert lost_values_note(()) == ()
    (note,) = lost_values_note(["a", "b", "c", "d", "e"])
    assert note.endswith("ones or zeros where its code computed a, b, c and 2 more")


def test_a_parameter_that_is_a_huge_constant_takes_no_memory() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.register_parameter("bank", nn.Parameter(torch.zeros(2**20, 2**20)))  # 4 TiB
        model.register_buffer("queue", torch.zeros(2**20, 2**20))
        return model

    lazy = lazily(build)
    assert lazy.bank.shape == lazy.queue.shape == (2**20, 2**20)
    assert isinstance(lazy.queue, FakeTensor)


def test_reading_weights_during_build_is_refused() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.scale = self.layer.weight.std().item()

    with pytest.raises(ModelError, match=r"tiny cannot be built without its weights: .*test_lazy_build.py, line \d+"):
        build_without_weights(Reads, what="tiny")


def test_build_without_weights_restores_state() -> None:
    def build() -> nn.Module:
        torch.manual_seed(5), random.random(), numpy.random.random()
        return nn.Linear(3, 3)

    def draws() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), numpy.random.random()

    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    expected = draws()
    torch.set_rng_state(states[0]), random.setstate(states[1]), numpy.random.set_state(states[2])
    lazily(build)
    assert draws() == expected
    assert not nn.Linear(2, 2).weight.is_meta


def test_attributes_of_parameters_are_kept() -> None:
    def build() -> nn.Module:
        model = Branching()
        model.layer.weight.no_weight_decay = True
        return model

    weight: Tensor = lazily(build).layer.weight
    assert weight.no_weight_decay  # type: ignore[attr-defined]
