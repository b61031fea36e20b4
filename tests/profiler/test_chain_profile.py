"""Values sum up at every cut to the output bytes of the layer before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core import LayerCost, Link, Profile, Value, ValueCost
from gplan.core.errors import ModelError
from gplan.graph.boundary import is_crossing, storages_of
from gplan.graph.down_sets import Prefixes
from gplan_profiler.capture.capture import capture
from gplan_profiler.memory.chain_profile import SizeCosts, layers_with_weights, values_of
from gplan_profiler.memory.layer_memory import LayerBytes, TensorBytes
from tests.example_files import EXAMPLES, NEEDS_TRANSFORMERS, RUNNABLE, SMALL
from tests.made import make_profile
from tests.profiler.models import Counting, SmallUNet, Tied, TwoTowers

LINK = Link(latency_s=0.0, bytes_per_s=1e9)
SUMS = {"num_bytes": "output_bytes", "gradient_bytes": "output_gradient_bytes", "unsaved_bytes": "output_unsaved_bytes"}
BLOCKS = {"transformer_lm": {"num_blocks": 7}, "gpt2_hf": {"num_blocks": 7}, "llama_hf": {"num_blocks": 7}}


def assert_values_sum_up(profile: Profile) -> None:
    num_layers = len(profile.layers)
    for size in range(len(profile.microbatch_sizes)):
        for field, sum_field in SUMS.items():
            crossing = sum(
                getattr(x.costs[size], field) * is_crossing((x.producer, x.consumers), Prefixes(num_layers))
                for x in profile.values
            )
            assert list(crossing[1:]) == [getattr(x.costs[size], sum_field) for x in profile.layers]  # type: ignore[index]


def computed(name: str, granularity: Any, **settings: int) -> Profile:
    return gplan.profile(
        f"{EXAMPLES / name}.py", settings={**SMALL[name], **settings}, microbatch_sizes=(2,), device="meta",
        hardware="cpu", granularity=granularity,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["unet", *(pytest.param(x, marks=NEEDS_TRANSFORMERS) for x in ("llama_hf", "t5_hf"))])
def test_values_of_layers_sum_to_outputs(name: str) -> None:
    assert_values_sum_up(computed(name, "layer"))


@pytest.mark.parametrize("name", ["transformer_lm", "resnet", pytest.param("bert_hf", marks=NEEDS_TRANSFORMERS)])
def test_plain_chain_has_no_values(name: str) -> None:
    assert computed(name, "layer").values == ()


@pytest.mark.parametrize("name", [x for x in RUNNABLE if x.values[0] != "amoebanet_d"])  # amoebanet_d is too slow
def test_values_of_operations_sum_to_outputs(name: str) -> None:
    """With seven blocks, some blocks have the costs and values of others."""
    found = computed(name, "op", **BLOCKS.get(name, {}))
    assert found.granularity == "op"
    assert_values_sum_up(found)
    assert any(x.same_as is not None for x in found.layers) == (name in BLOCKS)


def in_memory(model: nn.Module, inputs: Tensor, **options: Any) -> Profile:
    found: Profile = gplan.profile(
        model,
        inputs=lambda size: inputs[:size],
        microbatch_sizes=(2, 4),
        link=LINK,
        budget_s=0.05,
        contention=0,
        **options,
    )
    return found


@pytest.mark.parametrize(
    ("model", "inputs", "granularity"),
    [
        (SmallUNet(), torch.randn(4, 3, 8, 8), "op"),
        (Tied(), torch.arange(20).view(4, 5) % 11, "layer"),
        (TwoTowers(), torch.randn(4, 4), "op"),
    ],
    ids=["unet", "mask", "towers"],
)
def test_measured_values_sum_to_measured_outputs(model: nn.Module, inputs: Tensor, granularity: str) -> None:
    found = in_memory(model, inputs, granularity=granularity)
    assert found.granularity == granularity
    assert_values_sum_up(found)


def test_tensors_with_one_way_are_one_value() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            a = self.first(x)
            b = torch.tanh(a)
            y = self.second(x[:, 0, None] + a + b)
            return self.third(y) + a.sum() * b.sum()

    values = in_memory(Pair(), torch.randn(4, 4)).values
    ways = {(x.producer, x.consumers): x.costs[0].num_bytes for x in values}
    assert ways == {
        (None, (0,)): 2 * 4 * 4, (0, (1,)): 2 * 6 * 4, (0, (2,)): 2 * 2 * 6 * 4, (1, (2,)): 2 * 6 * 4, (2, (3,)): 2 * 2 * 4
    }  # fmt: skip


def test_a_chain_has_no_values_and_a_sequential_is_one() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))

    assert in_memory(Plain(), torch.randn(4, 4)).values == ()
    assert in_memory(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)).values == ()


def test_view_of_a_value_that_another_layer_reads_has_bytes_of_its_own() -> None:
    class Shaped(nn.Module):
        def __init__(self, *, reads_both: bool) -> None:
            super().__init__()
            self.first, self.flat, self.last, self.reads_both = (
                nn.Linear(4, 4),
                nn.Flatten(),
                nn.Linear(8, 4),
                reads_both,
            )

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            found: Tensor = self.last(self.flat(y))
            return found + y.sum() if self.reads_both else found

    for reads_both in (False, True):
        profile = in_memory(Shaped(reads_both=reads_both), torch.randn(4, 2, 4))
        ways = {(x.producer, x.consumers): x.view_of for x in profile.values}
        of_first = (0, (1, 2) if reads_both else (1,))
        assert (ways[of_first], ways[1, (2,)]) == (None, None if reads_both else 1)
        storages = {(x.producer, x.consumers): x.costs[0].num_bytes for x in storages_of(profile)}
        assert (storages.get((0, (2,))), storages.get((1, (2,)))) == ((None, 64) if reads_both else (64, None))


def test_views_of_two_values_on_one_route_are_two_values() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x.flatten(1), y.flatten(1)

    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.flat = nn.Linear(4, 4), nn.Linear(4, 4), Flat()
            self.join = nn.Bilinear(8, 8, 4)

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.flat(self.first(x), self.second(x))
            found: Tensor = self.join(one, other)
            return found

    profile = in_memory(Streams(), torch.randn(4, 2, 4))
    viewed = [profile.values[x.view_of].producer for x in profile.values if x.view_of is not None]
    assert sorted(viewed, key=str) == [0, 1]
    place = next(i for i, x in enumerate(profile.values) if x.view_of is not None)
    twice = replace(profile.values[place + 1], view_of=profile.values[place].view_of)
    values = (*profile.values[: place + 1], twice, *profile.values[place + 2 :])
    with pytest.raises(ValueError, match=r"2 values are views of value \d; expected at most one"):
        replace(profile, values=values)


def test_shared_input_has_no_producer() -> None:
    values = in_memory(TwoTowers(depth=1), torch.randn(4, 4)).values
    assert values[0].producer is None
    assert values[0].consumers == (0, 1)
    assert [x.num_bytes for x in values[0].costs] == [2 * 4 * 4, 4 * 4 * 4]
    assert [x.unsaved_bytes for x in values[0].costs] == [x.num_bytes for x in values[0].costs]
    assert [x.gradient_bytes for x in values[0].costs] == [0, 0]


def costs_of(model: nn.Module, size: int) -> SizeCosts:
    """Of layers that cost nothing but the tensors that they pass."""
    chain = capture(model, torch.randn(size, 4))
    memories = []
    for i in range(len(chain)):
        crossing = [TensorBytes(num_bytes=x.num_bytes, gradient_bytes=0, unsaved_bytes=0) for x in chain.specs(i + 1)]
        memories.append(
            LayerBytes(
                stash_bytes=0,
                forward_workspace_bytes=0,
                backward_workspace_bytes=0,
                crossing=tuple(crossing),
                views=(None,) * len(crossing),
            )
        )
    return SizeCosts(
        microbatch_size=size,
        chain=chain,
        sources=tuple(range(len(chain))),
        layers=(costs_of_nothing(),) * len(chain),
        loss=costs_of_nothing(),
        memories=tuple(memories),
    )


def test_order_by_buffer_is_a_value_without_bytes() -> None:
    order = Value(producer=0, consumers=(1,), costs=(ValueCost(microbatch_size=2, num_bytes=0),))
    assert order in values_of([costs_of(Counting(), 2)])


def test_a_model_with_other_layers_at_another_size_is_refused() -> None:
    sizes = [costs_of(TwoTowers(depth=2), 2), costs_of(TwoTowers(depth=3), 4)]
    with pytest.raises(
        ModelError, match=r"5 layers at micro-batch size 2 and 7 at 4, which differ in left\.2, right\.2"
    ):
        values_of(sizes)


def test_sizes_of_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6).requires_grad_(False))
    layers, _ = layers_with_weights([costs_of(model, 2)])
    assert [[(x.num_rows, x.num_bytes, x.is_trained) for x in layer.parameters] for layer in layers] == [
        [(6, 96, True), (6, 24, True)],
        [(6, 24, True), (6, 24, True)],
        [(6, 144, False), (6, 24, False)],
    ]


def costs_of_nothing() -> LayerCost:
    return make_profile([1.0]).layers[0].costs[0]
