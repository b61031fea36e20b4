"""Sequences cut between their children: forms, in-place writes and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gplan.core.errors import ModelError
from gplan_profiler.capture.chain import Route, detached, flat_tensors, roots_with_gradients
from gplan_profiler.capture.sequence import SequentialChain
from gplan_profiler.model.lazy_build import build_without_weights, to_fake_tensors
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


def test_fake_model_has_the_same_boundaries() -> None:
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


def test_tracing_leaves_counters_as_they_were() -> None:
    class Counting(nn.Linear):
        num_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            return super().forward(x) * self.num_calls

    model = nn.Sequential(Counting(4, 4), Counting(4, 4))
    chain = SequentialChain(model, torch.randn(3, 4))
    assert [x.num_calls for x in model] == [0, 0]
    assert {x.path for x in chain.assigned} == {"0.num_calls"}
    chain.stage(0, 2)(torch.randn(3, 4))
    assert [x.num_calls for x in model] == [1, 1]


def test_data_dependent_child_is_named_with_line() -> None:
    model = lazily(lambda: nn.Sequential(nn.Linear(4, 4), Branching()))
    with pytest.raises(
        ModelError, match=r"1 \(Branching\) depends on the values.*models.py, line \d+: if x.sum.*torch.where"
    ):
        SequentialChain(model, torch.randn(3, 4))


@pytest.mark.parametrize("build", [lazily, lambda build: build()], ids=["lazy", "real"])
def test_an_error_in_a_child_names_it_and_what_it_was_given(build: Callable[..., nn.Sequential]) -> None:
    with pytest.raises(ModelError, match=r"1 \(Linear\) fails on inputs of shape \(3, 5\): RuntimeError"):
        SequentialChain(build(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(4, 5))), torch.randn(3, 4))


def test_child_output_must_be_tensors_and_constants() -> None:
    class Says(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, object]:
            return x, object()

    with pytest.raises(ModelError, match=r"the output of 1 \(Says\) holds a object"):
        SequentialChain(nn.Sequential(nn.Linear(4, 4), Says()), torch.randn(3, 4))


def test_an_empty_sequence_is_told_so() -> None:
    with pytest.raises(ModelError, match="an empty Sequential: there is no layer to measure or to cut"):
        SequentialChain(nn.Sequential(), torch.ones(2, 4))


class Apply(nn.Module):
    """A function as a child."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


class Pair(NamedTuple):
    x: Tensor
    mask: Tensor | None


@dataclass
class Output:
    x: Tensor
    cache: Any = None
    name: str = "output"


pytree.register_dataclass(Output)


def sequence(*functions: Callable[[Any], Any]) -> nn.Sequential:
    """A linear layer, and then these functions."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *map(Apply, functions))


def gradients(model: nn.Module) -> list[Tensor | None]:
    found = [x.grad for x in model.parameters()]
    model.zero_grad()
    return found


def assert_every_cut_trains_alike(model: nn.Sequential, inputs: Any, total: Callable[[Any], Tensor]) -> None:
    """Cut between every two children, the output and the gradients are those of the model itself."""
    chain = SequentialChain(model, inputs)
    plain = total(model(inputs[0] if isinstance(inputs, tuple) else inputs))
    plain.backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    tensors, passed = flat_tensors(inputs, what="inputs"), []
    for layer in range(len(chain)):
        leaves = detached(tensors)
        tensors = chain.stage(layer, layer + 1)(*leaves)
        passed.append((leaves, tensors))
    found = total(chain.model_output(passed[-1][1]))
    assert torch.equal(found, plain)
    found.backward()  # type: ignore[no-untyped-call]
    for (_, outputs), (leaves, _) in reversed(list(pairwise(passed))):
        roots, grads = roots_with_gradients(outputs, leaves)
        torch.autograd.backward(roots, grads)
    for x, y in zip(gradients(model), expected, strict=True):
        assert x is not None and y is not None
        torch.testing.assert_close(x, y, rtol=0.0, atol=0.0)


ROWS = torch.arange(12.0).reshape(3, 4) / 7

STRUCTURES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a tuple with None": (lambda x: (x, None), lambda v: v[0] if v[1] is None else v),
    "a list of constants": (
        lambda x: [x, True, 2, 0.5, "name", torch.float32, x.shape],
        lambda v: (v[0] * v[2] * v[3]).to(v[5]).reshape(v[6]) if v[1] is True and v[4] == "name" else v,
    ),
    "nested dicts and tuples": (
        lambda x: {"a": (x, {"b": [x * 2.0, None]}), "c": 3},
        lambda v: v["a"][0] + v["a"][1]["b"][0] * v["c"],
    ),
    "a named tuple": (lambda x: Pair(x, None), lambda v: v.x if v.mask is None else v),
    "a dataclass": (lambda x: Output(x, (x * 2.0, None)), lambda v: v.x * v.cache[0] if v.name == "output" else v),
    "integers, booleans and tensors without gradient": (
        lambda x: (x, torch.arange(4), x > 0, x.detach()),
        lambda v: torch.where(v[2], v[0][:, v[1]], v[3] * v[0]),
    ),
    "a tensor twice": (lambda x: (x, [x]), lambda v: v[0] * v[1][0] if v[0] is v[1][0] else v),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_it_passes_between_children(name: str) -> None:
    pack, unpack = STRUCTURES[name]
    assert_every_cut_trains_alike(sequence(pack, unpack, torch.sin), ROWS, torch.sum)
    assert_every_cut_trains_alike(sequence(pack, lambda v: v, unpack), ROWS, torch.sum)


@pytest.mark.parametrize("name", STRUCTURES)
def test_it_may_be_what_the_model_returns(name: str) -> None:
    pack, unpack = STRUCTURES[name]
    assert_every_cut_trains_alike(sequence(torch.tanh, pack), ROWS, lambda v: torch.sum(unpack(v)))


def test_inputs_may_hold_constants_and_a_tensor_twice() -> None:
    model = nn.Sequential(Apply(lambda v: (v["x"] + v["again"]) * v["scale"]), nn.Linear(4, 4))
    assert_every_cut_trains_alike(model, ({"x": ROWS, "mask": None, "again": ROWS, "scale": 2},), torch.sum)
    assert len(SequentialChain(model, ({"x": ROWS, "mask": None, "again": ROWS, "scale": 2},)).specs(0)) == 2


def test_a_tensor_that_stands_twice_crosses_once() -> None:
    chain = SequentialChain(sequence(lambda x: {"x": x, "y": (x, None, x)}, lambda v: v["x"]), ROWS)
    assert len(chain.specs(2)) == 1
    assert len(chain.routes(2)) == 1


def test_a_tensor_that_children_hand_on_is_one_value() -> None:
    def keep(value: Any) -> Any:
        return value[0] * 2, value[1]

    chain = SequentialChain(sequence(lambda x: (x.sin(), x.cos()), keep, keep, lambda v: v[0] + v[1]), ROWS)
    assert [chain.routes(i) for i in range(2, 5)] == [
        (Route(1, (2,)), Route(1, (2, 3, 4))),
        (Route(2, (3,)), Route(1, (2, 3, 4))),
        (Route(3, (4,)), Route(1, (2, 3, 4))),
    ]


@pytest.mark.parametrize(
    "change",
    [lambda v: (v[1], v[0]), lambda v: (v[0].add_(1), v[1]), lambda v: (v[0].view_as(v[0]), v[1].clone())],
    ids=["exchanged", "written into", "views and copies"],
)
def test_a_tensor_that_is_not_handed_on_as_it_is(change: Callable[[Any], Any]) -> None:
    model = sequence(lambda x: (x.sin(), x.cos()), change, lambda v: v[0] - v[1])
    producers = [x.producer for x in SequentialChain(model, ROWS).routes(3)]
    assert producers in ([1, 2], [2, 2])
    assert_every_cut_trains_alike(model, ROWS, torch.sum)


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "another number": (lambda x: (x, 2), lambda x: (x, 3), r"has 3 as value 2 of 2; expected 2,"),
    "True for 1": (lambda x: (x, 1), lambda x: (x, True), r"has True as value 2 of 2; expected 1,"),
    "a tensor for None": (lambda x: (x, None), lambda x: (x, x * 2), r"has a tensor as value 2 of 2; expected None,"),
    "None for a tensor": (lambda x: (x, x * 2), lambda x: (x, None), r"has None as value 2 of 2; expected a tensor,"),
    "one tensor more": (lambda x: (x,), lambda x: (x, x), r"is a tuple of 2 .*; expected a tuple of 1"),
    "a tuple for a tensor": (lambda x: x, lambda x: (x,), r"is a tuple of 1 \(\.\.\.\); expected one value"),
    "another key": (
        lambda x: {"a": x},
        lambda x: {"b": x},
        r"is a dict of 1 \(b: \.\.\.\); expected a dict of 1 \(a: \.\.\.\)",
    ),
    "two tensors for one": (
        lambda x: (x, x),
        lambda x: (x, x * 2),
        r"has another tensor as value 2 of 2 than as value 1; expected",
    ),
    "no tensor": (lambda x: x, lambda x: None, r"holds no tensor \(None\); expected at least one"),
    "an object": (lambda x: x, lambda x: (x, object()), r"holds a object .*expected tensors and constants"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_child_output_must_keep_its_form(name: str) -> None:
    first, later, message = CHANGES[name]
    child = Apply(first)
    chain = SequentialChain(nn.Sequential(nn.Linear(4, 4), child, Apply(lambda v: v)), ROWS)
    stage = chain.stage(0, 2)
    stage(ROWS)
    child.function = later
    with pytest.raises(ModelError, match=rf"the output of 1 \(Apply\) {message}"):
        stage(ROWS)


def test_within_a_stage_the_value_of_the_moment_counts() -> None:
    child = Apply(lambda x: (x, 2))
    chain = SequentialChain(nn.Sequential(child, Apply(lambda v: v[0] * v[1])), ROWS)
    child.function = lambda x: (x, 3)
    (found,) = chain.stage(0, 2)(ROWS)
    assert torch.equal(found, ROWS * 3)


@pytest.mark.parametrize("inputs", [(ROWS, ROWS), {"x": ROWS}, (ROWS, None)])
def test_several_inputs_are_refused(inputs: Any) -> None:
    with pytest.raises(ModelError, match="takes one input"):
        SequentialChain(sequence(torch.tanh), inputs)


def test_a_boundary_without_tensors_is_refused() -> None:
    with pytest.raises(ModelError, match=r"the output of 1 \(Apply\) holds no tensor \(None, 3\)"):
        SequentialChain(sequence(lambda x: (None, 3)), ROWS)


IN_PLACE: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "on the input": (torch.relu_, torch.tanh),
    "on what the child before hands on": (lambda x: x, torch.relu_, torch.sin),
    "on a view of what was given": (lambda x: x.flatten(), torch.relu_, torch.sin),
    "into a part": (lambda x: x.index_fill_(1, torch.tensor(0), 0.0), torch.sin),
    "by adding": (lambda x: (x, x.exp()), lambda v: v[0].add_(v[1]), torch.sin),
    "right before a cut": (lambda x: x.mul(2.0).relu_(), torch.sin),
    "on one part of a tensor": (
        lambda x: (x[:, :2], x[:, 2:]),
        lambda v: (v[0].mul_(2.0), v[1]),
        lambda v: v[0] * v[1],
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("end", [2, 3, 4])
def test_children_that_write_in_place_train_alike(name: str, end: int) -> None:
    model = sequence(*IN_PLACE[name])
    assert_every_cut_trains_alike(model, ROWS, torch.sum)
    chain = SequentialChain(model, ROWS)
    before = torch.rand(3, 4, requires_grad=True)
    given = before.clone()
    chain.stage(1, min(end, len(chain)))(before)
    assert torch.equal(before, given)


def test_write_into_overlapping_output_is_refused() -> None:
    model = sequence(lambda x: (x, x.t()), lambda v: v, lambda v: (torch.relu_(v[0]), v[1]))
    with pytest.raises(ModelError, match=r"3 writes in place .*where 1 returns tensors that share memory.*clone"):
        SequentialChain(model, ROWS)


def test_views_cross_as_contiguous_tensors() -> None:
    views = sequence(
        lambda x: x.t(), torch.sin, lambda x: x[:1].expand(5, 3), lambda x: x * torch.arange(15.0).view(5, 3)
    )
    assert_every_cut_trains_alike(views, ROWS, torch.sum)
