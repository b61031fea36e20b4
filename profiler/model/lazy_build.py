"""Build a model without memory for its weights.

`build_without_weights` creates tensors that can only be weights on the meta device, which `to_fake_tensors` turns into
fake tensors. `absent_tensors` is for a build that must draw the same random numbers as a plain one: absent tensors are
on the meta device, but seem to be on the CPU. Writes into them are really computed, random numbers included, and only
the last written tensor keeps its values. Results computed from dropped values are absent too; reading them, drawing
random numbers by them, or building on the meta device is refused, even if the code catches the error.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from gplan.core.errors import ModelError, UsageError
from gplan.core.units import some_names
from profiler.memory.allocations import storage_key, tensors_in
from profiler.model.error_location import describe
from profiler.model.materialise import on_meta, parameter_as, reset_into

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
    """The code needs values that were dropped."""


@contextmanager
def absent_tensors() -> Iterator[AbsentTensors]:
    """Inside, tensors may be absent; raises RefusedError at the end if the code needed values of theirs."""
    absent = AbsentTensors()
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


class AbsentTensors:
    """The values that absent tensors still have, and the first reason to refuse the code."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.elsewhere: torch.device | None = None  # a device other than the CPU, on which the code would have drawn
        self._last: torch.UntypedStorage | None = None
        self._values: dict[int, tuple[torch.UntypedStorage, StorageWeakRef]] = {}  # by the key of the absent storage

    def parameter(self, real: nn.Parameter) -> nn.Parameter:
        """An absent parameter in place of a real one, with its attributes and, until another write, its values."""
        with torch._C.DisableTorchFunction():
            if real.is_meta:
                return real
            if real.device.type != "cpu":
                self.elsewhere = real.device
            return parameter_as(self.in_place_of(real.detach()), real)

    def in_place_of(self, real: Tensor) -> Tensor:
        """An absent tensor like a real one; it has its values until another write."""
        absent = on_meta(real)
        if real.untyped_storage().nbytes() == absent.untyped_storage().nbytes():
            self._remember(absent, real.untyped_storage())
        return absent

    def values(self, absent: Tensor) -> Tensor | None:
        """A real tensor with the values, or None if they are dropped."""
        _, reference = self._values.get(storage_key(absent), (None, None))
        storage = None if reference is None else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if storage is None or storage.nbytes() != absent.untyped_storage().nbytes():
            return None
        empty = torch.empty(0, dtype=absent.dtype)
        return empty.set_(storage, absent.storage_offset(), absent.size(), absent.stride())

    def buffer(self, absent: Tensor) -> Tensor:
        """A real tensor to be written into; its values become the last ones if they fill the absent storage."""
        num_bytes = absent.untyped_storage().nbytes()
        if absent.numel() * absent.itemsize != num_bytes:  # strides decide in what order random numbers are drawn
            return torch.empty_strided(absent.size(), absent.stride(), dtype=absent.dtype)
        self._last = None
        storage = torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]
        self._remember(absent, storage)
        return torch.empty(0, dtype=absent.dtype).set_(storage, 0, absent.size(), absent.stride())

    def drop(self, absent: Tensor) -> None:
        """Drop the values of an absent tensor."""
        self._values.pop(storage_key(absent), None)

    def refuse(self, reason: str) -> NoReturn:
        """Raise RefusedError now, and again at the end of `absent_tensors`."""
        self.refusal = self.refusal or reason
        raise RefusedError(reason)

    def _remember(self, absent: Tensor, storage: torch.UntypedStorage) -> None:
        self._last = storage
        self._values[storage_key(absent)] = absent.untyped_storage(), StorageWeakRef(storage)  # type: ignore[no-untyped-call]


class _AsIfPresent(TorchFunctionMode):
    """Answers queries of absent tensors, and moves them to a dtype or device."""

    def __init__(self, absent: AbsentTensors) -> None:
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
                self.absent.refuse("its code creates tensors on the meta device")
            return result
        if function in _ANSWERS:
            return _ANSWERS[function]
        if function in _MOVES:
            moved, device = _moved(function, *args, **kwargs)
            if device is not None and device.type not in ("cpu", "meta"):
                self.absent.elsewhere = device
            return moved
        return function(*args, **kwargs)

    def _alike(self, value: Tensor, *, is_absent: bool) -> Tensor:
        """The value for an assignment to `.data`, absent or real like its target."""
        if value.is_meta == is_absent:
            return value
        found = self.absent.in_place_of(value) if is_absent else self.absent.values(value)
        if found is None:
            self.absent.refuse("its code computes others from parameters that are not kept")
        return found


def _moved(
    function: Callable[..., Any], tensor: Tensor, *to: Any, copy: bool = False, **named: Any
) -> tuple[Tensor, torch.device | None]:
    """A meta tensor with its new dtype and memory format, and the device to which the code moves it."""
    if function is not Tensor.to:
        return tensor, torch.device("cuda") if function is Tensor.cuda else None
    device, dtype, _, memory_format = torch._C._nn._parse_to(*to, **named)
    return tensor.to(dtype or tensor.dtype, copy=copy, memory_format=memory_format or torch.preserve_format), device


class _AsIfComputed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on absent tensors with their values if they exist, else on shapes alone."""

    def __init__(self, absent: AbsentTensors) -> None:
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
        """A real tensor for the id of each absent operand; None if one is read whose values are dropped."""
        absent = _absent_in((args, kwargs))
        real = {id(x): self.absent.values(x) for x in absent}
        unread = {id(x) for x in _written(function, args, kwargs, unread=True)}
        if any(values is None and key not in unread for key, values in real.items()):
            return None
        return {id(x): self.absent.buffer(x) if (values := real[id(x)]) is None else values for x in absent}

    def _by_shape(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation on dropped values: absent tensors."""
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
        shapes = {id(x): on_meta(x) for x in tensors_in((args, kwargs)) if not x.is_meta}
        return function(*_replaced(args, shapes), **_replaced(kwargs, shapes))


def _absent_in(tree: Any) -> list[Tensor]:
    return [x for x in tensors_in(tree) if x.is_meta]


def _replaced(tree: Any, by_id: dict[int, Tensor]) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: by_id.get(id(x), x), tree)


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, unread: bool = False) -> list[Tensor]:
    """The operands that an operation writes into; if `unread`, only those whose old values it does not read."""
    is_fill = function.overloadpacket.__name__ in _FILLS
    found: list[Any] = []
    for index, argument in enumerate(function._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and (not unread or argument.is_out or (is_fill and index == 0)):
            found.append(value)
    return list(tensors_in(found))


Built = TypeVar("Built")

_MOST_REAL_NUMBERS = 2**16  # of a tensor that is random or empty, while it is no parameter
_MOST_REAL_CONSTANTS = 2**22

_WEIGHT_MAKERS = {
    torch.empty, torch.empty_like, torch.empty_strided, torch.rand, torch.rand_like, torch.randn, torch.randn_like,
    torch.randint, torch.normal, Tensor.new_empty, Tensor.new_empty_strided,
}  # fmt: skip
_CONSTANT_MAKERS = {
    torch.zeros, torch.zeros_like, torch.ones, torch.ones_like, torch.full, torch.full_like, torch.eye,
    Tensor.new_zeros, Tensor.new_ones, Tensor.new_full,
}  # fmt: skip
_MOST_REAL = dict.fromkeys(_WEIGHT_MAKERS, _MOST_REAL_NUMBERS) | dict.fromkeys(_CONSTANT_MAKERS, _MOST_REAL_CONSTANTS)


def build_without_weights(build: Callable[[], Built], *, what: str) -> Built:
    """The result of `build` with its new parameters on the meta device; the random state is left unchanged.

    Tensors that can only be weights (random or empty and not small, or constants of many millions) are created on the
    meta device; others that the code may read back (linspace, masks, tables, statistics of batch norms) stay real. If
    that fails, everything is built on the meta device, and buffers lose their values. Raises ModelError, with `what` as
    the model's name, for code that reads the values of weights.
    """
    failures: list[BaseException] = []
    for device in (nullcontext(), torch.device("meta")):
        try:
            with random_state_kept(), warnings.catch_warnings(), _parameters_on_meta(), _WeightsOnMeta(), device:
                warnings.filterwarnings("ignore", message="for .*: copying from a non-meta parameter")
                return build()
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            failures.append(error)
    raise ModelError(
        f"{what} cannot be built without its weights: {describe(failures[0])}; expected code that does not read the "
        "values of weights while it builds the model"
    ) from failures[0]


class _WeightsOnMeta(TorchFunctionMode):
    """Factories of weights return meta tensors; moving a meta tensor to a device has no effect."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _MOST_REAL and "out" not in kwargs:
            return _made(function, args, kwargs)
        if not (args and isinstance(args[0], Tensor) and args[0].is_meta):
            return function(*args, **kwargs)
        if function in _MOVES:
            return _moved(function, *args, **kwargs)[0]
        return function(*args, **{name: value for name, value in kwargs.items() if name != "generator"})


def _made(function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tensor on the meta device if it is large, else as requested."""
    on_meta = {name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")}
    try:
        value = function(*args, **{**on_meta, "device": "meta"})
    except (TypeError, RuntimeError):  # torch.normal of two tensors takes no device
        return function(*args, **kwargs)
    return value if value.numel() > _MOST_REAL[function] else function(*args, **kwargs)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, real parameters move to the meta device when a module registers them; tied ones stay tied."""
    moved = WeakIdKeyDictionary()

    def move(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> Any:
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return None
        if parameter not in moved:
            moved[parameter] = parameter_as(parameter.detach().to("meta"), parameter)
        return moved[parameter]

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random state of torch, Python and numpy at the end."""
    restore = random_state()
    try:
        yield
    finally:
        restore()


def seed_everything(seed: int) -> None:
    """Seed the random numbers of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def random_state() -> Callable[[], None]:
    """A function that restores the current random state of torch, Python and numpy."""
    python_state, torch_state, numpy = random.getstate(), torch.random.get_rng_state(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpu_states = torch.cuda.get_rng_state_all() if on_gpu else []

    def restore() -> None:
        random.setstate(python_state)
        torch.random.set_rng_state(torch_state)
        torch.cuda.set_rng_state_all(gpu_states)
        if numpy:
            numpy.random.set_state(numpy_state)

    return restore


def to_fake_tensors(model: nn.Module) -> tuple[str, ...]:
    """Turn a model's meta tensors into fake tensors on the CPU; returns the names of tensors that lost their values.

    Parameters and large buffers become fake, in one FakeTensorMode, and tied ones stay tied; other buffers become real.
    """
    if not any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        return ()
    made: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
    lost = [name for path, module in model.named_modules() for name in _recover(module, path, made)]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
    with mode:
        for module in model.modules():
            for registry in (module._parameters, module._buffers):
                for name, tensor in registry.items():
                    if tensor is not None and tensor.is_meta:
                        if tensor not in fakes:
                            fakes[tensor] = _fake(tensor)
                        cast(dict[str, Tensor | None], registry)[name] = fakes[tensor]
    return tuple(lost)


def lost_values_note(names: Sequence[str]) -> tuple[str, ...]:
    """A note on buffers or tensors that lost their values."""
    if not names:
        return ()
    return (f"built without its weights, the model has ones or zeros where its code computed {some_names(names)}",)


def _fake(tensor: Tensor) -> Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return parameter_as(fake, tensor)
    vars(fake).update(vars(tensor))
    return fake


def _recover(module: nn.Module, path: str, made: MutableMapping[Tensor, Tensor]) -> list[str]:
    """Give the module's meta buffers and plain tensors, if not large, memory and values; returns those that lost theirs.

    Values that the module cannot compute again become ones for floats (norms, masks, scales), else zeros (indices).
    """
    found: dict[str, Tensor] = {}
    for registry in (module._buffers, vars(module)):
        for name, tensor in registry.items():
            if isinstance(tensor, Tensor) and _is_lost(tensor):
                registry[name] = found[name] = made.setdefault(tensor, _placeholder(tensor))
    buffers = {name: tensor for name, tensor in found.items() if name in module._buffers}
    if buffers:
        reset_into(module, buffers)
    return [f"{path}.{name}".removeprefix(".") for name, tensor in found.items() if not tensor._version]


def _placeholder(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, 1 if tensor.is_floating_point() or tensor.is_complex() else 0, device="cpu")


def _is_lost(tensor: Tensor) -> bool:
    return tensor.is_meta and not isinstance(tensor, nn.Parameter) and tensor.numel() <= _MOST_REAL_CONSTANTS


def fake_mode_of(model: nn.Module) -> FakeTensorMode | None:
    """The mode of the model's fake tensors; None for a real model."""
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return None
