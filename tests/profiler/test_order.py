"""Other orders of the layers keep the gradients; impossible orders are refused."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor, nn

from gplan.core.errors import ModelError
from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import Chain, Route
from tests.profiler.models import Counting, LongSkip, SmallUNet, TwoTowers, WritesIntoView
from tests.profiler.training import assert_trained_alike, boundaries, gradients, total, train_in_stages

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
WIDE = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
RIGHT_FIRST = [3, 4, 0, 1, 2, 5, 6]  # of two towers; the last layer of the right one multiplies both
BRANCHING: list[tuple[Callable[[], nn.Module], Tensor]] = [(SmallUNet, IMAGES), (TwoTowers, ROWS), (LongSkip, WIDE)]


def needs(chain: Chain) -> set[tuple[int, int]]:
    """Pairs of layers of which the first must come before the second."""
    routes = {route for boundary in range(len(chain) + 1) for route in chain.routes(boundary)}
    read = {(x.producer, y) for x in routes for y in x.consumers if x.producer is not None and y < len(chain)}
    return read | {*chain.pinned}  # type: ignore[return-value]


def random_order(chain: Chain, random: Random) -> list[int]:
    pairs, order = needs(chain), list[int]()
    while len(order) < len(chain):
        left = [x for x in range(len(chain)) if x not in order]
        order.append(random.choice([x for x in left if not any(y == x and before in left for before, y in pairs)]))
    return order


@pytest.mark.parametrize("granularity", ["layer", "op"])
@pytest.mark.parametrize(("make", "inputs"), BRANCHING, ids=lambda x: getattr(x, "__name__", ""))
def test_cuts_of_other_orders_keep_gradients(make: Callable[[], nn.Module], inputs: Tensor, granularity: str) -> None:
    torch.manual_seed(0)
    model, random = make().train(), Random(0)
    total(model(inputs)).backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    chain = capture(model, inputs, granularity=granularity)  # type: ignore[arg-type]
    for _ in range(3):
        other = chain.reordered(random_order(chain, random))
        train_in_stages(other, range(1, len(chain)), (inputs,))
        assert_trained_alike(gradients(model), expected)


def test_a_boundary_is_what_crosses_the_layers_so_far() -> None:
    chain = capture(TwoTowers(depth=2), ROWS, granularity="op")
    assert chain.names == ("left.0", "left.1", "right.0", "right.1", "mul", "head")
    assert [len(chain.specs(i)) for i in range(7)] == [1, 2, 2, 2, 2, 1, 1]
    other = chain.reordered([2, 3, 0, 1, 4, 5])
    assert other.names == ("right.0", "right.1", "left.0", "left.1", "mul", "head")
    assert other.routes(3) == (Route(2, (3,)), Route(1, (4,)))
    assert tuple(other.specs(i) for i in range(7)) == boundaries(other, (ROWS,))
    assert other.state(0).keys() == {"right.0.weight", "right.0.bias"}


def test_layers_that_are_alike_are_so_in_another_order() -> None:
    chain = capture(TwoTowers(), ROWS)
    other = chain.reordered(RIGHT_FIRST)
    assert other.names[3:5] == ("left.1", "left.2")
    assert other.structure(3) == other.structure(4) != other.structure(2)


def test_the_digest_is_that_of_the_captured_model() -> None:
    chain = capture(TwoTowers(), ROWS)
    other = chain.reordered(RIGHT_FIRST)
    back = other.reordered([RIGHT_FIRST.index(i) for i in range(7)])
    assert other.names != chain.names == back.names
    assert other.digest() == chain.digest() == back.digest()


def test_a_layer_before_what_it_needs_is_named_with_that() -> None:
    with pytest.raises(ModelError, match=r"layer left\.1 cannot run before left\.0"):
        capture(TwoTowers(), ROWS).reordered([1, 0, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]])
def test_an_order_names_every_layer_once(order: list[int]) -> None:
    with pytest.raises(ModelError, match=r"expected each of 0 to 6 once"):
        capture(TwoTowers(), ROWS).reordered(order)


def test_layers_that_use_one_buffer_keep_their_order() -> None:
    chain = capture(Counting(), ROWS)
    assert chain.pinned == ((0, 1),)
    with pytest.raises(ModelError, match="layer second cannot run before first, whose results or buffers"):
        chain.reordered([1, 0, 2])


def test_in_place_view_stays_in_one_layer() -> None:
    chain = capture(WritesIntoView(), ROWS)
    assert chain.reordered([0, 1]).names == ("first..second", "third")
    with pytest.raises(ModelError, match=r"third cannot run before first\.\.second"):
        chain.reordered([1, 0])


def test_a_sequential_runs_in_its_own_order_only() -> None:
    chain = capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ROWS)
    assert chain.reordered([0, 1]) is chain
    with pytest.raises(ModelError, match="each child reads what the one before it gives"):
        chain.reordered([1, 0])
