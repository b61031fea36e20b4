"""Repeated blocks are traced once with the same result as a full trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from profiler.capture import trace
from profiler.capture.capture import ExportedChain, exported
from profiler.capture.chain import Chain, call_arguments
from tests.profiler.repeating import NOT_REPEATING, REPEATING, ROWS, Block, LeavesBehind, Shelf, Stack, many
from tests.profiler.training import boundaries


def plain_chain(model: nn.Module, inputs: object) -> ExportedChain:
    """The model traced in full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_trace_repeats_once", lambda *_: None)
        return exported(model, inputs)


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


def assert_indistinguishable(make: Callable[[], nn.Module], inputs: Tensor) -> ExportedChain:
    """The chain of a model computes what the model does, and looks like the chain of the model traced in full."""
    torch.manual_seed(0)
    model = make().train()
    other = copy.deepcopy(model)
    args, kwargs = call_arguments(inputs)
    expected = trained(other, lambda: other(*args, **kwargs))
    chain, plain = exported(model, inputs), plain_chain(model, inputs)
    assert (chain.names, chain.kinds, len(chain)) == (plain.names, plain.kinds, len(plain))
    for layer in range(len(chain)):
        assert chain.structure(layer) == plain.structure(layer)
        assert list(chain.state(layer).items()) == list(plain.state(layer).items())
    specs = boundaries(chain, (inputs,))
    for boundary in range(len(chain) + 1):
        assert chain.specs(boundary) == plain.specs(boundary) == specs[boundary]
    found = trained(model, lambda: by_layer(chain, inputs))
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    return chain


@pytest.mark.parametrize("name", REPEATING)
def test_repeated_blocks_equal_full_trace(name: str) -> None:
    make, inputs, num_repetitions = REPEATING[name]
    assert assert_indistinguishable(make, inputs).num_repetitions == num_repetitions


@pytest.mark.parametrize("name", NOT_REPEATING)
def test_blocks_that_perhaps_do_not_repeat_are_traced_in_full(name: str) -> None:
    make, inputs = NOT_REPEATING[name]
    assert assert_indistinguishable(make, inputs).num_repetitions == 0


def test_requires_grad_distinguishes_repeated_calls() -> None:
    chain = assert_indistinguishable(lambda: Stack(*many(Block), first=nn.Identity()), ROWS)
    assert chain.num_repetitions == 3


def test_a_repeated_block_runs_its_forward_once() -> None:
    model, Block.num_calls = Stack(*many(Block, 40)), 0
    exported(model, ROWS, traced="")  # without the proof, which runs the model itself
    assert Block.num_calls == 1


def test_blocks_with_hooks_are_traced_in_full() -> None:
    blocks = many(Block)
    for block in blocks:
        block.register_forward_hook(lambda _, __, output: output * 2)
    assert assert_indistinguishable(lambda: Stack(*blocks), ROWS).num_repetitions == 0


@pytest.mark.filterwarnings("ignore:The tensor attributes .* were assigned during export")
@pytest.mark.parametrize("in_list", [True, False])
def test_value_left_by_a_block_is_kept(in_list: bool) -> None:
    shelf = Shelf()
    model = Stack(*many(lambda: LeavesBehind(shelf.values if in_list else shelf)))
    model.register_forward_hook(lambda _, __, output: output + sum(shelf.values[-5:]))
    chain = exported(model, ROWS)
    assert chain.num_repetitions == 0
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
    make, inputs, num_repetitions = REPEATING[name]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = make().train()
    chain, real = exported(model, inputs), exported(make().train(), inputs)
    assert chain.num_repetitions == num_repetitions
    tensors: tuple[Tensor, ...] = (mode.from_tensor(inputs),)
    with mode:
        for layer in range(len(chain)):
            assert chain.structure(layer) == real.structure(layer)
            tensors = chain.stage(layer, layer + 1)(*tensors)
            assert chain.specs(layer + 1) == real.specs(layer + 1)
            assert [x.shape for x in tensors] == [spec.shape for spec in chain.specs(layer + 1)]
        total(chain.model_output(tensors)).backward()  # type: ignore[no-untyped-call]
    assert all(x.grad is not None for x in model.parameters())
