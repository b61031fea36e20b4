"""Sequences cut between their children: errors name the child, and a model without weights needs no memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gplan.core.errors import ModelError
from profiler.capture.sequence import SequentialChain
from profiler.model.lazy_build import build_without_weights, to_fake_tensors
from tests.profiler.models import Branching


class Counted(nn.Module):
    """Counts, over all of them, how often one is called; writes into its input where it is told to."""

    num_calls = 0

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.writes, self.norm = writes, nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> dict[str, Tensor] | Tensor:
        type(self).num_calls += 1
        return self.norm(x.add_(1.0) if self.writes else x)


class Unpacked(nn.Module):
    """A tensor to a dict, with a count that no gradient flows through."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x * 2.0, "count": torch.ones(x.shape[0], dtype=torch.int64)}


class Packed(nn.Module):
    """A dict to its tensor."""

    def forward(self, value: dict[str, Tensor]) -> Tensor:
        return value["x"] + value["count"].unsqueeze(1)


def lazily(build: Callable[[], nn.Module]) -> nn.Sequential:
    model = build_without_weights(build, what="the model")
    to_fake_tensors(model)
    assert isinstance(model, nn.Sequential)
    return model


def mixed() -> nn.Sequential:
    layers = [nn.Linear(4, 4), Unpacked(), Packed(), Counted(), nn.ReLU(inplace=True), Counted(writes=True)]
    return nn.Sequential(*layers, nn.Linear(4, 2))


def test_a_model_without_weights_is_traced_to_the_same_boundaries() -> None:
    lazy, real = (SequentialChain(model, torch.randn(3, 4)) for model in (lazily(mixed), mixed()))
    assert [lazy.specs(i) for i in range(len(lazy) + 1)] == [real.specs(i) for i in range(len(real) + 1)]
    assert lazy._forms == real._forms
    for chain in (lazy, real):
        assert [call.writes for call in chain._calls] == [False, False, False, False, True, True, False]


def test_tracing_leaves_the_statistics_as_they_were() -> None:
    model = lazily(mixed)
    SequentialChain(model, torch.randn(3, 4))
    assert int(model[3].norm.num_batches_tracked) == 0
    assert torch.equal(model[3].norm.running_mean, torch.zeros(4))


def test_children_that_are_alike_are_traced_once() -> None:
    model = lazily(lambda: nn.Sequential(*(Counted() for _ in range(50)), Counted(writes=True)))
    Counted.num_calls = 0
    chain = SequentialChain(model, torch.randn(3, 4))
    assert len(chain) == 51
    assert Counted.num_calls == 3  # the first input wants no gradient, all others do; and the one that writes


def test_a_child_that_decides_by_values_is_named_with_its_line_and_the_remedy() -> None:
    model = lazily(lambda: nn.Sequential(nn.Linear(4, 4), Branching()))
    with pytest.raises(
        ModelError, match=r"1 \(Branching\) depends on the values.*models.py, line \d+: if x.sum.*torch.where"
    ):
        SequentialChain(model, torch.randn(3, 4))


@pytest.mark.parametrize("build", [lazily, lambda build: build()], ids=["lazy", "real"])
def test_an_error_in_a_child_names_it_and_what_it_was_given(build: Callable[..., nn.Sequential]) -> None:
    with pytest.raises(ModelError, match=r"1 \(Linear\) fails on inputs of shape \(3, 5\): RuntimeError"):
        SequentialChain(build(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(4, 5))), torch.randn(3, 4))


def test_a_child_that_gives_something_else_than_tensors_and_constants_is_named() -> None:
    class Says(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, object]:
            return x, object()

    with pytest.raises(ModelError, match=r"the output of 1 \(Says\) holds a object"):
        SequentialChain(nn.Sequential(nn.Linear(4, 4), Says()), torch.randn(3, 4))


def test_an_empty_sequence_is_told_so() -> None:
    with pytest.raises(ModelError, match="an empty Sequential: there is no layer to measure or to cut"):
        SequentialChain(nn.Sequential(), torch.ones(2, 4))
