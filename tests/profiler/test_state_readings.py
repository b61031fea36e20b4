"""A weight that several layers read through a cast, a view or by elements is shared, not sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gplan.core import Granularity
from gplan_profiler.capture.capture import capture
from tests.profiler.training import assert_trained_alike, gradients, total, train_in_stages

WIDTH, VOCAB = 8, 97
TOKENS = torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(1))
READINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "to its own dtype": lambda w: w.to(torch.float32),
    "float": lambda w: w.float(),
    "type_as": lambda w: w.type_as(torch.ones(1)),
    "to its own device": lambda w: w.to("cpu"),
    "to the dtype of another": lambda w: w.to(torch.ones(1)),
    "contiguous": lambda w: w.contiguous(),
    "view": lambda w: w.view(-1, WIDTH),
    "expand": lambda w: w.unsqueeze(0).expand(1, -1, -1)[0],
    "dropout of nothing": lambda w: F.dropout(w, 0.0),
    "to another dtype": lambda w: w.to(torch.bfloat16),
    "twice": lambda w: w.to(torch.bfloat16).float(),
    "scaled": lambda w: w * 0.5,
    "halves": lambda w: torch.cat(w.chunk(2)),
}


class TiedThrough(nn.Module):
    """A language model whose embedding is the head, read through a function."""

    reading: Callable[[Tensor], Tensor]

    def __init__(
        self, reading: Callable[[Tensor], Tensor], *, reads_once: bool = False, autocast: bool = False
    ) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(2)))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.reading, self.reads_once, self.autocast = reading, reads_once, autocast

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=self.autocast):
            weight = self.reading(self.table)
            x = F.embedding(ids, weight).float()
            for block in self.blocks:
                x = torch.tanh(block(x)).float()
            again = weight if self.reads_once else self.reading(self.table)
            return F.linear(self.norm(x).to(again.dtype), again).float()


def assert_shared(model: nn.Module, inputs: Tensor, name: str, layers: int, granularity: Granularity = "layer") -> None:
    """A number of layers read the weight `name`; only activations cross, and gradients are those of the plain model."""
    torch.manual_seed(0)
    total(model(inputs)).backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    chain = capture(model, inputs, granularity=granularity)
    assert sum(name in chain.state(layer) for layer in range(len(chain))) == layers
    size = dict(model.named_parameters())[name].numel()
    inner = range(1, len(chain))
    assert all(x.shape[0] == len(inputs) for cut in inner for x in chain.specs(cut)), "a weight crosses"
    assert all(torch.Size(x.shape).numel() != size for cut in inner for x in chain.specs(cut))
    train_in_stages(chain, list(inner), (inputs,))
    assert_trained_alike(gradients(model), expected)


@pytest.mark.parametrize("granularity", ["layer", "op"])
@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS.keys())
def test_reading_of_a_tied_weight_is_shared(reading: Callable[[Tensor], Tensor], granularity: Granularity) -> None:
    assert_shared(TiedThrough(reading), TOKENS, "table", 2, granularity)


@pytest.mark.parametrize("granularity", ["layer", "op"])
def test_one_cast_that_two_layers_read(granularity: Granularity) -> None:
    assert_shared(TiedThrough(lambda w: w.double(), reads_once=True), TOKENS, "table", 2, granularity)


def test_cast_inside_autocast() -> None:
    assert_shared(TiedThrough(READINGS["to its own dtype"], reads_once=True, autocast=True), TOKENS, "table", 2)


def test_cast_of_a_weight_that_every_block_reads() -> None:
    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(WIDTH, WIDTH)
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.shared.weight.to(x.dtype)
            for norm in self.norms:
                x = x + F.linear(norm(x), weight, self.shared.bias.type_as(x))
            return x

    assert_shared(Looped(), torch.randn(4, WIDTH), "shared.weight", 4)


def test_readings_of_one_layer_run_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight.to(torch.bfloat16)
            return F.linear(x.bfloat16(), weight) + F.linear(x.bfloat16() * 2, weight)

    stage = capture(Twice(), torch.randn(2, WIDTH)).stage(0, 1)
    casts = [
        x for x in stage.graph.nodes if x.op == "call_function" and "to" in str(x.target) and x.args[0].op == "get_attr"
    ]  # type: ignore[union-attr]
    assert len(casts) == 1


def test_reading_of_a_buffer_that_is_written_stays_in_its_place() -> None:
    class Counts(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.register_buffer("count", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            before = self.count * 1.0
            x = self.first(x)
            self.count.add_(1.0)
            return self.second(x) * before

    model, x = Counts(), torch.randn(4, WIDTH)
    chain = capture(model, x)
    found = chain.stage(0, len(chain))(x)[0]
    torch.testing.assert_close(found, model.second(model.first(x)))
