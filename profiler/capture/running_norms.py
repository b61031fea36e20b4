"""Find the norms with moving averages: which buffers a forward writes, with what momentum, from how many values.

A batch norm in training mode replaces a share (the momentum) of two buffers by the mean and variance of its input; an
instance norm by their averages over the samples. Such calls are found in a graph, or recorded while the children of a
sequence run. Norms in evaluation mode or without buffers write nothing. The momentum of a cumulative average (momentum
None) depends on a tensor and cannot be part of a graph: such norms are traced with momentum 1, so that the buffers then
contain the statistics themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Node
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from profiler.capture.authored_layers import replaced
from profiler.capture.inplace import inner_graphs

_OPERANDS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum")
_OPERATORS = {"batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "instance_norm"}
_FUNCTIONS = {functional.batch_norm, functional.instance_norm}
_PLAIN_FUNCTIONS = {torch.batch_norm, torch.native_batch_norm, torch.instance_norm}  # called with _OPERANDS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunningNorm:
    """The update of one pair of buffers in a forward of one micro-batch."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor | None
    momentum: float | None  # share replaced by all calls of a forward; None: the average of all batches
    num_values: int  # per channel, in one call; the number of samples if `is_per_sample`
    num_calls: int
    is_per_sample: bool  # statistics are averages over the samples, as an instance norm's

    @property
    def buffers(self) -> list[Tensor]:
        """Its buffers; the first two are the averages."""
        return [x for x in (self.running_mean, self.running_var, self.num_batches_tracked) if x is not None]

    def backed_by(self, real: Mapping[int, Tensor]) -> RunningNorm:
        """The same norm with buffers replaced by `real`, by their ids."""
        tracked = self.num_batches_tracked
        return replace(
            self,
            running_mean=real.get(id(self.running_mean), self.running_mean),
            running_var=real.get(id(self.running_var), self.running_var),
            num_batches_tracked=None if tracked is None else real.get(id(tracked), tracked),
        )


def running_norms(model: nn.Module, calls: Iterable[RunningNorm]) -> tuple[RunningNorm, ...]:
    """One norm for every pair of buffers written by `calls`, which are in the order of a forward of `model`.

    Several calls on the same buffers are combined; of their numbers of values the last one counts.
    """
    owners = {id(x.running_mean): x for x in model.modules() if isinstance(getattr(x, "running_mean", None), Tensor)}
    found: dict[int, RunningNorm] = {}
    for call in calls:
        key = id(call.running_mean)
        found[key] = _after(found[key], call) if key in found else _owned_by(owners.get(key), call)
    return tuple(found.values())


def _owned_by(owner: nn.Module | None, call: RunningNorm) -> RunningNorm:
    """A call with what only the module knows: its counter of batches, and whether its average is cumulative."""
    tracked = getattr(owner, "num_batches_tracked", None)
    return replace(
        call,
        num_batches_tracked=tracked if isinstance(tracked, Tensor) and not call.is_per_sample else None,
        momentum=None if owner is not None and _is_cumulative(owner) else call.momentum,
    )


def _after(norm: RunningNorm, call: RunningNorm) -> RunningNorm:
    assert call.momentum is not None
    momentum = None if norm.momentum is None else 1 - (1 - norm.momentum) * (1 - call.momentum)
    return replace(norm, momentum=momentum, num_values=call.num_values, num_calls=norm.num_calls + 1)


def _is_cumulative(module: nn.Module) -> TypeGuard[_BatchNorm]:
    return isinstance(module, _BatchNorm) and module.momentum is None and module.num_batches_tracked is not None


@contextmanager
def cumulative_momentum_one(model: nn.Module) -> Iterator[None]:
    """Inside, norms with a cumulative average have momentum 1."""
    with ExitStack() as stack:
        for norm in filter(_is_cumulative, model.modules()):
            stack.enter_context(replaced(norm, momentum=1.0))
        yield


def graph_calls(nodes: Iterable[Node], state: Mapping[Node, Tensor]) -> Iterator[RunningNorm]:
    """The calls among some operations of a graph, and in the graphs that these run; `state` is the state by its nodes."""
    for node in nodes:
        if isinstance(node.target, OpOverload) and (name := _name(node.target)) in _OPERATORS:
            values: list[Any] = [state.get(x, x.meta.get("val")) if isinstance(x, Node) else x for x in node.args]
            call = _call(name, dict(zip(_OPERANDS, values, strict=False)))
            if call is not None and {node.args[3], node.args[4]} <= state.keys():
                yield call
        for graph, operands in inner_graphs(node):
            inner = {x: state[y] for x, y in operands.items() if isinstance(y, Node) and y in state}
            yield from graph_calls(graph.nodes, inner)


def _name(operator: OpOverload) -> str:
    return str(operator._schema.name.removeprefix("aten::"))


def _call(name: str, given: Mapping[str, Any]) -> RunningNorm | None:
    """The call of a norm function with these operands, if it writes moving averages."""
    mean, var, is_per_sample = given.get("running_mean"), given.get("running_var"), name == "instance_norm"
    if mean is None or var is None or not given["training"]:
        return None
    shape = given["input"].shape
    num_values = shape[0] if is_per_sample else shape.numel() // shape[1]
    return RunningNorm(
        running_mean=mean,
        running_var=var,
        num_batches_tracked=None,
        momentum=float(given["momentum"]),
        num_values=int(num_values),
        num_calls=1,
        is_per_sample=is_per_sample,
    )


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call with the names of its buffers in the calling module, so that it applies to modules like that."""

    mean_name: str
    var_name: str
    call: RunningNorm

    def within(self, module: nn.Module) -> RunningNorm:
        """The same call made by a module of the same structure."""
        mean, var = module.get_buffer(self.mean_name), module.get_buffer(self.var_name)
        return replace(self.call, running_mean=mean, running_var=var)


@contextmanager
def recorded_norms(module: nn.Module) -> Iterator[list[RecordedCall]]:
    """Inside, a list that collects the calls of norms with buffers of `module`."""
    recorder = _NormRecorder({id(buffer): name for name, buffer in module.named_buffers()})
    with cumulative_momentum_one(module), recorder:
        yield recorder.calls


class _NormRecorder(TorchFunctionMode):
    """Records the calls of norms that write into named buffers."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self._names = names

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        if function in _FUNCTIONS or function in _PLAIN_FUNCTIONS:
            self._note(function.__name__, _operands(function, args, kwargs))
        return output

    def _note(self, name: str, given: Mapping[str, Any]) -> None:
        call = _call(name, given)
        if call is None:
            return
        mean_name, var_name = self._names.get(id(call.running_mean)), self._names.get(id(call.running_var))
        if mean_name is not None and var_name is not None:
            self.calls.append(RecordedCall(mean_name, var_name, call))


def _operands(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The operands of a call, by the names of _OPERANDS."""
    if function in _PLAIN_FUNCTIONS:
        given = {**dict(zip(_OPERANDS, args, strict=False)), **kwargs}
    else:
        bound = signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
    return {"training": given.get("use_input_stats"), **given}
