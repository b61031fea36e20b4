"""A part of a model equals the plain build bit by bit, within its memory."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Collection

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.utils import parametrizations

from gplan.core.errors import ModelError
from profiler.model.load import open_model_file
from profiler.model.partial_build import build_part
from tests.example_files import EXAMPLES, NEEDS_TRANSFORMERS, SMALL, apply, every_runnable, load
from tests.profiler.models import Branching, ConvNet, Tied

Build = Callable[[], nn.Module]


def plainly(build: Build, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def part_of(build: Build, keep: Collection[str], seed: int = 3) -> nn.Module:
    return build_part(build, keep=keep, seed=seed, what="tiny")


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def names_of(build: Build) -> list[str]:
    return list(parameters(plainly(build)))


def ties(model: nn.Module) -> list[int]:
    """For every name the position of the first name of the same parameter."""
    found = parameters(model).values()
    return [[id(x) for x in found].index(id(x)) for x in found]


def assert_is_part(part: nn.Module, plain: nn.Module, keep: Collection[str]) -> None:
    """Kept ones have the plain values, others none; shapes, strides, dtypes, gradients,
    ties and buffers are the plain ones."""
    expected, found = parameters(plain), parameters(part)
    kept = {id(expected[name]) for name in keep}
    assert list(found) == list(expected) and ties(part) == ties(plain)
    for name, one in found.items():
        other = expected[name]
        assert one.is_meta == (id(other) not in kept), name
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype), name
        assert one.requires_grad == other.requires_grad and isinstance(one, nn.Parameter), name
        assert one.is_meta or torch.equal(one, other), name
    buffers, expected_buffers = dict(part.named_buffers()), dict(plain.named_buffers())
    assert list(buffers) == list(expected_buffers)
    assert all(torch.equal(x, expected_buffers[name]) for name, x in buffers.items())


class Perceptron(nn.Module):
    """Three linear layers, and whatever a test does to them."""

    def __init__(self, change: Callable[[nn.Module], object] = lambda model: None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.table = nn.Embedding(9, 6, padding_idx=2)
        change(self)


def each_linear(change: Callable[[nn.Linear], object]) -> Build:
    """Builds a perceptron and then changes one layer after the other, as an author's apply(init_weights) does."""
    return lambda: Perceptron(lambda model: [change(x) for x in model.modules() if isinstance(x, nn.Linear)])


@torch.no_grad()
def fills_rows_and_columns(layer: nn.Linear) -> None:
    layer.weight[:, :3].normal_()
    layer.weight[:3].uniform_()
    layer.weight[4].bernoulli_(0.5)
    layer.weight.t()[1:].exponential_()


@torch.no_grad()
def initialises_like_transformers(model: nn.Module) -> None:
    for layer in reversed(list(model.modules())):
        if isinstance(layer, nn.Linear | nn.Embedding):
            layer.weight.normal_(0.0, 0.02)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            layer.bias.zero_()
        if isinstance(layer, nn.Embedding):
            layer.weight[layer.padding_idx].zero_()


def draws_by_numpy(layer: nn.Linear) -> None:
    layer.weight.data.copy_(torch.from_numpy(numpy.random.standard_normal((6, 6))))
    layer.bias.data = torch.tensor([random.gauss() for _ in range(6)])


class Arithmetic(nn.Module):
    """Parameters that are computed, old-style, in lists and dicts; buffers that ask parameters for shape and device."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(4, 5) * 0.02 + 1.0)
        self.cut = nn.Parameter(torch.rand(12, 5)[2:7])
        self.old = nn.Parameter(torch.Tensor(5, 5))
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))])
        self.named = nn.ParameterDict({"a": torch.rand(2), "b": nn.Parameter(torch.rand(2), requires_grad=False)})
        self.register_buffer("places", torch.arange(4, device=self.token.device))
        self.register_buffer("mean", torch.zeros_like(self.token))
        self.register_buffer("noise", torch.randn_like(self.token))
        init.orthogonal_(self.old)
        self.last = nn.Linear(5, 5, dtype=torch.bfloat16)


def shared_head() -> nn.Module:
    model = Perceptron()
    model.head = nn.Linear(6, 9, bias=False)
    initialises_like_transformers(model)
    model.head.weight = model.table.weight
    return model


def held_elsewhere() -> nn.Module:
    """A tensor that the code holds on to changes with the parameter, however many others are written in between."""
    model = nn.Module()
    held = torch.zeros(6, 6)
    model.first, model.second = nn.Parameter(held), nn.Linear(6, 6)
    init.normal_(model.first)
    init.normal_(model.second.weight)
    init.uniform_(model.first)
    model.third = nn.Parameter(held * 2)
    return model


def student_and_teacher() -> nn.Module:
    student = Perceptron()
    return nn.ModuleList([student, copy.deepcopy(student).requires_grad_(False), nn.Linear(3, 3)])


def from_a_state() -> nn.Module:
    model, other = Perceptron(), Perceptron(initialises_like_transformers)
    model.load_state_dict(other.state_dict())
    model.layers[0].load_state_dict(nn.Linear(6, 6).state_dict(), assign=True)
    return model


BUILDERS: dict[str, Build] = {
    "plain modules": Perceptron,
    "batch norm": ConvNet,
    "tied": Tied,
    "initialised after it is built": lambda: Perceptron(initialises_like_transformers),
    "orthogonal": each_linear(lambda layer: init.orthogonal_(layer.weight, gain=2.0)),
    "truncated": each_linear(lambda layer: init.trunc_normal_(layer.weight, std=0.5, a=-0.3, b=0.7)),
    "truncated at one end": each_linear(lambda layer: init.trunc_normal_(layer.weight, a=1.5, b=9.0)),
    "sparse": each_linear(lambda layer: init.sparse_(layer.weight, 0.3)),
    "identity": each_linear(lambda layer: init.eye_(layer.weight)),
    "a generator": each_linear(lambda layer: init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))),
    "rows and columns": each_linear(fills_rows_and_columns),
    "numpy and Python": each_linear(draws_by_numpy),
    "new data": each_linear(lambda layer: setattr(layer.weight, "data", torch.randn(6, 6))),
    "normalised": each_linear(lambda layer: layer.weight.data.normal_().div_(layer.weight.data.norm())),
    "scaled": each_linear(lambda layer: layer.weight.data.mul_(0.5)),
    "arithmetic": Arithmetic,
    "a head that is the embedding": shared_head,
    "held elsewhere": held_elsewhere,
    "student and teacher": student_and_teacher,
    "loaded": from_a_state,
    "half": lambda: Perceptron(initialises_like_transformers).half().to("cpu").to(device="cpu", dtype=torch.float64),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
    "recurrent": lambda: nn.LSTM(4, 8, 2),
    "copies of a layer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "weight norm": lambda: nn.Sequential(*(parametrizations.weight_norm(nn.Linear(3, 3)) for _ in range(3))),
}


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_part_equals_plain_build(build: Build, share: float) -> None:
    names = names_of(build)
    keep = random.Random(str(names)).sample(names, round(share * len(names)))
    states = random.getstate(), numpy.random.get_state()
    plain = plainly(build)
    expected = torch.rand(3), random.random(), numpy.random.random()
    random.setstate(states[0]), numpy.random.set_state(states[1])
    with warnings.catch_warnings(action="error", category=UserWarning):
        warnings.filterwarnings("ignore", message="enable_nested_tensor")
        part = part_of(build, keep)
    assert torch.equal(torch.rand(3), expected[0]) and (random.random(), numpy.random.random()) == expected[1:]
    assert_is_part(part, plain, keep)


@every_runnable
@pytest.mark.parametrize("seed", [1, 2])
def test_examples_in_part(name: str, seed: int) -> None:
    example = load(name)

    def build() -> nn.Module:
        return apply(example.model, **SMALL[name])

    plain = plainly(build, seed)
    keep = random.Random(seed).sample(list(parameters(plain)), len(parameters(plain)) // 2)
    assert_is_part(part_of(build, keep, seed), plain, keep)


@NEEDS_TRANSFORMERS
def test_a_vision_transformer_is_built_in_part() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}

    def build() -> nn.Module:
        return ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8))

    keep = random.Random(0).sample(names_of(build), 20)
    assert_is_part(part_of(build, keep), plainly(build), keep)


def test_an_opened_file_gives_the_part_that_it_would_load() -> None:
    opened = open_model_file(
        str(EXAMPLES / "transformer_lm.py"), settings={"num_blocks": 2, "width": 16, "num_heads": 2}
    )
    plain = opened.load(seed=5).model
    keep = list(parameters(plain))[3:9]
    assert_is_part(opened.load_part(seed=5, keep=keep), plain, keep)


def test_replaced_tied_head_takes_no_memory() -> None:
    texts = []

    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(3, 3))
        texts.append(repr(model[1].weight))
        model[1].weight = model[0].weight
        return model

    part_of(build, ["1.weight"])
    assert "device='meta'" in texts[1]


def test_attributes_of_parameters_are_kept() -> None:
    def build() -> nn.Module:
        model = Branching()
        model.layer.weight.no_weight_decay = True
        return model

    assert part_of(build, ["layer.bias"]).layer.weight.no_weight_decay


def test_a_value_that_is_still_there_may_be_read() -> None:
    class Reads(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))
            self.layers[0].weight.data.normal_()
            self.scale.data = self.layers[0].weight.data.norm(dim=1)

    keep = ["scale", "layers.1.bias"]
    assert_is_part(part_of(Reads, keep), plainly(Reads), keep)


def swallows(layer: nn.Module) -> None:
    try:
        layer.scale = layer.weight.sum().item()
    except Exception:
        layer.scale = 1.0


def copies_from_the_first(model: nn.Module) -> None:
    model.layers[2].weight.data.copy_(model.layers[0].weight.data)


@torch.no_grad()
def copies_from_a_product(model: nn.Module) -> None:
    first, second, third = (layer.weight for layer in model.layers)
    third.copy_(second.normal_().mul_(first))


def computes_a_buffer(model: nn.Module) -> None:
    model.register_buffer("mean", model.layers[0].weight.detach().mean(0))


def draws_by_values(model: nn.Module) -> None:
    torch.poisson(model.layers[0].weight.detach().abs())


def draws_on_another_device(model: nn.Module) -> None:
    init.normal_(model.layers[0].to("cuda").weight)


def has_a_part_on_meta(model: nn.Module) -> None:
    model.extra = nn.Linear(3, 3, device="meta")


REFUSED = {
    "swallows": (lambda model: swallows(model.layers[0]), "its code reads parameters that are not kept"),
    "copies": (copies_from_the_first, "its code computes others from parameters that are not kept"),
    "product": (copies_from_a_product, "its code computes others from parameters that are not kept"),
    "data": (
        lambda model: setattr(model.layers[2].weight, "data", model.layers[0].weight.data),
        "its code computes others from parameters that are not kept",
    ),
    "parameter": (
        lambda model: setattr(model.layers[2], "weight", nn.Parameter(model.layers[0].weight.detach() * 2)),
        "its code computes layers.2.weight from parameters that are not kept",
    ),
    "buffer": (computes_a_buffer, "its code computes mean from parameters that are not kept"),
    "draws": (draws_by_values, "draws random numbers that depend on parameters that are not kept"),
    "device": (draws_on_another_device, "draws random numbers on cuda for parameters that are not kept"),
    "meta": (has_a_part_on_meta, "creates tensors on the meta device"),
    "fails": (lambda model: 1 / 0, "ZeroDivisionError"),
}


@pytest.mark.parametrize(("change", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_values_of_dropped_parameters_are_refused(change: Callable[[nn.Module], object], told: str) -> None:
    def build() -> nn.Module:
        random.random(), numpy.random.random()
        return Perceptron(change)

    states = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    with pytest.raises(ModelError, match=f"tiny cannot be built .*{told}"):
        part_of(build, ["layers.2.weight"])
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
    assert numpy.random.get_state()[1].tolist() == states[2]


def test_nondeterministic_build_is_refused() -> None:
    widths = iter(range(2, 9))
    with pytest.raises(ModelError, match=r"creates Linear.weight \(3, 3\) where.* it created Linear.weight \(2, 2\)"):
        part_of(lambda: nn.Linear(width := next(widths), width), ["weight"])


def test_existing_model_is_refused() -> None:
    there = nn.Linear(3, 3)
    with pytest.raises(ModelError, match="it exists before it is built"):
        part_of(lambda: there, ["bias"])
    assert not there.weight.is_meta


def test_a_name_that_is_none_is_answered_with_names() -> None:
    with pytest.raises(ModelError, match="tiny has no parameter wieght; expected names such as weight, bias"):
        part_of(lambda: nn.Linear(2, 2), ["wieght"])


def test_afterwards_torch_is_as_before() -> None:
    plain_copy = nn.Parameter.__deepcopy__
    with pytest.raises(ModelError):
        part_of(lambda: Perceptron(draws_by_values), [])
    assert nn.Parameter.__deepcopy__ is plain_copy
    assert not nn.Linear(2, 2).weight.is_meta and torch.empty(1, device="meta").device.type == "meta"


LIMITED = """
import resource, torch
from torch import nn
from profiler.model.partial_build import build_part

def build():
    layers = [nn.Linear(1024, 1024) for _ in range(20)]  # 4 MiB each
    copies = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 8), 24).layers  # 2 MiB each
    for layer in layers[10:]:
        nn.init.normal_(layer.weight)
    nn.init.trunc_normal_(layers[1].weight)
    return nn.Sequential(*layers, *copies).bfloat16()

torch.set_num_threads(1)
build_part(lambda: nn.TransformerEncoderLayer(8, 2), keep=[], seed=0, what="small")  # imports what it needs
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
size = int(status["VmSize"].split()[0]) * 1024

def limit(spare_bytes):
    resource.setrlimit(resource.RLIMIT_AS, (size + spare_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))

limit(36 * 2**20)
part = build_part(build, keep=["0.weight", "19.weight"], seed=0, what="large")
print(sum(x.nbytes for x in part.parameters() if not x.is_meta))
limit(80 * 2**20)
build()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_AS")
def test_memory_of_partial_build() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LIMITED], capture_output=True, text=True)
    assert done.stdout == f"{2 * 2 * 1024**2}\n", done.stderr
    assert "can't allocate memory" in done.stderr
