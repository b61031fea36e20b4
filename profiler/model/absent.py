"""Tensors without memory that act, while the author's code builds a model, as if they had some.

An absent tensor is on the meta device; the code is told that it is on the CPU. Whatever is written into one is computed
for real, random numbers included, so that all that is drawn later is what it would be. The values are dropped when
those of another come: only the last one written has them, unless the code itself holds on to their memory. What is
computed from values that are dropped is absent too; reading them, drawing by them, or building on the meta device
oneself is refused, even where the code catches the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.memory.storages import storage_key
from profiler.model.author import describe
from profiler.model.initial import on_meta

_CPU = torch.device("cpu")
_FILLS = {  # the tensor they write into is not read
    "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "bernoulli_",
    "zero_", "fill_", "copy_",
}  # fmt: skip
_READ_NO_VALUES = {  # only the shape and dtype of their operand
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
}  # fmt: skip
_ANSWERS = {Tensor.device.__get__: _CPU, Tensor.is_meta.__get__: False, Tensor.is_cpu.__get__: True}  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda)


class RefusedError(Exception):
    """The code needs values that are not there."""


@contextmanager
def absence() -> Iterator[Absence]:
    """Within it tensors may be absent; raises RefusedError at its end if the code needed values of theirs."""
    absent = Absence()
    cause: BaseException | None = None
    try:
        with _AsIfPresent(absent), _AsIfComputed(absent):
            yield absent
    except (Exception, SystemExit) as error:
        if absent.refusal is None:
            raise
        cause = error
    if absent.refusal is not None:
        raise RefusedError(absent.refusal) from cause


class Absence:
    """Which absent tensors still have values, and why the code cannot do without the others'."""

    def __init__(self) -> None:
        self.refusal: str | None = None  # the first one
        self.elsewhere: torch.device | None = None  # another device, on which the author would have drawn
        self._last: torch.UntypedStorage | None = None
        self._values: dict[int, tuple[torch.UntypedStorage, StorageWeakRef]] = {}  # by the key of the absent storage

    def parameter(self, real: nn.Parameter) -> nn.Parameter:
        """An absent parameter in place of a real one (of an absent one, itself), with its attributes and,
        until another is written, its values."""
        with torch._C.DisableTorchFunction():
            if real.is_meta:
                return real
            if real.device.type != "cpu":
                self.elsewhere = real.device
            absent = nn.Parameter(self.in_place_of(real.detach()), requires_grad=real.requires_grad)
        vars(absent).update(vars(real))
        return absent

    def in_place_of(self, real: Tensor) -> Tensor:
        """An absent tensor like a real one, which has its values as long as they are the last."""
        absent = on_meta(real)
        if real.untyped_storage().nbytes() == absent.untyped_storage().nbytes():
            self._remember(absent, real.untyped_storage())
        return absent

    def values(self, absent: Tensor) -> Tensor | None:
        """A real tensor whose memory holds the values, or None if they are dropped."""
        _, held = self._values.get(storage_key(absent), (None, None))
        storage = None if held is None else torch.UntypedStorage._new_with_weak_ptr(held.cdata)
        if storage is None or storage.nbytes() != absent.untyped_storage().nbytes():
            return None
        empty = torch.empty(0, dtype=absent.dtype)
        return empty.set_(storage, absent.storage_offset(), absent.size(), absent.stride())

    def room(self, absent: Tensor) -> Tensor:
        """A real tensor for values to be written into, which will be the last ones if they fill the absent storage."""
        num_bytes = absent.untyped_storage().nbytes()
        if absent.numel() * absent.itemsize != num_bytes:  # strides decide in what order random numbers are drawn
            return torch.empty_strided(absent.size(), absent.stride(), dtype=absent.dtype)
        self._last = None
        storage = torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]
        self._remember(absent, storage)
        return torch.empty(0, dtype=absent.dtype).set_(storage, 0, absent.size(), absent.stride())

    def drop(self, absent: Tensor) -> None:
        """Its values are no longer known."""
        self._values.pop(storage_key(absent), None)

    def refuse(self, reason: str) -> NoReturn:
        """Raise RefusedError, now and at the end."""
        self.refusal = self.refusal or reason
        raise RefusedError(reason)

    def _remember(self, absent: Tensor, storage: torch.UntypedStorage) -> None:
        self._last = storage
        self._values[storage_key(absent)] = absent.untyped_storage(), StorageWeakRef(storage)  # type: ignore[no-untyped-call]


class _AsIfPresent(TorchFunctionMode):
    """What the code asks absent tensors, and moves of theirs to a dtype or device."""

    def __init__(self, absent: Absence) -> None:
        super().__init__()
        self.absent = absent

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function == _SET_DATA:
            return function(args[0], self._alike(args[1], is_absent=args[0].is_meta))
        if not (args and isinstance(args[0], Tensor) and args[0].is_meta):
            result = function(*args, **kwargs)
            if isinstance(result, Tensor) and result.is_meta and not _absent_in((args, kwargs)):
                self.absent.refuse("its code makes tensors on the meta device")
            return result
        if function in _ANSWERS:
            return _ANSWERS[function]
        if function in _MOVES:
            return self._moved(function, *args, **kwargs)
        return function(*args, **kwargs)

    def _alike(self, value: Tensor, *, is_absent: bool) -> Tensor:
        """The value, absent or real as what it becomes the data of."""
        if value.is_meta == is_absent:
            return value
        found = self.absent.in_place_of(value) if is_absent else self.absent.values(value)
        return (
            self.absent.refuse("its code computes others from parameters that are not kept") if found is None else found
        )

    def _moved(
        self, function: Callable[..., Any], tensor: Tensor, *to: Any, copy: bool = False, **named: Any
    ) -> Tensor:
        """The tensor with its new dtype and memory format; on another device nothing is drawn any more."""
        if function is not Tensor.to:
            self.absent.elsewhere = torch.device("cuda") if function is Tensor.cuda else self.absent.elsewhere
            return tensor
        device, dtype, _, memory_format = torch._C._nn._parse_to(*to, **named)
        if device is not None and device.type not in ("cpu", "meta"):
            self.absent.elsewhere = device
        return tensor.to(dtype or tensor.dtype, copy=copy, memory_format=memory_format or torch.preserve_format)


class _AsIfComputed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations on absent tensors: on real ones where their values are there, else on their shapes alone."""

    def __init__(self, absent: Absence) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.absent = absent

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if not _absent_in((args, kwargs)):
                return function(*args, **kwargs)
            try:
                return self._computed(function, args, kwargs)
            except RefusedError:
                raise
            except Exception as error:
                self.absent.refuse(f"{function} needs the values of parameters that are not kept: {describe(error)}")

    def _computed(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = function.overloadpacket.__name__
        if name in _READ_NO_VALUES:
            return function(*args, **{**kwargs, "device": kwargs.get("device") or _CPU})
        if function.is_view or (name != "set_" and torch.Tag.inplace_view in function.tags):
            return function(*args, **kwargs)
        real = None if name == "set_" else self._real_operands(function, args, kwargs)
        if real is None:
            return self._by_shape(function, args, kwargs)
        if torch.Tag.nondeterministic_seeded in function.tags and self.absent.elsewhere is not None:
            self.absent.refuse(
                f"its code draws random numbers on {self.absent.elsewhere} for parameters that are not kept"
            )
        results = function(*_replaced(args, real), **_replaced(kwargs, real))
        if name == "_to_copy" and kwargs.get("device") is None:
            return self.absent.in_place_of(results)
        return _replaced(results, {id(real[id(x)]): x for x in _absent_in((args, kwargs))})

    def _real_operands(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Tensor] | None:
        """For the id of each absent operand a real one; None where one is read whose values are dropped."""
        absent = _absent_in((args, kwargs))
        real = {id(x): self.absent.values(x) for x in absent}
        unread = {id(x) for x in _written(function, args, kwargs, unread=True)}
        if any(values is None and key not in unread for key, values in real.items()):
            return None
        return {id(x): self.absent.room(x) if (values := real[id(x)]) is None else values for x in absent}

    def _by_shape(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation gives whose operands' values are dropped: absent tensors."""
        if torch.Tag.nondeterministic_seeded in function.tags:
            self.absent.refuse(
                f"its code draws random numbers that depend on parameters that are not kept ({function})"
            )
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags):
            self.absent.refuse("its code reads parameters that are not kept")
        for tensor in _written(function, args, kwargs):
            if not tensor.is_meta:
                self.absent.refuse("its code computes others from parameters that are not kept")
            self.absent.drop(tensor)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        real = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not x.is_meta]
        shapes = {id(x): on_meta(x) for x in real}
        return function(*_replaced(args, shapes), **_replaced(kwargs, shapes))


def _absent_in(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and x.is_meta]


def _replaced(tree: Any, by_id: dict[int, Tensor]) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: by_id.get(id(x), x), tree)


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, unread: bool = False) -> list[Tensor]:
    """The operands that an operation writes into; where `unread`, only those whose old values do not matter to it."""
    is_fill = function.overloadpacket.__name__ in _FILLS
    found: list[Any] = []
    for index, argument in enumerate(function._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and (not unread or argument.is_out or (is_fill and index == 0)):
            found.append(value)
    return [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]
