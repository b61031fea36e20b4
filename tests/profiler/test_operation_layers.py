"""Granularity op: the grouping of operations, their names, and gradients at every cut."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gplan.core.errors import ModelError, UsageError
from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import Chain
from gplan_profiler.model.lazy_build import build_without_weights, to_fake_tensors
from tests.example_files import NEEDS_TRANSFORMERS, SMALL, apply, call, load
from tests.profiler.models import Branching, ConvNet, Counting, Residual, SmallUNet, Tied, TwoTowers, WritesIntoView
from tests.profiler.training import assert_trained_alike, boundaries, gradients, total, train_in_stages

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
SETTINGS = SMALL["transformer_lm"]
BRANCHING = ["unet", pytest.param("t5_hf", marks=NEEDS_TRANSFORMERS)]
TOKENS = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(4))


def operations(model: nn.Module, inputs: Any) -> Chain:
    return capture(model, inputs, granularity="op")


class Calls(nn.Module):
    """Linear layers of one width, and a function that calls them."""

    def __init__(self, forward: Callable[..., Tensor], num_layers: int = 2, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def reads(chain: Chain, layer: int) -> list[str]:
    """The names of the layers that a layer reads."""
    found = [x.producer for x in chain.routes(layer) if layer in x.consumers]
    return ["input" if x is None else chain.names[x] for x in found]


# Which operation goes with which


def test_light_operations_join_products_and_norms() -> None:
    example = load("transformer_lm")
    chain = operations(apply(example.model, **SETTINGS), apply(example.example_inputs, 2, **SETTINGS))
    assert chain.names[2:9] == (
        "blocks.0.attention_norm", "blocks.0.attention.query_key_value", "blocks.0.attention.scaled_dot_product_attention",
        "blocks.0.attention.out", "blocks.0.mlp_norm", "blocks.0.mlp.0", "blocks.0.mlp.2",
    )  # fmt: skip
    assert chain.kinds[2:6] == ("layer_norm", "linear", "scaled_dot_product_attention", "linear")
    assert len(chain) == 2 + 2 * 7 + 2


def test_views_go_with_what_reads_them() -> None:
    example = load("transformer_lm")
    chain = operations(apply(example.model, **SETTINGS), apply(example.example_inputs, 2, **SETTINGS))
    assert reads(chain, 4) == ["blocks.0.attention.query_key_value"]  # its output, not query, key and value
    assert [x.shape for x in chain.specs(4)][-1] == (2, 16, 3 * 32)


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_cells_of_recurrences_open_layers(cell: Callable[[int, int], nn.Module]) -> None:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.update = nn.Linear(4, 4), cell(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Any = self.update(torch.relu(self.message(x)))
            return found if isinstance(found, Tensor) else found[0]

    chain = operations(Cells(), ROWS)
    assert chain.names == ("message", "update")


def test_a_view_of_a_part_stays_with_what_it_is_a_part_of() -> None:
    chain = operations(Calls(lambda m, x: m.layers[1](m.layers[0](x)[:2])), ROWS)
    assert [x.shape for x in chain.specs(1)] == [(2, 4)]


def test_shared_view_crosses_as_its_tensor() -> None:
    def forward(m: Calls, x: Tensor) -> Tensor:
        turned = m.layers[0](x).t()
        return torch.cat([m.layers[1](turned), m.layers[2](turned)])

    chain = operations(Calls(forward, 3), ROWS)
    assert chain.names == ("layers.0", "layers.1", "layers.2", "cat")
    assert [len(chain.specs(i)) for i in range(5)] == [1, 1, 2, 2, 1]


def test_softmax_is_a_layer_called_by_its_module_and_operation() -> None:
    chain = operations(Calls(lambda m, x: m.layers[1](F.softmax(m.layers[0](x) * 2.0, -1))), ROWS)
    assert chain.names == ("layers.0", "softmax", "layers.1")


def test_operations_of_one_module_are_numbered() -> None:
    chain = operations(Calls(lambda m, x: m.layers[0](torch.tanh(m.layers[0](x)))), ROWS)
    assert chain.names == ("layers.0.linear", "layers.0.linear#2")


def test_a_batch_norm_stays_with_the_convolution_beside_it() -> None:
    chain = operations(nn.Sequential(Residual(3), Residual(3)), IMAGES)
    assert chain.names == ("0.conv", "1.conv")


def test_a_norm_of_what_is_read_elsewhere_too_is_a_layer() -> None:
    chain = operations(Calls(lambda m, x: (y := m.layers[0](x)) + m.layers[1](m.norm(y))), ROWS)
    assert chain.names == ("layers.0", "norm", "layers.1")


def test_join_of_branches_is_a_layer() -> None:
    assert operations(TwoTowers(depth=1), ROWS).names == ("left.0", "right.0", "mul", "head")
    chain = operations(Calls(lambda m, x: (y := m.layers[0](x)) + m.layers[1](y)), ROWS)
    assert chain.names == ("layers.0", "layers.1")


def test_cut_before_pooling() -> None:
    chain = operations(SmallUNet(), IMAGES)
    assert chain.names == ("down.0", "down.1", "bottom", "up.0", "up.1")
    assert [x.shape for x in chain.specs(1)] == [(4, 4, 8, 8)]  # the pool goes with the next convolution


def test_mask_joins_its_only_reader() -> None:
    def masked(m: Calls, x: Tensor) -> Tensor:
        mask = torch.ones(4).cumsum(0) > 2
        for layer in m.layers:
            x = torch.tanh(layer(x)) * mask
        return x

    assert operations(Calls(masked, 1), ROWS).names == ("layers.0",)
    many = operations(Calls(masked, 2), ROWS)
    assert many.names == ("ones", "layers.0", "layers.1")
    assert operations(Tied(), TOKENS).names == ("embedding", "gt", "layers.0", "layers.1", "layers.2", "head")


def test_a_view_of_the_state_does_not_travel() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.register_buffer("table", torch.ones(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            rows = self.table[:4]
            for layer in self.layers:
                x = torch.tanh(layer(x)) + rows
            return x

    chain = operations(Table(), ROWS)
    assert chain.names == ("layers.0", "layers.1")
    assert [len(chain.specs(i)) for i in range(3)] == [1, 1, 1]


def test_what_is_written_through_a_view_stays_in_one_layer() -> None:
    assert operations(WritesIntoView(), ROWS).names == ("first..second", "third")


def test_a_buffer_that_is_written_and_read_stays_in_one_layer() -> None:
    assert operations(Counting(), ROWS).names == ("select..second", "last", "add")


def test_counters_that_nobody_reads_are_with_their_module() -> None:
    chain = operations(ConvNet(), IMAGES)
    assert [name for name in chain.state(2) if "num_batches" in name] == ["blocks.1.norm.num_batches_tracked"]


def test_what_is_detached_waits_for_no_gradient() -> None:
    chain = operations(Calls(lambda m, x: m.layers[1](m.layers[0](x).detach())), ROWS)
    assert [x.requires_grad for x in chain.specs(1)] == [False]


def test_layers_of_blocks_that_are_alike_are_alike() -> None:
    example = load("transformer_lm")
    chain = operations(
        example.model(num_blocks=4, width=32, num_heads=2, sequence_length=16), torch.zeros(2, 16).long()
    )
    assert [chain.structure(i) == chain.structure(i + 7) for i in range(9, 16)] == [True] * 7


# Every cut


@pytest.mark.parametrize("name", BRANCHING)
def test_example_cut_between_operations_keeps_gradients(name: str) -> None:
    example, random = load(name), Random(0)
    torch.manual_seed(0)
    model = apply(example.model, **SMALL[name], dropout=0.0).train()
    inputs = apply(example.example_inputs, 3, **SMALL[name])
    total(call(model, inputs)).backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    chain = operations(model, inputs)
    cuts = sorted(random.sample(range(1, len(chain)), min(12, len(chain) - 1)))
    tensors = tuple(inputs.values()) if isinstance(inputs, dict) else (inputs,)
    train_in_stages(chain, cuts, tensors)
    assert_trained_alike(gradients(model), expected)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [(ConvNet, IMAGES), (Tied, TOKENS), (WritesIntoView, ROWS), (Counting, ROWS), (SmallUNet, IMAGES)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_cuts_between_operations_keep_gradients(make: Callable[[], nn.Module], inputs: Tensor) -> None:
    torch.manual_seed(0)
    model = make().train()
    total(model(inputs)).backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    for name, buffer in model.named_buffers():
        buffer.zero_() if name == "calls" else None
    chain = operations(model, inputs)
    assert tuple(chain.specs(i) for i in range(len(chain) + 1)) == boundaries(chain, (inputs,))
    train_in_stages(chain, range(1, len(chain)), (inputs,))
    assert_trained_alike(gradients(model), expected)


# What cannot be


def test_unexportable_sequential_suggests_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Branching())
    assert len(capture(model, ROWS)) == len(operations(model, ROWS)) == 2  # the branch is called as it is
    model = build_without_weights(lambda: nn.Sequential(nn.Linear(4, 4), Branching()), what="it")
    to_fake_tensors(model)
    with pytest.raises(ModelError, match=r"if x\.sum\(\) > 0:.*without --granularity op this nn\.Sequential"):
        operations(model, ROWS)


def test_another_granularity_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="granularity 'block' is not known; expected one of auto, layer, op"):
        capture(nn.Linear(4, 4), ROWS, granularity="block")  # type: ignore[arg-type]


def test_a_model_that_only_counts_its_calls_has_nothing_to_cut() -> None:
    class OnlyCounting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return x

    with pytest.raises(ModelError, match="nothing to cut"):
        operations(OnlyCounting(), ROWS)
