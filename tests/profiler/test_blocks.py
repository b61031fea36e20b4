"""Models of blocks: their layers compute what the model does, and a capture leaves the model as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from gplan_profiler.capture.capture import exported
from gplan_profiler.capture.chain import Chain, call_arguments
from tests.profiler.blocks import BLOCKS, ROWS, Block, LeavesBehind, Shelf, Stack, many
from tests.profiler.training import boundaries


def total(output: Any) -> Tensor:
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    return sum((x * torch.linspace(0.5, 1.5, x.numel()).view_as(x)).sum() for x in leaves)  # type: ignore[return-value]


def trained(model: nn.Module, forward: Callable[[], Any]) -> dict[str, Tensor]:
    """The loss, gradients and buffers after a forward and a backward."""
    torch.manual_seed(0)
    loss = total(forward())
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"loss": loss.detach(), **gradients, **dict(model.named_buffers())}


def by_layer(chain: Chain, inputs: Tensor) -> Any:
    tensors: tuple[Tensor, ...] = (inputs,)
    for layer in range(len(chain)):
        tensors = chain.stage(layer, layer + 1)(*tensors)
    return chain.model_output(tensors)


def assert_trains_alike(make: Callable[[], nn.Module], inputs: Tensor) -> None:
    torch.manual_seed(0)
    model = make().train()
    other = copy.deepcopy(model)
    args, kwargs = call_arguments(inputs)
    expected = trained(other, lambda: other(*args, **kwargs))
    chain = exported(model, inputs)
    specs = boundaries(chain, (inputs,))
    assert all(chain.specs(boundary) == specs[boundary] for boundary in range(len(chain) + 1))
    found = trained(model, lambda: by_layer(chain, inputs))
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BLOCKS)
def test_layers_compute_what_the_model_does(name: str) -> None:
    assert_trains_alike(*BLOCKS[name])


def test_blocks_with_hooks() -> None:
    blocks = many(Block)
    for block in blocks:
        block.register_forward_hook(lambda _, __, output: output * 2)
    assert_trains_alike(lambda: Stack(*blocks), ROWS)


@pytest.mark.filterwarnings("ignore:The tensor attributes .* were assigned during export")
@pytest.mark.parametrize("in_list", [True, False])
def test_value_left_by_a_block_is_kept(in_list: bool) -> None:
    shelf = Shelf()
    model = Stack(*many(lambda: LeavesBehind(shelf.values if in_list else shelf)))
    model.register_forward_pre_hook(lambda *_: shelf.values.clear())
    model.register_forward_hook(lambda _, __, output: output + sum(shelf.values))
    chain = exported(model, ROWS)
    torch.testing.assert_close(by_layer(chain, ROWS), model(ROWS))


def test_after_a_capture_the_model_is_what_it_was() -> None:
    model = Stack(*many(Block))
    before = [(name, id(x)) for name, x in model.named_parameters()]
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    call = nn.Module._call_impl
    exported(model, ROWS)
    assert [(name, id(x)) for name, x in model.named_parameters()] == before
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert all(type(module._parameters) is dict for module in model.modules())
    assert nn.Module._call_impl is call


@pytest.mark.parametrize("name", ["a transformer with a tied embedding", "batch norm and in-place activations"])
def test_fake_model_is_captured_as_a_real_one(name: str) -> None:
    make, inputs = BLOCKS[name]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = make().train()
    chain, real = exported(model, inputs), exported(make().train(), inputs)
    tensors: tuple[Tensor, ...] = (mode.from_tensor(inputs),)
    with mode:
        for layer in range(len(chain)):
            assert chain.structure(layer) == real.structure(layer)
            tensors = chain.stage(layer, layer + 1)(*tensors)
            assert chain.specs(layer + 1) == real.specs(layer + 1)
            assert [x.shape for x in tensors] == [spec.shape for spec in chain.specs(layer + 1)]
        total(chain.model_output(tensors)).backward()  # type: ignore[no-untyped-call]
    assert all(x.grad is not None for x in model.parameters())
