"""The moving averages of norms: which ones a forward writes, and their update once per step.

A batch norm in training mode replaces a share (the momentum) of two buffers by the mean and variance of its input; an
instance norm by their averages over the samples. Such calls are found in a graph, or recorded while the children of a
sequence run. Norms in evaluation mode or without buffers write nothing. The momentum of a cumulative average (momentum
None) depends on a tensor and cannot be part of a graph: such norms are traced with momentum 1, so that the buffers then
contain the statistics themselves.

The update follows GPipe (Huang et al. 2019, section 2.2): every micro-batch is normalised by its own statistics, and the
averages r move once, by those of the mini-batch. Each forward finds the buffers as they were before the step; what it
writes, r_i = r + momentum * (statistic_i - r), is read and r is restored. So a recompute sees the same buffers, and a
step that fails changes nothing. With n_i values per channel, N in all, in float64:

    mean = sum(n_i mean_i) / N        var = (sum((n_i - 1) var_i + n_i mean_i^2) - N mean^2) / (N - 1)

Instance norms average means and variances over the samples. A micro-batch that changes neither buffer did not call
the norm and does not count. If one forward calls a norm several times, the variance includes the spread between
micro-batches of all calls together instead of each call's own; an exported cumulative norm keeps the last call only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gplan_profiler.capture.inplace import inner_graphs
from gplan_profiler.torch_compat import BatchNorm, OpOverload, foreach_add_, foreach_copy_, replaced

_OPERANDS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum")
_OPERATORS = {"batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "instance_norm"}
_FUNCTIONS = {functional.batch_norm, functional.instance_norm}
_PLAIN_FUNCTIONS = {torch.batch_norm, torch.native_batch_norm, torch.instance_norm}  # called with _OPERANDS

Reduce = Callable[[Tensor], None]
"""Sums a tensor over the replicas, in place."""


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
        if (norm := found.get(key)) is not None:
            assert call.momentum is not None
            momentum = None if norm.momentum is None else 1 - (1 - norm.momentum) * (1 - call.momentum)
            found[key] = replace(norm, momentum=momentum, num_values=call.num_values, num_calls=norm.num_calls + 1)
            continue
        owner = owners.get(key)  # only the module has the counter of batches, and whether its average is cumulative
        tracked = getattr(owner, "num_batches_tracked", None)
        found[key] = replace(
            call,
            num_batches_tracked=tracked if isinstance(tracked, Tensor) and not call.is_per_sample else None,
            momentum=None if owner is not None and _is_cumulative(owner) else call.momentum,
        )
    return tuple(found.values())


def _is_cumulative(module: nn.Module) -> TypeGuard[BatchNorm]:
    return isinstance(module, BatchNorm) and module.momentum is None and module.num_batches_tracked is not None


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
        name = node.target._schema.name.removeprefix("aten::") if isinstance(node.target, OpOverload) else ""
        if name in _OPERATORS:
            values: list[Any] = [state.get(x, x.meta.get("val")) if isinstance(x, Node) else x for x in node.args]
            call = _call(name, dict(zip(_OPERANDS, values, strict=False)))
            if call is not None and {node.args[3], node.args[4]} <= state.keys():
                yield call
        for graph, operands in inner_graphs(node):
            inner = {x: state[y] for x, y in operands.items() if isinstance(y, Node) and y in state}
            yield from graph_calls(graph.nodes, inner)


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
        output = function(*args, **(kwargs or {}))
        if function in _PLAIN_FUNCTIONS:
            given = {**dict(zip(_OPERANDS, args, strict=False)), **(kwargs or {})}
        elif function in _FUNCTIONS:
            bound = signature(function).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            given = dict(bound.arguments)
        else:
            return output
        call = _call(function.__name__, {"training": given.get("use_input_stats"), **given})
        if call is not None:
            mean_name, var_name = self._names.get(id(call.running_mean)), self._names.get(id(call.running_var))
            if mean_name is not None and var_name is not None:
                self.calls.append(RecordedCall(mean_name, var_name, call))
        return output


class MovingAverages:
    """The moving averages of some norms on one device; each pair of buffers belongs to one norm."""

    def __init__(self, norms: Iterable[RunningNorm]) -> None:
        self._norms = tuple(norms)
        pairs = [x.running_mean for x in self._norms] + [x.running_var for x in self._norms]
        self._buffers = [x.data for x in pairs]  # written past autograd, which may have saved them
        tracked = ((i, x.num_batches_tracked) for i, x in enumerate(self._norms))
        self._tracked = {i: x.data for i, x in tracked if x is not None}
        self._cumulative = [i for i, x in enumerate(self._norms) if x.momentum is None]
        self._mixture = _BatchStatistics(self._norms) if self._norms else None
        self._before = torch.empty(0)  # in the buffers, when the step began
        self._before_by_buffer: tuple[Tensor, ...] = ()  # the same by buffer
        self._tracked_before: list[Tensor] = []
        self._after_microbatches: list[tuple[Sequence[RunningNorm], Tensor]] = []  # in the buffers by each micro-batch

    @contextmanager
    def microbatch(self, norms: Sequence[RunningNorm]) -> Iterator[None]:
        """Run the forward of one micro-batch, not its recompute; restores the buffers.

        `norms` are those of the running capture, on the same buffers. A forward that raises does not count.
        """
        if self._mixture is None:
            yield
            return
        if not self._after_microbatches:
            self._before = torch.cat(self._buffers)
            self._before_by_buffer = torch.split(self._before, self._mixture.sizes)
            self._tracked_before = [x.clone() for x in self._tracked.values()]
        for i in self._cumulative:
            self._tracked[i].zero_()  # the forward then averages its own calls alone
        try:
            yield
            self._after_microbatches.append((norms, torch.cat(self._buffers)))
        finally:
            foreach_copy_(self._buffers, self._before_by_buffer)
            if self._tracked:
                foreach_copy_(list(self._tracked.values()), self._tracked_before)

    def finish(self, reduce: Reduce | None = None) -> None:
        """Move the averages by all micro-batches since the last step.

        `reduce` is called once, on all replicas with tensors of the same length, also without micro-batches.
        """
        if self._mixture is None:
            return
        known: dict[int, list[int]] = {}  # values per channel of each norm, by capture; 0 if it does not have the norm
        for norms, _ in self._after_microbatches:
            if id(norms) not in known:
                given = {id(x.running_mean): x.num_values for x in norms}
                known[id(norms)] = [given.get(id(x.running_mean), 0) for x in self._norms]
        num_values = [known[id(norms)] for norms, _ in self._after_microbatches]
        sums = self._mixture.sums(self._before, [left for _, left in self._after_microbatches], num_values)
        if reduce is not None:
            reduce(sums)
        shares = [  # the weight of this mini-batch in each norm's averages
            x.num_calls / (self._tracked[i] + x.num_calls) if x.momentum is None else x.momentum
            for i, x in enumerate(self._norms)
        ]
        num_calls, moved = self._mixture.moved(torch.cat(self._buffers), sums, shares)
        foreach_copy_(self._buffers, torch.split(moved, self._mixture.sizes))
        if self._tracked:
            by_norm = num_calls.unbind()
            foreach_add_(list(self._tracked.values()), [by_norm[i] for i in self._tracked])
        self.discard()

    def discard(self) -> None:
        """Forget the micro-batches of a failed step; the buffers are unchanged."""
        self._after_microbatches.clear()


class _BatchStatistics:
    """Combines statistics of micro-batches into those of the mini-batch, for all channels of all norms at once.

    With B norms and C channels in total, a tensor of buffers has 2C entries: all means, then all variances.
    """

    def __init__(self, norms: Sequence[RunningNorm]) -> None:
        channels = [x.running_mean.numel() for x in norms]
        shares = [1.0 if x.momentum is None else x.momentum for x in norms]
        device = norms[0].running_mean.device
        self.sizes = channels * 2  # of the buffers
        self._norm_of = torch.repeat_interleave(torch.tensor(channels)).to(device)  # of every channel
        self._last_channel = torch.tensor(channels, device=device).cumsum(0) - 1  # of every norm
        self._num_calls = torch.tensor([x.num_calls for x in norms], device=device)
        self._never_moves = torch.tensor([x == 0 for x in shares], device=device)
        self._divisor = self._by_channel([x or 1.0 for x in shares]).repeat(2)
        self._spread = self._by_channel([0.0 if x.is_per_sample else 1.0 for x in norms])

    def sums(self, found: Tensor, left: Sequence[Tensor], num_values: Sequence[Sequence[int]]) -> Tensor:
        """Return sums over micro-batches: n by norm; n mean and (n - 1) var + n mean^2 by channel; shape (B + 2C,).

        `found` are the buffers before each micro-batch, `left` those after it, `num_values` the n_i of each norm.
        Mostly in place, as allocating takes longer than the arithmetic.
        """
        if not left:
            return self._divisor.new_zeros(len(self._num_calls) + 2 * len(self._norm_of))
        before = found.double()
        change = torch.stack(tuple(left)).double().sub_(before)
        count = torch.tensor(num_values, dtype=torch.float64, device=found.device)
        changed_mean, changed_var = (change != 0).chunk(2, dim=1)
        so_far = (changed_mean | changed_var).cumsum(1)[:, self._last_channel]  # of this norm and those before it
        count *= (so_far.diff(dim=1, prepend=torch.zeros_like(so_far[:, :1])) > 0) | self._never_moves  # it was called
        n = count[:, self._norm_of]
        mean, var = change.div_(self._divisor).add_(before).chunk(2, dim=1)  # of each micro-batch
        of_means = n * mean
        totals = of_means.sum(0)
        squares = of_means.mul_(mean).mul_(self._spread).addcmul_(n.sub_(self._spread).clamp_(min=0), var)
        return torch.cat([count.sum(0), totals, squares.sum(0)])

    def moved(self, now: Tensor, sums: Tensor, shares: Sequence[float | Tensor]) -> tuple[Tensor, Tensor]:
        """Return the number of calls by norm, and the buffers `now` moved by `shares`."""
        count, total, squares = torch.split(sums, [len(self._num_calls), len(self._norm_of), len(self._norm_of)])
        n, share = count[self._norm_of], self._by_channel(shares)
        mean = total / n
        var = (squares - self._spread * n * mean**2).clamp(min=0) / (n - self._spread)
        moved = now + share.repeat(2) * (torch.cat([mean, var]) - now)
        return self._num_calls * (count > 0), torch.where(n.repeat(2) > 0, moved, now.double())

    def _by_channel(self, values: Sequence[float | Tensor]) -> Tensor:
        by_norm = torch.tensor([float(x) for x in values], dtype=torch.float64, device=self._norm_of.device)
        return by_norm[self._norm_of]
