"""torch's private names, what gplan patches in it, and what differs between its versions: nothing else uses any of these.

Supported are OLDEST to NEWEST_TESTED, on which the tests of this module ran; a newer torch is tried, with a note. Contracts
of these names: `tests/profiler/test_torch_compat.py`.

Why private names are needed at all: a trace keeps constants and whole calls, which takes torch's dispatcher; a stage's
memory is read off the allocator's record; FSDP2 reduces the gradients of many micro-batches at once.
"""

# ruff: noqa: E402
from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import BuiltinMethodType
from typing import Any

import torch

from gplan.core.errors import UsageError

OLDEST, NEWEST_TESTED = (2, 11), (2, 15)


def version_problem(version: str) -> str | None:
    """Return what is wrong with a version of torch, with the command that mends it; None if gplan runs on it.

    >>> version_problem("2.11.0+cu130") is version_problem("2.16.0a0") is None
    True
    >>> version_problem("2.9.1")
    'torch 2.9.1 is too old: gplan needs torch 2.11 or newer; install one with: pip install "torch>=2.11"'
    """
    found = _numbers(version)
    if found is None or found >= OLDEST:
        return None
    oldest = ".".join(map(str, OLDEST))
    return (
        f"torch {version} is too old: gplan needs torch {oldest} or newer; install one with: "
        f'pip install "torch>={oldest}"'
    )


def torch_notes(version: str = str(torch.__version__)) -> tuple[str, ...]:
    """Notes on a version of torch: that it is newer than the tested ones."""
    found = _numbers(version)
    if found is None or found <= NEWEST_TESTED:
        return ()
    newest = ".".join(map(str, NEWEST_TESTED))
    return (f"torch {version} is newer than {newest}, the newest that gplan was tested with",)


def start_autograd() -> None:
    """Run the first backward of the process, before any tensor is faked.

    torch then starts a thread for each device that is not a CPU, after which forks cannot run a backward. On a host without
    a GPU, CUDA builds of torch (2.11, 2.13 and 2.15) report no device, but eight after a fake tensor was made.
    """
    torch.zeros((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]


def _numbers(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]))


if problem := version_problem(str(torch.__version__)):  # before names that an old torch does not have
    raise UsageError(problem)

logging.getLogger("torch.utils.flop_counter").setLevel("ERROR")  # CUDA builds warn that they count no triton kernels

import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._profiler import _EventType as EventType
from torch._C._profiler import _RecordFunctionFast as RecordFunctionFast
from torch._functorch import config as functorch_config
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload, OpOverloadPacket, _get_dispatch_mode_pre_dispatch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.utils import clip_grad
from torch.nn.utils.stateless import _reparametrize_module as reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils.flop_counter import flop_registry

__all__ = [
    "BatchNorm",
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DynamicOutputShapeException",
    "EventType",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "OperatorBase",
    "PythonFunction",
    "RecordFunctionFast",
    "TorchDispatchMode",
    "disable_current_modes",
    "flop_registry",
    "foreach_add_",
    "foreach_copy_",
    "functorch_config",
    "parse_to",
    "pytree",
    "reparametrize_module",
]

DisableTorchFunction = torch._C.DisableTorchFunction
PythonFunction: type = torch._C._FunctionBase  # the nodes of a graph that are written in Python
foreach_add_, foreach_copy_ = torch._foreach_add_, torch._foreach_copy_
parse_to = torch._C._nn._parse_to  # the arguments of `.to`


class TorchDispatchMode(_TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees operations of all kinds, those of higher order (flex_attention) too, which torch's own class refuses."""

    supports_higher_order_operators = True


# --- patches


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Inside, some attributes of a module, class or object have other values; those of a class may be inherited."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner) or not hasattr(owner, name)}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def module_calls_replaced(call: Callable[..., Any]) -> AbstractContextManager[None]:
    """Inside, a call of a module is `call(plain, module, *args, **kwargs)`; `plain(module, ...)` is the original call."""
    plain: Callable[..., Any] = nn.Module._call_impl

    def replacement(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(plain, module, *args, **kwargs)

    return replaced(nn.Module, _call_impl=replacement)


def module_moves_replaced(to: Callable[..., Any]) -> AbstractContextManager[None]:
    """Inside, `module.to(...)` is `to(module, ...)`."""
    return replaced(nn.Module, to=to)


@contextmanager
def function_calls_replaced(call: Callable[..., Any], modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Inside, a call of a custom autograd function is `call(plain, function, *args, **kwargs)`; `plain(*args, **kwargs)` is the original call.

    Scripts keep `Function.apply` in names of their own (`scan = Scan.apply`), which no attribute replaces. Outside transforms
    such as torch.vmap it is the `apply` of its base class that is replaced, which it calls; since torch 2.15 it is a method
    in C that calls none, and these names are replaced too: those of scripts, and attributes of these modules.
    """
    own, base = torch.autograd.Function.__dict__["apply"], torch.autograd.function._SingleLevelFunction
    is_python = isinstance(own, classmethod)  # before torch 2.15

    def everywhere(function: Any, *args: Any, **kwargs: Any) -> Any:
        plain = own.__get__(None, function)
        if is_python and not torch._C._are_functorch_transforms_active():
            return plain(*args, **kwargs)
        return call(plain, function, *args, **kwargs)

    def outside(function: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super(base, function).apply
        return (
            call(plain, function, *args, **kwargs)
            if issubclass(function, torch.autograd.Function)
            else plain(*args, **kwargs)
        )

    names = [] if is_python else list(_names_of_calls(modules))
    with (
        replaced(torch.autograd.Function, apply=classmethod(everywhere)),
        replaced(base, apply=classmethod(outside)) if is_python else nullcontext(),
    ):
        try:
            for holder, name, kept in names:
                holder[name] = partial(everywhere, kept.__self__)
            yield
        finally:
            for holder, name, kept in names:
                holder[name] = kept


def _names_of_calls(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The names of scripts and modules for a method in C `Function.apply`: the dictionary, the name and the method."""
    for holder in [getattr(x, "__dict__", {}) for x in (*sys.modules.values(), *modules)]:
        for name, x in [*holder.items()]:
            is_call = type(x) is BuiltinMethodType and x.__name__ == "apply" and isinstance(x.__self__, type)
            if is_call and issubclass(x.__self__, torch.autograd.Function):
                yield holder, name, x


def autocast_replaced(enter: Callable[..., Any]) -> AbstractContextManager[None]:
    """Inside, entering torch.autocast calls `enter`."""
    return replaced(torch.autocast, __enter__=enter)


def checkpoint_replaced(*, kept: Callable[..., Any], reentrant: object) -> AbstractContextManager[None]:
    """Inside, torch's checkpoint is `kept` (a generator function), and its reentrant form is `reentrant`."""
    module = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator_impl"  # since torch 2.14
    name = name if name in vars(module) else name.removesuffix("_impl")
    return replaced(module, **{name: kept}, CheckpointFunction=reentrant)


def gradient_calls_replaced(call: Callable[..., Any]) -> AbstractContextManager[None]:
    """Inside, `torch.autograd.grad` and `backward` call this function."""
    return replaced(torch.autograd, grad=call, backward=call)


def seen_as_plain_run() -> AbstractContextManager[None]:
    """Inside, libraries that ask torch.compiler take the path of a plain run, not that for torch.export."""
    return replaced(torch.compiler, is_exporting=lambda: False, is_compiling=lambda: False)


def scripts_as_python() -> AbstractContextManager[None]:
    """Inside, a function that torch.jit.script made runs as the Python function it was made from.

    The operations of an optimized script are a graph of its own with a backward of its own, which no trace sees.
    """
    own = torch.jit.ScriptFunction.__call__

    def call(script: Any, *args: Any, **kwargs: Any) -> Any:
        python = getattr(script, "_torchdynamo_inline", None)
        return own(script, *args, **kwargs) if python is None else python(*args, **kwargs)

    return replaced(torch.jit.ScriptFunction, __call__=call)


def without_stack_traces() -> AbstractContextManager[None]:
    """Inside, torch.fx records no stack traces, which take longer than a trace itself (torch 2.12 and newer)."""
    name = "do_not_emit_stack_traces"
    return replaced(torch.fx.config, **{name: True}) if name in vars(torch.fx.config) else nullcontext()


@contextmanager
def real_values_kept() -> Iterator[None]:
    """Inside, fake tensors have the values of a run beside them.

    Floating-point numbers stay unknown: torch adds no assertion to the graph for a decision by one.
    """
    keep = ShapeEnv.set_real_tensor_prop_unbacked_vals

    def keep_integers(shapes: ShapeEnv, symbol: Any, value: Any) -> None:
        if symbol.is_integer:
            keep(shapes, symbol, value)

    with (
        replaced(ShapeEnv, set_real_tensor_prop_unbacked_vals=keep_integers),
        functorch_config.patch(fake_tensor_propagate_real_tensors=True),
    ):
        yield


def nested_traces_allowed() -> AbstractContextManager[object]:
    """Inside, code that torch.compile wrapped may run in a trace."""
    found: AbstractContextManager[object] = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    return found


def is_compiled_module(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def is_compiled_function(function: object) -> bool:
    """Whether torch.compile made a function."""
    return "_torchdynamo_orig_callable" in getattr(function, "__dict__", ())


def replace_clipping(total_norm: Callable[..., Tensor], clip: Callable[..., None]) -> None:
    """From now on torch's clipping computes the norm and scales by these functions, in this process."""
    vars(clip_grad)["_get_total_norm"] = vars(nn.utils)["get_total_norm"] = total_norm
    vars(clip_grad)["_clip_grads_with_norm_"] = vars(nn.utils)["clip_grads_with_norm_"] = clip


# --- tracing and autograd


def running_tracer() -> Any:
    """The tracer of the running torch.export; None outside."""
    mode = _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)  # type: ignore[no-untyped-call]
    return None if mode is None else mode.tracer


@contextmanager
def untraced() -> Iterator[None]:
    """Inside, operations on the fake tensors of a trace are not added to its graph."""
    key = torch._C.DispatchKey.PreDispatch
    included = torch._C._dispatch_tls_local_include_set().remove(key)
    excluded = torch._C._dispatch_tls_local_exclude_set() | torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch._C.DisableTorchFunction():
        yield


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """Inside, operations run on real tensors without being traced."""
    no_functions, no_dispatcher = torch._C.DisableTorchFunction(), torch._C._DisablePythonDispatcher()
    with no_functions, disable_current_modes(), no_dispatcher, torch.no_grad():
        yield


def is_transforming() -> bool:
    """Whether torch.func or torch.vmap is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor is that of a transform such as torch.vmap."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_profiler_running() -> bool:
    """Whether torch.profiler records."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


# --- a GPU's queue and memory


def spin_on_gpu(num_cycles: int) -> None:
    """Enqueue a kernel that does nothing for so many cycles of the GPU's clock."""
    torch.cuda._sleep(num_cycles)  # type: ignore[no-untyped-call]


@contextmanager
def cuda_memory_history(device: int) -> Iterator[list[Any]]:
    """Record the allocations on a GPU; the yielded list has their events after the block."""
    events: list[Any] = []
    torch.cuda.memory._record_memory_history(context=None, stacks="python", clear_history=True)
    try:
        yield events
        events += torch.cuda.memory._snapshot()["device_traces"][device]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


# --- sharded replicas (FSDP2)


def _sharded_states(module: nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(module)  # type: ignore[attr-defined]


def _groups(state: Any) -> list[Any]:
    """The groups of parameters of an FSDP state: one until torch 2.11, a list from 2.12 on."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def finish_sharded_backward(module: Any) -> None:
    """Reduce-scatter the gradients that several backwards of an FSDP2 module summed, and free its parameters. Collective.

    torch does so only in a backward that is marked as the last; here it is done after it.
    """
    module.set_is_last_backward(True)
    module.set_reshard_after_backward(True)
    module.set_requires_gradient_sync(True)
    root = _sharded_states(module)
    for state in root._state_ctx.all_states:
        for group in _groups(state):
            group.post_backward()
    root._root_post_backward_final_callback()


def reset_sharded(module: Any) -> None:
    """Bring an FSDP2 module back to its state between steps after a step that failed, without its gradients.

    Gradients of earlier steps stay, which `FSDPModule.reset_iter_state` of torch 2.15 drops.
    """
    root = _sharded_states(module)
    groups = [group for state in root._state_ctx.all_states for group in _groups(state)]
    divided = [x.sharded_param for group in groups for x in group.fsdp_params]
    kept = [(x, x.grad) for x in divided]
    if hasattr(module, "reset_iter_state"):  # torch 2.13 and newer
        module.reset_iter_state()
    else:
        _reset_before_2_13(root)
    for parameter, gradient in kept:
        parameter.grad = gradient


def _reset_before_2_13(root: Any) -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    context = root._comm_ctx
    context.all_gather_state = None
    context.post_forward_order.clear()
    if hasattr(context, "reduce_scatter_states"):
        context.reduce_scatter_states.clear()
    else:
        context.reduce_scatter_state = None
    idle = type(root._training_state).IDLE
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
        for group in _groups(state):
            if group._all_gather_result is not None and hasattr(group._all_gather_result.all_gather_work, "wait"):
                group._all_gather_result.all_gather_work.wait()
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def gather_asynchronously(module: Any) -> None:
    """Let an FSDP2 module's gathers on a CPU be asynchronous; else a message is freed only after the next one's copy."""
    module._set_unshard_async_op(True)
