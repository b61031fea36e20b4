"""Constants keep their values during a trace, and nothing else does."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gplan.core.errors import ModelError
from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import Chain
from gplan_profiler.capture.known_values import MOST_NUMBERS

ROWS = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


torch.library.define("gplan_test::write", "(Tensor(a!) target, Tensor source) -> ()")


@torch.library.impl("gplan_test::write", "CompositeExplicitAutograd")  # also for fake tensors
def write(target: Tensor, source: Tensor) -> None:
    """Nothing that is counted."""


class Decides(nn.Module):
    """Multiplies by a number that a function finds for its input."""

    def __init__(self, number: Callable[[Decides, Tensor], float]) -> None:
        super().__init__()
        self.first, self.last, self.number = nn.Linear(4, 4), nn.Linear(4, 4), number
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.number(self, x))


def captured(number: Callable[[Decides, Tensor], float]) -> Chain:
    """The chain of a model that decides by a function of itself and its input; it gives what the model gives."""
    torch.manual_seed(0)
    model = Decides(number)
    chain = capture(model, ROWS)
    state = torch.random.get_rng_state()
    expected = model(ROWS)
    torch.random.set_rng_state(state)
    assert torch.equal(chain.stage(0, len(chain))(ROWS)[0], expected)
    return chain


def choose(condition: Any) -> float:
    return 2.0 if condition else 3.0


def written(change: Callable[[Tensor], object]) -> Tensor:
    """A constant after a function was called on it."""
    made = torch.zeros(4)
    change(made)
    return made


KNOWN: dict[str, Callable[[Decides, Tensor], float]] = {
    "if": lambda _, x: choose((torch.arange(4) - 3 == 0).any()),
    "item": lambda _, x: torch.full((2,), 1.5).sum().item(),
    "tolist": lambda _, x: torch.tensor([[1.0, 5.0]]).tolist()[0][1],
    "int": lambda _, x: int(torch.linspace(0, 8, 5)[3]),
    "range": lambda _, x: len(range(torch.tensor(3))),
    "float": lambda _, x: float(torch.eye(3).sum()),
    "equal": lambda _, x: choose(torch.equal(torch.ones(2), torch.ones(2))),
    "contains": lambda _, x: choose(5 in torch.arange(4)),
    "of an input's shape": lambda _, x: choose(torch.ones_like(x).sum() == x.numel()),
    "of an input's dtype": lambda _, x: x.new_full((2,), 4.0).sum().item(),
    "of other constants": lambda _, x: torch.cat([torch.arange(3), torch.zeros(2).long()]).diff().sum().item(),
    "of several results": lambda _, x: torch.tensor([3.0, 7.0]).max(0).values.item(),
    "written": lambda _, x: written(lambda y: y.add_(2.5)).sum().item(),
    "written at an index": lambda _, x: written(lambda y: y.__setitem__(slice(1, None), 2.0)).sum().item(),
    "written as out": lambda _, x: written(lambda y: torch.add(torch.ones(4), 1.0, out=y)).sum().item(),
    "without gradient": torch.no_grad()(lambda _, x: torch.arange(4).sum().item()),
}


@pytest.mark.parametrize("number", KNOWN.values(), ids=KNOWN)
def test_decisions_by_constants_fall_as_in_a_run(number: Callable[[Decides, Tensor], float]) -> None:
    captured(number)


def by_vmap(model: Decides, x: Tensor) -> float:
    return choose(torch.vmap(lambda row: row + torch.arange(4))(torch.zeros(2, 4)).sum() > 0)


def through(way: Callable[[Tensor], Tensor]) -> Callable[[Decides, Tensor], float]:
    """Writes the input into a constant by a way that leads to its memory, and decides by the constant."""

    def number(model: Decides, x: Tensor) -> float:
        made = torch.zeros(4)
        way(made).copy_(x[0])
        return choose(made.sum() > 0)

    return number


def into_a_base(model: Decides, x: Tensor) -> float:
    made = torch.zeros(4)
    view = made[1:]
    made.copy_(x[0])
    return choose(view.sum() > 0)


def into_statistics(model: Decides, x: Tensor) -> float:
    mean, var = torch.zeros(4), torch.ones(4)
    F.batch_norm(x, mean, var, training=True)
    return choose(mean.sum() > 0)


def written_by(write: Callable[[Tensor, Tensor], object]) -> Callable[[Decides, Tensor], float]:
    """Decides by a constant that is given to a function together with the input."""
    return lambda _, x: choose(written(lambda made: write(made, x[0])).sum() > 0)


UNKNOWN: dict[str, Callable[[Decides, Tensor], float]] = {
    "an input": lambda _, x: choose(x.sum() > 0),
    "a parameter": lambda model, x: choose(model.first.bias.sum() > 0),
    "a buffer": lambda model, x: choose(model.mean.sum() > 0),
    "an input and a constant": lambda _, x: choose((torch.arange(4) + x).sum() > 0),
    "a choice of constants": lambda _, x: choose(torch.where(x > 0, torch.ones(4), torch.zeros(4)).sum() > 0),
    "an input among constants": lambda _, x: choose(torch.stack([x[0, 0], torch.ones(())]).sum() > 0),
    "random numbers": lambda _, x: choose(torch.rand(4).sum() > 0),
    "random positions": lambda _, x: choose(torch.randperm(4)[0] > 1),
    "dropped numbers": lambda _, x: choose(F.dropout(torch.ones(4)).sum() > 2),
    "drawn numbers": lambda _, x: choose(written(lambda y: y.uniform_()).sum() > 2),
    "uninitialised memory": lambda _, x: choose(torch.empty(4).sum() > 0),
    "uninitialised memory like a constant": lambda _, x: choose(torch.empty_like(torch.ones(4)).sum() > 0),
    "too many numbers": lambda _, x: choose(torch.zeros(MOST_NUMBERS + 1).sum() > 0),
    "under vmap": by_vmap,
    "written": through(lambda made: made),
    "written without gradient": torch.no_grad()(through(lambda made: made)),
    "written through a view": through(lambda made: made.view(2, 2).flatten()),
    "written through a view that is unknown": through(lambda made: made.view_as(ROWS[0])),
    "written through its data": through(lambda made: made.data),
    "written through its view's data": through(lambda made: made[:].data),
    "written through the data of a view that is unknown": through(lambda made: made.view_as(ROWS[0]).data),
    "written detached": through(lambda made: made.detach()),
    "written through its memory": through(lambda made: torch.empty(0).set_(made)),
    "written before it was viewed": into_a_base,
    "written by batch norm": into_statistics,
    "written at an index": written_by(lambda made, x: made.__setitem__(0, x[0])),
    "written at an index from an input": written_by(lambda made, x: made.__setitem__(x > 0, 1.0)),
    "written as out": written_by(lambda made, x: torch.add(x, 1.0, out=made)),
    "written among several": written_by(lambda made, x: torch._foreach_add_([made], [x])),
    "given other data": written_by(lambda made, x: setattr(made, "data", x)),
    "set": written_by(lambda made, x: made.set_(x)),
    "written under vmap": written_by(lambda made, x: torch.vmap(lambda y, z: y.copy_(z))(made, x)),
    "written under vmap from outside": written_by(lambda made, x: torch.vmap(lambda _: made.add_(1.0))(x)),
    "written as a parameter": through(lambda made: nn.Parameter(made, requires_grad=False)),
    "renormed": written_by(
        lambda made, x: F.embedding(x.long() % 2, made.view(2, 2), max_norm=0.5).sum() + made.add_(x)
    ),
    "written by an operator": written_by(lambda made, x: torch.ops.aten.add_(made, x)),
    "written by an operator of a library": written_by(lambda made, x: torch.ops.gplan_test.write(made, x)),
    "resize_inputs": written_by(lambda made, x: made.resize_(6)),
}


@pytest.mark.parametrize("number", UNKNOWN.values(), ids=UNKNOWN)
def test_decisions_by_anything_else_are_no_constants(number: Callable[[Decides, Tensor], float]) -> None:
    """Nothing is known of them but for one batch, and of some not even that."""
    model = Decides(number)
    model(ROWS)
    try:
        assert capture(model, ROWS).traced.endswith("along the path of one batch")
    except ModelError as error:
        assert re.search(r"test_known_values\.py, line .* data-dependent", str(error))


@pytest.mark.parametrize("kind", ["random numbers", "random positions", "dropped numbers", "drawn numbers"])
def test_random_decisions_are_refused(kind: str) -> None:
    with pytest.raises(ModelError, match=r"test_known_values\.py, line .* data-dependent"):
        capture(Decides(UNKNOWN[kind]), ROWS)


def test_computing_values_draws_no_random_numbers() -> None:
    model = Decides(lambda _, x: choose(torch.ones(4).bernoulli().sum() > 2))
    state = torch.random.get_rng_state()
    with pytest.raises(ModelError, match="data-dependent"):
        capture(model, ROWS)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_causal_mask_is_recognised() -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(4, 2, 8, 0.0), 2, enable_nested_tensor=False
            )

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(len(x)))
            return made

    model, rows = Causal(), ROWS[:, None]
    chain = capture(model, rows)
    assert all(len(chain.specs(boundary)) == 1 for boundary in range(len(chain) + 1))
    torch.testing.assert_close(chain.stage(0, len(chain))(rows)[0], model(rows))


class Repeated(nn.Module):
    """A layer, then blocks that are alike, each called with a constant of its own."""

    def __init__(self, number: Callable[[Decides, Tensor], float]) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(Numbered(number) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, block in enumerate(self.blocks):
            x = block(x, torch.full((2,), place))
        return x


class Numbered(nn.Module):
    def __init__(self, number: Callable[[Tensor, Tensor], float]) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), number

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        return self.linear(x) * self.number(x, place)


def by_its_place(x: Tensor, place: Tensor) -> float:
    return 1.0 + (place + torch.ones(2)).sum().item()


def by_its_own(x: Tensor, place: Tensor) -> float:
    return 1.0 + torch.arange(x.shape[1]).sum().item()


@pytest.mark.parametrize("number", [by_its_place, by_its_own])
def test_blocks_that_are_called_with_constants(number: Any) -> None:
    torch.manual_seed(0)
    model = Repeated(number)
    chain = capture(model, ROWS)
    assert torch.equal(chain.stage(0, len(chain))(ROWS)[0], model(ROWS))


def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the module of transformers that says which tensors are fake."""
    made: Any = types.ModuleType("transformers.utils.import_utils")
    made.is_fake_tensor = lambda x: isinstance(x, torch._subclasses.FakeTensor)
    monkeypatch.setitem(sys.modules, "transformers.utils.import_utils", made)
    return made


def test_constants_are_not_fake_for_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = library(monkeypatch)
    plain, said = module.is_fake_tensor, []

    def ask(model: Decides, x: Tensor) -> float:
        said.append([module.is_fake_tensor(y) for y in (x, torch.ones(2), torch.rand(2), 3)])
        return 1.0

    capture(Decides(ask), ROWS)
    assert said[0] == [True, False, True, False]  # the trace; then the plain run that it is compared with
    assert module.is_fake_tensor is plain


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with every attempt to trace a model."""
    made, plain = [], torch.export.export

    def export(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", export)
    return made


def test_batch_on_another_path_is_refused_with_the_line() -> None:
    def number(model: Decides, x: Tensor) -> float:
        first = choose(torch.ones(2).sum() > 1)
        return first if x.sum() > 0 else int(x.sum() > -100)

    chain = capture(model := Decides(number), -ROWS.abs())
    stage, other = chain.stage(0, len(chain)), -2 * ROWS.abs()
    assert "control flow depends on values" in chain.notes[0] and torch.equal(stage(other)[0], model(other))
    for batch, line in ((ROWS.abs(), "return first if"), (-100 * ROWS.abs(), "int(x.sum() > -100)")):
        with pytest.raises(ModelError, match=rf"test_known_values\.py, line .*{re.escape(line)}.* use torch\.where"):
            stage(batch)


def test_decisions_by_floating_point_numbers_are_refused() -> None:
    """No assertion of the graph could check them at other batches."""
    for ask in (Tensor.item, float):
        with pytest.raises(ModelError, match=r"test_known_values\.py, line .*"):
            capture(Decides(lambda _, x, ask=ask: 1.0 if ask(x.abs().max()) > 100 else 2.0), ROWS)


def test_a_model_that_asks_no_constant_is_traced_once(exports: list[object]) -> None:
    capture(Decides(lambda _, x: torch.arange(3).shape[0]), ROWS)
    assert len(exports) == 1
    capture(Decides(UNKNOWN["an input and a constant"]), ROWS)
    assert len(exports) == 4  # each further way once


class Checking(nn.Module):
    """Checks the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x is None or x.max() >= 1000.0:
            raise ValueError("too large")
        assert x.min() > -1000.0
        made: Tensor = self.last(self.first(x))
        return made


def test_checks_of_values_are_made_in_training() -> None:
    x = torch.ones(2, 4)
    chain = capture(model := Checking(), x)
    stage = chain.stage(0, len(chain))
    assert len(chain) == 2 and chain.notes == () and torch.equal(stage(x)[0], model(x))
    for wrong in (2000.0, -2000.0):
        with pytest.raises(
            ModelError, match=r"a check of the model fails for this batch: .*test_known_values\.py, line \d+"
        ):
            stage(wrong * x)
