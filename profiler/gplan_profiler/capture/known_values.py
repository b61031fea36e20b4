"""The values of tensors during a trace: followed where they are constants, else answered and checked in training.

A tensor made from numbers alone (`torch.arange`, `torch.zeros`), or computed from such tensors alone, has the same
value in every run at these shapes. Its operations run twice: on fake tensors, for the graph, and on real ones, which
answer `if`, `.item()` and `.tolist()`. Views and in-place writes happen to both. The value is dropped where this is
not certain: after a write that was not followed, for random numbers, uninitialised memory, large tensors, and inside
torch.func and torch.vmap.

Two other kinds of questions are answered. An author's check, an `if` that only raises an error or an `assert`, passes.
And a trace that follows a batch (gplan_profiler/capture/tracing_ways.py) computes with the values of that batch beside its fake
tensors, which torch calls real tensor propagation: control flow is that of the batch. Each of these answers becomes an
operation of the graph that raises an error for a batch with another one.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from gplan.core.errors import ModelError
from gplan_profiler.capture.value_forms import has_fixed_size
from gplan_profiler.memory.allocations import tensors_in
from gplan_profiler.torch_compat import (
    DisableTorchFunction,
    FakeTensor,
    OperatorBase,
    OpOverloadPacket,
    TorchDispatchMode,
    functorch_config,
    is_transforming,
    on_real_tensors,
    pytree,
    replaced,
)

MOST_NUMBERS = 2**20  # of a tensor whose value is kept

_MAKERS = frozenset({
    torch.arange, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones, torch.scalar_tensor, torch.tensor,
    torch.tril_indices, torch.triu_indices, torch.zeros,
})  # fmt: skip
_LIKE_FIRST = frozenset({torch.full_like, torch.ones_like, torch.zeros_like})  # of the first argument's shape
_NEW = frozenset({Tensor.new_full, Tensor.new_ones, Tensor.new_zeros})  # of the first argument's dtype and device
_QUESTIONS = frozenset({
    Tensor.__bool__, Tensor.__complex__, Tensor.__contains__, Tensor.__float__, Tensor.__format__, Tensor.__index__,
    Tensor.__int__, Tensor.allclose, Tensor.equal, Tensor.is_nonzero, Tensor.item, Tensor.tolist, torch.allclose,
    torch.equal, torch.is_nonzero,
})  # fmt: skip
_UNCOUNTED = frozenset({  # access to memory whose writes torch does not count
    Tensor.data.__get__, Tensor.data.__set__, Tensor.storage, Tensor.untyped_storage,  # type: ignore[attr-defined]
})  # fmt: skip
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_MOST_NUMBERS_OF_ANSWER = 64
_TRUTHS = frozenset({Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero})
_NUMBERS = frozenset({Tensor.__int__, Tensor.__index__, Tensor.item, Tensor.tolist})
_OPERATORS = (OperatorBase, OpOverloadPacket)
_PLAIN = (bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.Size,
          torch.memory_format)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Value:
    """The value of a fake tensor."""

    real: Tensor
    num_writes: int  # into the fake tensor, when this value was valid


class _ConstantCall(NamedTuple):
    """A call that depends on constants alone."""

    repeat: Callable[[], Any]  # on real tensors; raises its errors and _Inconstant
    tensors: tuple[Tensor, ...]  # the original arguments that are tensors


@contextmanager
def known_constants() -> Iterator[None]:
    """Inside, constants made by the model's code keep their values; entered around its forward.

    `is_fake_tensor` of transformers, if it is imported, is False for them: its code calls this before it reads values.
    """
    constants = _Constants()
    module: Any = sys.modules.get("transformers.utils.import_utils")
    plain = getattr(module, "is_fake_tensor", None)
    known: AbstractContextManager[None] = nullcontext()
    if plain is not None:
        known = replaced(module, is_fake_tensor=lambda x: plain(x) and not constants.has_value(x))
    with known, constants:
        yield


class _Inconstant(Exception):
    """The result of an operation is not determined by its arguments."""


class _Constants(TorchFunctionMode):
    """Repeats every call that depends on constants alone on real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._values: MutableMapping[Tensor, _Value] = WeakIdKeyDictionary()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = self._constant_call(function, args, kwargs)
        if call is not None and function in _QUESTIONS:
            return call.repeat()
        if function is Tensor.__bool__ and (passes := passed_check(args[0])) is not None:
            return passes
        if (answer := answer_of_batch(function, args)) is not NotImplemented:
            return answer
        output = without_draws(lambda: function(*args, **kwargs))
        is_followed = call is not None and self._follow(function, call, output)
        if self._values and not is_followed and _may_write(function, kwargs):
            if is_transforming():  # the tensors may stand for others
                self._values.clear()
                return output
            memories = set(map(_memory, tensors_in((args, kwargs))))
            for tensor in [x for x in self._values if _memory(x) in memories]:
                del self._values[tensor]
        return output

    def has_value(self, tensor: object) -> bool:
        """Whether the value of a tensor is known."""
        value = self._value(tensor) if isinstance(tensor, Tensor) else None
        return value is not None or getattr(tensor, "real_tensor", None) is not None

    def _constant_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> _ConstantCall | None:
        """The call on real tensors, or None if it may depend on anything but constants."""
        if function in _UNCOUNTED or is_transforming():
            return None
        if function in _NEW or function in _LIKE_FIRST:
            args = (self._stand_in(args[0], function), *args[1:]) if args else args
        elif any(isinstance(x, Tensor) and x not in self._values for x in args):  # most calls of a model
            return None
        leaves, structure = pytree.tree_flatten((args, kwargs))
        fakes = tuple(x for x in leaves if isinstance(x, Tensor))
        values = {id(x): self._value(x) for x in fakes}
        others = (x for x in leaves if not isinstance(x, Tensor))
        parts = (y for x in others for y in ((x.start, x.stop, x.step) if isinstance(x, slice) else (x,)))
        is_constant = all(values.values()) and all(type(x) in _PLAIN for x in parts)
        if not is_constant or not (fakes or function in _MAKERS):
            return None
        real_args, real_kwargs = pytree.tree_unflatten(
            [x.real if (x := values.get(id(leaf))) else leaf for leaf in leaves], structure
        )

        def repeat() -> Any:
            with on_real_tensors(), _Pure():  # type: ignore[no-untyped-call]
                return function(*real_args, **real_kwargs)

        return _ConstantCall(repeat, fakes)

    def _stand_in(self, tensor: Any, function: Callable[..., Any]) -> Any:
        """A real tensor in place of an argument of which only shape, dtype and device are read."""
        if not isinstance(tensor, Tensor) or not _can_be_kept(tensor, any_size=function in _NEW):
            return tensor
        shape, stride = ((0,), (1,)) if function in _NEW else (tensor.size(), tensor.stride())
        try:
            with on_real_tensors():
                made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
        except (RuntimeError, AssertionError):  # there is no such device
            return tensor
        self._values[made] = _Value(made, _num_writes(made))
        return made

    def _follow(self, function: Callable[..., Any], call: _ConstantCall, output: Any) -> bool:
        """Repeat a call on the real tensors; returns whether the values of its results are known."""
        fakes = list(tensors_in(output))
        is_of_use = fakes or function is Tensor.__setitem__
        if not is_of_use or not all(_can_be_kept(x) for x in (*fakes, *call.tensors)):
            return False
        try:
            reals = list(tensors_in(call.repeat()))
        except Exception:  # the value stays unknown
            return False
        with DisableTorchFunction():
            places = [
                [(x.shape, x.stride(), x.storage_offset(), x.dtype, x.device) for x in some] for some in (fakes, reals)
            ]
        if places[0] != places[1]:
            return False
        # The call may have written into its arguments.
        written = ((fake, x.real) for fake in call.tensors if (x := self._values.get(fake)))
        for fake, real in (*written, *zip(fakes, reals, strict=True)):
            self._values[fake] = _Value(real, _num_writes(fake))
        return True

    def _value(self, tensor: Tensor) -> _Value | None:
        value = self._values.get(tensor)
        if value is not None and value.num_writes != _num_writes(tensor):
            del self._values[tensor]
            return None
        return value


def _may_write(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function may write into its arguments, or expose their memory, without torch counting the write."""
    name = getattr(function, "__name__", "").partition(".")[0]
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))
    is_foreign = isinstance(function, _OPERATORS) and str(function).partition(".")[0] != "aten"
    has_statistics = any(x in name for x in ("batch_norm", "instance_norm", "fused"))
    return is_in_place or is_foreign or has_statistics or "out" in kwargs or function in _UNCOUNTED


class _Pure(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations of other libraries, and those whose results are not determined by their arguments."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        is_pure = torch.Tag.nondeterministic_seeded not in function.tags and function.namespace in ("aten", "prims")
        if not is_pure or name.startswith(("empty", "new_empty", "resize")):
            raise _Inconstant(name)
        return function(*args, **(kwargs or {}))


def _num_writes(tensor: Tensor) -> int:
    """The number of writes into a tensor's memory, through any view, as counted by torch."""
    with DisableTorchFunction():
        return tensor._version


def _memory(tensor: Tensor) -> int | None:
    """A key of the tensor's memory, equal for views."""
    with DisableTorchFunction():
        return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def _can_be_kept(tensor: Tensor, *, any_size: bool = False) -> bool:
    with DisableTorchFunction():
        is_plain = tensor.layout == torch.strided and not tensor.is_inference() and tensor.device.type != "meta"
        if not is_plain or not has_fixed_size(tensor):
            return False
        return any_size or tensor.numel() <= MOST_NUMBERS


torch.library.define("gplan::check", "(Tensor value, int[] expected, str text) -> ()")


@torch.library.impl("gplan::check", "CompositeExplicitAutograd")
def _check(value: Tensor, expected: Sequence[int], text: str) -> None:
    """Raise ModelError unless the numbers of a tensor are the expected ones."""
    if value.flatten().tolist() != [*expected]:
        raise ModelError(text)


torch.library.register_fake("gplan::check", lambda value, expected, text: None)  # a trace has no values


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
    if real is None or real.numel() > _MOST_NUMBERS_OF_ANSWER:
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
    found = list[tuple[int, int, bool]]()
    for node in (x for x in ast.walk(tree) if isinstance(x, ast.If | ast.Assert)):
        only_raises = isinstance(node, ast.Assert) or (
            not node.orelse and all(isinstance(x, ast.Raise) for x in node.body)
        )
        negating = ast.Not | ast.IfExp | ast.Lambda | ast.GeneratorExp  # a part may have the opposite truth
        if only_raises and not any(isinstance(x, negating) for x in ast.walk(node.test)):
            found.append((node.test.lineno, node.test.end_lineno or node.test.lineno, isinstance(node, ast.Assert)))
    return tuple(found)
