"""Answer questions about values that a trace does not have, and check the answers in training.

Two kinds of questions are answered. An author's check, an `if` that only raises an error or an `assert`, passes. And a
trace that follows a batch (profiler/capture/tracing_ways.py) computes with the values of that batch beside its fake
tensors, which torch calls real tensor propagation: control flow is that of the batch. Each answer becomes an operation of
the graph that raises an error for a batch with another one.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from gplan.core.errors import ModelError

torch.library.define("gplan::check", "(Tensor value, int[] expected, str text) -> ()")
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_MOST_NUMBERS = 64  # of an answer
_TRUTHS = frozenset({Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero})
_NUMBERS = frozenset({Tensor.__int__, Tensor.__index__, Tensor.item, Tensor.tolist})


@torch.library.impl("gplan::check", "CompositeExplicitAutograd")
def _check(value: Tensor, expected: Sequence[int], text: str) -> None:
    """Raise ModelError unless the numbers of a tensor are the expected ones."""
    if value.flatten().tolist() != [*expected]:
        raise ModelError(text)


def _fake_check(value: Tensor, expected: Sequence[int], text: str) -> None:
    """A trace has no values."""


torch.library.register_fake("gplan::check", _fake_check)


def passed_check(value: Tensor) -> bool | None:
    """The truth with which the running check passes, which is then part of the trace; None where there is no check."""
    path, line = _asking_line()
    expected = next((passes for first, end, passes in _checks_in(path) if first <= line <= end), None)
    if expected is not None:
        text = f"a check of the model fails for this batch: {path}, line {line}"
        torch.ops.gplan.check(value.bool(), [int(expected)], text)
    return expected


def answer_of_batch(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The answer to a question about a tensor for the batch that is followed; NotImplemented without one.

    Not answered are questions for floating-point numbers, which differ from batch to batch: torch traces those.
    """
    value = args[0] if args else None
    if not isinstance(value, FakeTensor) or function not in _TRUTHS | _NUMBERS:
        return NotImplemented
    real = value.real_tensor
    if real is None or real.numel() > _MOST_NUMBERS:
        return NotImplemented
    compared = value.bool() if function in _TRUTHS else value
    if compared.is_floating_point() or compared.is_complex():
        return NotImplemented
    with on_real_tensors():
        answer = function(real)
        expected = [int(x) for x in (real.bool() if function in _TRUTHS else real).flatten().tolist()]
    path, line = _asking_line()
    text = (
        f"this batch takes another path through the model than the one it was captured for: {path}, line {line} "
        f"({linecache.getline(path, line).strip()}) found {answer} then; use torch.where or torch.cond there, or define the "
        "model as an nn.Sequential or a list of stages, whose children may branch as they like"
    )
    torch.ops.gplan.check(compared, expected, text)
    return answer


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """Inside, operations run on real tensors without being traced."""
    no_functions, no_dispatcher = torch._C.DisableTorchFunction(), torch._C._DisablePythonDispatcher()
    with no_functions, _disable_current_modes(), no_dispatcher, torch.no_grad():
        yield


def give_values(fakes: Sequence[Tensor], call: Callable[..., Sequence[Tensor]], given: Sequence[Any]) -> None:
    """Give the results of a call that was not traced the values of the batch, where those of its arguments are known."""
    reals = [x.real_tensor if isinstance(x, FakeTensor) else x for x in given]
    is_known = functorch_config.fake_tensor_propagate_real_tensors and not any(x is None for x in reals)
    with on_real_tensors():
        made: Sequence[Tensor | None] = call(*reals) if is_known else [None] * len(fakes)
    for fake, real in zip(fakes, made, strict=True):
        if isinstance(fake, FakeTensor):
            fake.real_tensor = real


@contextmanager
def state_of_batch(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, in a trace that follows a batch, the model's fake parameters and buffers have the values of `state`."""
    fakes = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with on_real_tensors():
        for name, fake in fakes.items():
            if isinstance(fake, FakeTensor) and name in state:
                real = state[name].detach()
                is_parameter = isinstance(state[name], nn.Parameter)
                fake.real_tensor = real if is_parameter else real.clone()  # buffers are written
    yield


def without_draws(call: Callable[[], Any]) -> Any:
    """The result of a call; where it drew random numbers, its values are not those of the batch, and are forgotten."""
    if not functorch_config.fake_tensor_propagate_real_tensors:
        return call()
    before = _random_state()
    output = call()
    if _random_state() != before:
        for x in pytree.tree_leaves(output):
            if isinstance(x, FakeTensor):
                x.real_tensor = None
    return output


def _random_state() -> tuple[object, ...]:
    with on_real_tensors():
        on_gpus = (x.get_offset() for x in torch.cuda.default_generators)
        return torch.default_generator.get_state().numpy().tobytes(), *on_gpus


def _asking_line() -> tuple[str, int]:
    """File and line of the code that asks for a value, outside torch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE)):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


@cache
def _checks_in(path: str) -> tuple[tuple[int, int, bool], ...]:
    """The first and last line of the condition of each check in a file, and the truth with which it passes."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(
        (node.test.lineno, node.test.end_lineno or node.test.lineno, isinstance(node, ast.Assert))
        for node in ast.walk(tree)
        if isinstance(node, ast.If | ast.Assert) and _only_raises(node) and not _negates(node.test)
    )


def _only_raises(node: ast.If | ast.Assert) -> bool:
    return isinstance(node, ast.Assert) or (not node.orelse and all(isinstance(x, ast.Raise) for x in node.body))


def _negates(test: ast.expr) -> bool:
    """Whether the truth of a part of a condition may be the opposite of the whole's."""
    return any(isinstance(x, ast.Not | ast.IfExp | ast.Lambda | ast.GeneratorExp) for x in ast.walk(test))
