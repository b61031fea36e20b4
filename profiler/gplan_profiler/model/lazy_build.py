"""Build a model without memory for its weights.

`build_without_weights` creates tensors that can only be weights on the meta device, which `to_fake_tensors` turns into
fake tensors.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from gplan.core.errors import ModelError, UsageError
from gplan.core.units import some_names
from gplan_profiler.model.error_location import describe
from gplan_profiler.model.materialise import parameter_as
from gplan_profiler.torch_compat import FakeTensor, FakeTensorMode, parse_to

Built = TypeVar("Built")

_MOST_REAL_NUMBERS = 2**16  # of a tensor that is random or empty, while it is no parameter
_MOST_REAL_CONSTANTS = 2**22

_MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda)
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
        if function in _MOST_REAL and "out" not in kwargs:  # on the meta device if it is large, else as requested
            on_meta = {name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")}
            with suppress(TypeError, RuntimeError):  # torch.normal of two tensors takes no device
                value = function(*args, **{**on_meta, "device": "meta"})
                if value.numel() > _MOST_REAL[function]:
                    return value
            return function(*args, **kwargs)
        if not (args and isinstance(args[0], Tensor) and args[0].is_meta):
            return function(*args, **kwargs)
        if function in _MOVES:
            return _moved(function, *args, **kwargs)
        return function(*args, **{name: value for name, value in kwargs.items() if name != "generator"})


def _moved(function: Callable[..., Any], tensor: Tensor, *to: Any, copy: bool = False, **named: Any) -> Tensor:
    """A meta tensor with its new dtype and memory format; the device to which the code moves it has no effect."""
    if function is not Tensor.to:
        return tensor
    _, dtype, _, memory_format = parse_to(*to, **named)
    return tensor.to(dtype or tensor.dtype, copy=copy, memory_format=memory_format or torch.preserve_format)


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
                            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                            fakes[tensor] = parameter_as(fake, tensor) if isinstance(tensor, nn.Parameter) else fake
                            if not isinstance(tensor, nn.Parameter):
                                vars(fakes[tensor]).update(vars(tensor))
                        cast(dict[str, Tensor | None], registry)[name] = fakes[tensor]
    return tuple(lost)


def lost_values_note(names: Sequence[str]) -> tuple[str, ...]:
    """A note on buffers or tensors that lost their values."""
    if not names:
        return ()
    return (f"built without its weights, the model has ones or zeros where its code computed {some_names(names)}",)


def _recover(module: nn.Module, path: str, made: MutableMapping[Tensor, Tensor]) -> list[str]:
    """Give the module's meta buffers and plain tensors, if not large, memory and values; returns those that lost theirs.

    Values that the module cannot compute again become ones for floats (norms, masks, scales), else zeros (indices).
    """
    found: dict[str, Tensor] = {}
    for registry in (module._buffers, vars(module)):
        for name, tensor in registry.items():
            is_large = isinstance(tensor, Tensor) and tensor.numel() > _MOST_REAL_CONSTANTS
            if isinstance(tensor, Tensor) and tensor.is_meta and not (isinstance(tensor, nn.Parameter) or is_large):
                one = int(tensor.is_floating_point() or tensor.is_complex())
                registry[name] = found[name] = made.setdefault(tensor, torch.full_like(tensor, one, device="cpu"))
    if found:
        with suppress(Exception):  # a module without them, or with a method that needs more
            module.reset_running_stats()  # type: ignore[operator]
    return [f"{path}.{name}".removeprefix(".") for name, tensor in found.items() if not tensor._version]


def fake_mode_of(model: nn.Module) -> FakeTensorMode | None:
    """The mode of the model's fake tensors; None for a real model."""
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return None
