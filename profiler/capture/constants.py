"""Follow the values of constant tensors during a trace, so that control flow that depends on them is as in a plain run.

A tensor made from numbers alone (`torch.arange`, `torch.zeros`), or computed from such tensors alone, has the same
value in every run at these shapes. Its operations run twice: on fake tensors, for the graph, and on real ones, which
answer `if`, `.item()` and `.tolist()`. Views and in-place writes happen to both. The value is dropped where this is
not certain: after a write that was not followed, for random numbers, uninitialised memory, large tensors, and inside
torch.func and torch.vmap.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from profiler.capture.authored_layers import replaced
from profiler.capture.value_checks import answer_of_batch, on_real_tensors, passed_check, without_draws
from profiler.capture.value_forms import has_fixed_size
from profiler.memory.allocations import tensors_in

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
_OPERATORS = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)
_PLAIN = (bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.Size,
          torch.memory_format)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Value:
    """The value of a fake tensor."""

    real: Tensor
    num_writes: int  # into the fake tensor, when this value was valid


@dataclass(frozen=True, slots=True)
class _ConstantCall:
    """A call on real tensors that depends on constants alone."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fakes: tuple[Tensor, ...]  # the original arguments

    def result(self) -> Any:
        """The result in a plain run; raises the function's errors, and _Inconstant."""
        with on_real_tensors(), _Pure():  # type: ignore[no-untyped-call]
            return self.function(*self.args, **self.kwargs)


class Answers:
    """Counts the reads of constant values during a trace."""

    def __init__(self) -> None:
        self.num_given = 0


@contextmanager
def known_constants(answers: Answers) -> Iterator[None]:
    """Inside, constants made by the model's code keep their values; entered around its forward."""
    constants = _Constants(answers)
    with _not_called_fake(constants), constants:
        yield


class _Inconstant(Exception):
    """The result of an operation is not determined by its arguments."""


class _Constants(TorchFunctionMode):
    """Repeats every call that depends on constants alone on real tensors."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers
        self._values: MutableMapping[Tensor, _Value] = WeakIdKeyDictionary()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = self._constant_call(function, args, kwargs)
        if call is not None and function in _QUESTIONS:
            self._answers.num_given += 1
            return call.result()
        if function is Tensor.__bool__ and (passes := passed_check(args[0])) is not None:
            return passes
        if (answer := answer_of_batch(function, args)) is not NotImplemented:
            return answer
        output = without_draws(lambda: function(*args, **kwargs))
        is_followed = call is not None and self._follow(call, output)
        if self._values and not is_followed and _may_write(function, kwargs):
            self._forget_memory_of((args, kwargs))
        return output

    def has_value(self, tensor: object) -> bool:
        """Whether the value of a tensor is known; counts as a read, because the model may depend on it."""
        value = self._value(tensor) if isinstance(tensor, Tensor) else None
        if value is not None:
            self._answers.num_given += 1
        return value is not None or getattr(tensor, "real_tensor", None) is not None

    def _constant_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> _ConstantCall | None:
        """The call on real tensors, or None if it may depend on anything but constants."""
        if function in _UNCOUNTED or _is_transforming():
            return None
        if function in _NEW or function in _LIKE_FIRST:
            args = (self._stand_in(args[0], function), *args[1:]) if args else args
        elif any(isinstance(x, Tensor) and x not in self._values for x in args):  # most calls of a model
            return None
        leaves, structure = pytree.tree_flatten((args, kwargs))
        fakes = tuple(x for x in leaves if isinstance(x, Tensor))
        values = {id(x): self._value(x) for x in fakes}
        is_constant = all(values.values()) and all(isinstance(x, Tensor) or _is_plain(x) for x in leaves)
        if not is_constant or not (fakes or function in _MAKERS):
            return None
        real_args, real_kwargs = pytree.tree_unflatten(
            [x.real if (x := values.get(id(leaf))) else leaf for leaf in leaves], structure
        )
        return _ConstantCall(function, real_args, real_kwargs, fakes)

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

    def _follow(self, call: _ConstantCall, output: Any) -> bool:
        """Repeat a call on the real tensors; returns whether the values of its results are known."""
        fakes = list(tensors_in(output))
        is_of_use = fakes or call.function is Tensor.__setitem__
        if not is_of_use or not all(_can_be_kept(x) for x in (*fakes, *call.fakes)):
            return False
        try:
            reals = list(tensors_in(call.result()))
        except Exception:  # the value stays unknown
            return False
        if len(fakes) != len(reals) or not all(map(_is_like, fakes, reals)):
            return False
        for fake, real in (*self._written(call), *zip(fakes, reals, strict=True)):
            self._values[fake] = _Value(real, _num_writes(fake))
        return True

    def _written(self, call: _ConstantCall) -> list[tuple[Tensor, Tensor]]:
        """The arguments with known values that a call wrote into."""
        values = [(fake, self._values.get(fake)) for fake in call.fakes]
        return [(fake, x.real) for fake, x in values if x is not None and x.num_writes != _num_writes(fake)]

    def _value(self, tensor: Tensor) -> _Value | None:
        value = self._values.get(tensor)
        if value is not None and value.num_writes != _num_writes(tensor):
            del self._values[tensor]
            return None
        return value

    def _forget_memory_of(self, values: object) -> None:
        if _is_transforming():  # the tensors may stand for others
            self._values.clear()
            return
        memories = set(map(_memory, tensors_in(values)))
        for tensor in [x for x in self._values if _memory(x) in memories]:
            del self._values[tensor]


def _may_write(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function may write into its arguments, or expose their memory, without torch counting the write."""
    name = getattr(function, "__name__", "").partition(".")[0]
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))
    is_foreign = isinstance(function, _OPERATORS) and str(function).partition(".")[0] != "aten"
    has_statistics = any(x in name for x in ("batch_norm", "instance_norm", "fused"))
    return is_in_place or is_foreign or has_statistics or "out" in kwargs or function in _UNCOUNTED


def _is_transforming() -> bool:
    """Whether torch.func or torch.vmap is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


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
    with torch._C.DisableTorchFunction():
        return tensor._version


def _memory(tensor: Tensor) -> int | None:
    """A key of the tensor's memory, equal for views."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def _can_be_kept(tensor: Tensor, *, any_size: bool = False) -> bool:
    with torch._C.DisableTorchFunction():
        is_plain = tensor.layout == torch.strided and not tensor.is_inference() and tensor.device.type != "meta"
        if not is_plain or not has_fixed_size(tensor):
            return False
        return any_size or tensor.numel() <= MOST_NUMBERS


def _is_like(fake: Tensor, real: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        places = [(x.shape, x.stride(), x.storage_offset(), x.dtype, x.device) for x in (fake, real)]
    return places[0] == places[1]


def _is_plain(value: object) -> bool:
    if isinstance(value, slice):
        return all(type(x) in (int, type(None)) for x in (value.start, value.stop, value.step))
    return type(value) in _PLAIN


def _not_called_fake(constants: _Constants) -> AbstractContextManager[None]:
    """Inside, `is_fake_tensor` of transformers, if it is imported, is False for tensors with known values.

    Its code calls this function before it reads values.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    plain = getattr(module, "is_fake_tensor", None)
    if plain is None:
        return nullcontext()
    return replaced(module, is_fake_tensor=lambda x: plain(x) and not constants.has_value(x))
