"""Building a model without its weights: they become fake tensors, which have a shape, a dtype and no memory.

While the author's code builds, tensors that can only be weights (drawn at random or left empty, and not small;
constants of many millions) are made on the meta device, and whatever is registered as a parameter moves there. What
code computes and may read back (linspace with .item(), masks, tables of sines, the statistics of batch norm) stays
real. Where that fails, all of it is built on the meta device; buffers then lose their values, and those that their
module cannot compute again become ones, or zeros where they are no floats.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from gplan.errors import ModelError, UsageError
from profiler.model.author import describe
from profiler.model.initial import reset_alone

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


def built_without_weights(build: Callable[[], Built], *, what: str) -> Built:
    """What `build` returns, its new parameters on the meta device; the random state is left as it was.

    Raises ModelError for code that reads the values of weights while it builds; `what` names the model in it.
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
    """Factories of weights give meta tensors, and moving a meta tensor to a device leaves it where it is."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _MOST_REAL and "out" not in kwargs:
            return _made(function, args, kwargs)
        if not (args and isinstance(args[0], Tensor) and args[0].is_meta):
            return function(*args, **kwargs)
        if function is Tensor.to:
            return args[0].to(
                _dtype_of_move(*args, **kwargs), memory_format=kwargs.get("memory_format", torch.preserve_format)
            )
        if function in (Tensor.cpu, Tensor.cuda):
            return args[0]
        return function(*args, **{name: value for name, value in kwargs.items() if name != "generator"})


def _made(function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """On the meta device if it is large, else as the author asked for it."""
    on_meta = {name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")}
    try:
        value = function(*args, **{**on_meta, "device": "meta"})
    except (TypeError, RuntimeError):  # torch.normal of two tensors takes no device
        return function(*args, **kwargs)
    return value if value.numel() > _MOST_REAL[function] else function(*args, **kwargs)


def _dtype_of_move(tensor: Tensor, *args: Any, **kwargs: Any) -> torch.dtype:
    """The dtype that Tensor.to gives: to(dtype), to(device, dtype) or to(other)."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype | Tensor):
            return value if isinstance(value, torch.dtype) else value.dtype
    return tensor.dtype


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within it a real parameter that a module is given moves to the meta device; tied ones stay tied."""
    moved = WeakIdKeyDictionary()

    def move(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> Any:
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return None
        if parameter not in moved:
            moved[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            vars(moved[parameter]).update(vars(parameter))
        return moved[parameter]

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Afterwards torch, Python and numpy draw what they would have drawn."""
    restore = random_state()
    try:
        yield
    finally:
        restore()


def random_state() -> Callable[[], None]:
    """What sets torch, Python and numpy back to the random state they are in now."""
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


def faked(model: nn.Module) -> tuple[str, ...]:
    """Turn what the model has on the meta device into fake tensors on the CPU; the names of what lost its values.

    Parameters and large buffers become fake, all in one FakeTensorMode, tied ones tied; other buffers become real. A
    model without meta tensors stays as it is.
    """
    if not any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        return ()
    made: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
    lost = [name for path, module in model.named_modules() for name in _recover(module, path, made)]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
    with mode:
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                _fake_held(cast(dict[str, Tensor | None], held), fakes)
    return tuple(lost)


def note_on_lost(names: Sequence[str]) -> tuple[str, ...]:
    """What a reader of figures must know of a model in which these buffers or tensors lost their values."""
    if not names:
        return ()
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (f"built without its weights, the model has ones or zeros where its code computed {shown}",)


def _fake_held(held: dict[str, Tensor | None], fakes: MutableMapping[Tensor, Tensor]) -> None:
    """Replace the meta tensors of a module; to be called under the mode that the fakes are to belong to."""
    for name, tensor in held.items():
        if tensor is not None and tensor.is_meta:
            if tensor not in fakes:
                fakes[tensor] = _fake(tensor)
            held[name] = fakes[tensor]


def _fake(tensor: Tensor) -> Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
    vars(fake).update(vars(tensor))
    return fake


def _recover(module: nn.Module, path: str, made: MutableMapping[Tensor, Tensor]) -> list[str]:
    """Give the module's meta buffers and plain tensors, if not large, memory and values;
    name those whose values are lost.

    Those become ones, which norms, masks and scales can live with, or zeros, which any table has a row for.
    """
    found: dict[str, Tensor] = {}
    for held in (module._buffers, vars(module)):
        for name, tensor in held.items():
            if isinstance(tensor, Tensor) and _is_lost(tensor):
                held[name] = found[name] = made.setdefault(tensor, _placeholder(tensor))
    buffers = {name: tensor for name, tensor in found.items() if name in module._buffers}
    if buffers:
        reset_alone(module, buffers)
    return [f"{path}.{name}".removeprefix(".") for name, tensor in found.items() if not tensor._version]


def _placeholder(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, 1 if tensor.is_floating_point() or tensor.is_complex() else 0, device="cpu")


def _is_lost(tensor: Tensor) -> bool:
    return tensor.is_meta and not isinstance(tensor, nn.Parameter) and tensor.numel() <= _MOST_REAL_CONSTANTS


def fake_mode_of(model: nn.Module) -> FakeTensorMode | None:
    """The mode of the model's fake tensors, under which it can be run without memory; None for a real model."""
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return None
