"""Costs of one layer: durations with their spread, bytes, and counted operations.

Seconds and bytes are per micro-batch, except bytes of weights. A storage that several layers keep for the backward pass
is counted once, in the stash of the layer that produced it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import sqrt
from typing import Any, NamedTuple

from gplan.core.checks import OperationKind, Origin, check_amounts, check_factor, check_positive, check_slow_down

_QUARTILES_APART = 1.35  # of a normal distribution, in standard deviations
_MEDIAN_ERROR = 1.25  # standard error of a median, in standard deviations over sqrt(n)


def quartiles_median_error(low: float, high: float, num_samples: int) -> float:
    """The standard error of the median of samples with these quartiles, exact for many normal samples."""
    return _MEDIAN_ERROR * (high - low) / _QUARTILES_APART / sqrt(num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A duration with its spread: the median of the samples and their quartiles, in seconds."""

    median_s: float
    low_s: float
    high_s: float
    num_samples: int
    num_refused: int = 0  # samples discarded because the thread lost its core
    origin: Origin = "measured"

    def __post_init__(self) -> None:
        check_amounts(self)
        if not self.low_s <= self.median_s <= self.high_s:
            raise ValueError(f"median_s is {self.median_s!r}; expected {self.low_s!r} <= median_s <= {self.high_s!r}")

    def plus(self, seconds: float) -> Timing:
        """This duration and a fixed part, which may be negative; at least 0."""
        low_s, median_s, high_s = (max(0.0, x + seconds) for x in (self.low_s, self.median_s, self.high_s))
        return replace(self, low_s=low_s, median_s=median_s, high_s=high_s)

    def times(self, factor: float) -> Timing:
        """This duration times a factor."""
        return replace(self, low_s=self.low_s * factor, median_s=self.median_s * factor, high_s=self.high_s * factor)

    def corrected(self, factor: float) -> Timing:
        """This duration times a factor, marked as computed unless the factor is 1."""
        return self if factor == 1.0 else replace(self.times(factor), origin="computed")

    @classmethod
    def exactly(cls, seconds: float, *, origin: Origin = "given") -> Timing:
        """A duration without spread."""
        return cls(median_s=seconds, low_s=seconds, high_s=seconds, num_samples=0, origin=origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Operations of one kind for one micro-batch: counted, not timed."""

    kind: OperationKind
    num_operations: int
    num_flops: int
    num_bytes: int  # read and written: operands and results of each operation, once

    def __post_init__(self) -> None:
        check_amounts(self)

    def __add__(self, other: Work) -> Work:
        """The sum; raises ValueError for different kinds."""
        if self.kind != other.kind:
            raise ValueError(f"cannot add {other.kind} to {self.kind}; expected one kind of operation")
        return Work(
            kind=self.kind,
            num_operations=self.num_operations + other.num_operations,
            num_flops=self.num_flops + other.num_flops,
            num_bytes=self.num_bytes + other.num_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Bytes that the backward of a later layer leaves allocated while the backward of an earlier layer runs."""

    num_later: int  # distance to the later layer; the loss counts as the layer after the last
    num_bytes: int  # allocated by it and still held, less what it freed of the earlier layers' stashes

    def __post_init__(self) -> None:
        check_positive(self, "num_later")


class Lifetime(NamedTuple):
    """A tensor of a layer, and when it is there.

    Times number the kernels of a forward and then of its backward: those of the forward are below
    `LayerCost.num_forward_times`. A tensor that is there at the end of the forward is kept until the backward.
    """

    num_bytes: int
    made: int  # at this time
    freed: int  # after this time


def leftovers_of(pairs: Iterable[tuple[int, int]]) -> tuple[Leftover, ...]:
    """Leftovers by (num_later, num_bytes); those of the same layer are added up."""
    found: dict[int, int] = {}
    for num_later, num_bytes in pairs:
        found[num_later] = found.get(num_later, 0) + num_bytes
    return tuple(Leftover(num_later=num_later, num_bytes=num_bytes) for num_later, num_bytes in found.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Costs of one layer for a micro-batch of `microbatch_size` samples, and the tensors alive at the cut after it."""

    microbatch_size: int
    forward: Timing
    backward: Timing  # with gradient buffers already allocated
    stash_bytes: int  # produced here and kept until the backward pass
    forward_workspace_bytes: int  # transient peak of the forward pass above what stays
    backward_workspace_bytes: int  # peak of the backward pass above the stashes of this and earlier layers
    output_bytes: int  # distinct tensors alive across the cut after this layer
    output_gradient_bytes: int  # of their gradients
    output_unsaved_bytes: int  # of those that no layer keeps for its backward pass
    output_saved_later_bytes: int = 0  # of those that later layers keep and those before the cut do not
    unkept_output_bytes: int = 0  # of the loss: the model's outputs that layers keep and the loss does not
    recompute: Timing | None = None  # added to the backward by recomputing the layer; None: as forward
    last_recompute: Timing | None = None  # the same where it is the last layer recomputed together; None: as recompute
    first_backward: Timing | None = None  # of the first micro-batch, which allocates gradients; None: as backward
    input_gradient: Timing | None = None  # first half of a split backward; None: there is none, or it is unknown
    weight_gradient: Timing | None = None  # second half, or all of it if there is no first; None: unknown
    pending_bytes: int = 0  # kept between the halves of a split backward, above the stash; below 0: less is kept
    input_workspace_bytes: int | None = None  # peak of the first half above what is there then; None: unknown
    grown_bytes: int = 0  # allocated by the first half until all layers are through it, when it frees stashes
    weight_workspace_bytes: int | None = None  # peak of the second half above what is there then; None: unknown
    leftovers: tuple[Leftover, ...] = ()  # the part of backward_workspace_bytes due to later layers
    gathering_bytes: int = 0  # the part due to gathering parameters; a recompute has gathered its last layer already
    host_forward: Timing | None = None  # seconds in which the host enqueues the forward's kernels; the times above are
    host_backward: Timing | None = None  # then the device's. None: there is one clock, as on a CPU
    host_recompute: Timing | None = None  # None: as host_forward
    host_input_gradient: Timing | None = None  # of the halves of a split backward; None: as the device's
    host_weight_gradient: Timing | None = None
    forward_waits: bool = False  # whether the host waits for the device at the end of the forward
    backward_waits: bool = False
    slow_down: float = 1.0  # factor on all times while other processes of the host do the same
    forward_work: tuple[Work, ...] = ()
    backward_work: tuple[Work, ...] = ()
    tensors: tuple[Lifetime, ...] = ()  # all of a forward and a backward, for the replay of a GPU's allocator
    num_forward_times: int = 0  # 0: the tensors are not known

    def __post_init__(self) -> None:
        check_positive(self, "microbatch_size")
        check_factor(self, "slow_down")
        check_amounts(self, signed="pending_bytes")
        if self.pending_bytes < -self.stash_bytes:
            raise ValueError(
                f"pending_bytes is {self.pending_bytes}; expected at least {-self.stash_bytes}, as a stash is freed "
                "only once"
            )
        for number, x in enumerate(self.tensors):
            if x.num_bytes < 1 or not 0 <= x.made <= x.freed:
                raise ValueError(
                    f"tensors[{number}] has {x.num_bytes} bytes, made at {x.made} and freed at {x.freed}; expected at least 1 byte, "
                    "made at 0 or later and freed not before"
                )

    def renumbered(self, distance: Callable[[int], int]) -> LayerCost:
        """The costs with leftovers at distance `distance(num_later)`; those of layers that now come earlier are dropped."""
        pairs = ((distance(x.num_later), x.num_bytes) for x in self.leftovers)
        return replace(self, leftovers=leftovers_of((num_later, x) for num_later, x in pairs if num_later > 0))

    @property
    def timings(self) -> dict[str, Timing]:
        """The known times by name, except recompute, which follows from forward."""
        fields = ("forward", "backward", "first_backward", "input_gradient", "weight_gradient")
        found: dict[str, Timing | None] = {field.replace("_", " "): getattr(self, field) for field in fields}
        return {name: timing for name, timing in found.items() if timing is not None}

    @property
    def has_halves(self) -> bool:
        """Whether the halves of a split backward are known."""
        return self.weight_gradient is not None

    def corrected(self, *, forward: float, backward: float, recompute: float) -> LayerCost:
        """The costs with times multiplied by factors; all parts of the backward pass but recompute share one."""
        factors = {**dict.fromkeys(TIMINGS, backward), "forward": forward, "host_forward": forward}
        factors |= dict.fromkeys(("recompute", "last_recompute", "host_recompute"), recompute)
        known = {x: getattr(self, x) for x in TIMINGS} | {"recompute": self.known_recompute}
        timings: dict[str, Any] = {x: t.corrected(factors[x]) for x, t in known.items() if t is not None}
        return replace(self, **timings)

    @property
    def on_host(self) -> LayerCost:
        """The costs with the host's seconds in place of the device's; the first backward has none of its own."""
        nothing = Timing.exactly(0.0)
        recompute = self.host_recompute or self.host_forward or nothing
        return replace(
            self,
            forward=self.host_forward or nothing,
            backward=self.host_backward or nothing,
            recompute=recompute,
            last_recompute=recompute.times(self.last_recompute_s / self.recompute_s if self.recompute_s else 1.0),
            first_backward=None,
            input_gradient=self.input_gradient and (self.host_input_gradient or self.input_gradient),
            weight_gradient=self.weight_gradient and (self.host_weight_gradient or self.weight_gradient),
        )

    @property
    def known_recompute(self) -> Timing:
        """`recompute`, or the forward where it is not known."""
        return self.recompute or self.forward

    @property
    def recompute_s(self) -> float:
        """Seconds that recomputing the layer adds to its backward where other layers follow."""
        return self.known_recompute.median_s

    @property
    def last_recompute_s(self) -> float:
        """The same where it is the last layer recomputed together: a recompute ends at the last saved tensor."""
        return min(self.recompute_s, (self.last_recompute or self.known_recompute).median_s)

    @property
    def last_backward_workspace_bytes(self) -> int:
        """`backward_workspace_bytes` where it is the last layer recomputed together."""
        return self.backward_workspace_bytes - self.gathering_bytes

    @property
    def between_bytes(self) -> int:
        """Kept between the halves of a split backward, in place of the stash."""
        return self.stash_bytes + self.pending_bytes

    @property
    def first_half_workspace_bytes(self) -> int:
        """Peak of the first half of a split backward, above what is there then; if unknown, of the whole one."""
        known = self.input_workspace_bytes
        return self.backward_workspace_bytes if known is None else known

    @property
    def second_half_workspace_bytes(self) -> int:
        """Peak of the second half of a split backward, above what is there then; if unknown, of the whole one."""
        known = self.weight_workspace_bytes
        return self.backward_workspace_bytes if known is None else known

    @property
    def workspace_bytes(self) -> int:
        """The larger of the transient peaks of forward and backward."""
        return max(self.forward_workspace_bytes, self.backward_workspace_bytes)


TIMINGS = tuple(x.name for x in fields(LayerCost) if str(x.type).startswith("Timing"))
"""Names of a layer's times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Costs of a step outside the micro-batch loop, for the whole model on one device."""

    optimizer: Timing
    zero_grad: Timing
    optimizer_name: str
    state_bytes: int
    workspace_bytes: int  # of temporary memory that is proportional to the trained bytes
    largest_workspace: float = 0.0  # temporary memory beside it, as a multiple of the largest trained tensor
    slow_down: float = 1.0  # factor while other processes of the host run forward and backward
    update_slow_down: float = 1.0  # factor while other processes of the host update at the same time
    master_bytes: int = 0  # part of state_bytes: float32 weights beside the parameters
    fixed_s: float = 0.0  # part of both that every stage takes, whatever its layers
    tied_update_s: float = 0.0  # added to an update beside that of a device with the same weight (gplan/corrections)

    def __post_init__(self) -> None:
        check_amounts(self)
        check_slow_down(self, "slow_down", "update_slow_down")
        if self.largest_workspace:
            check_factor(self, "largest_workspace")

    def corrected(self, factor: float) -> StepCost:
        """The costs with times multiplied by a factor."""
        return replace(
            self,
            optimizer=self.optimizer.corrected(factor),
            zero_grad=self.zero_grad.corrected(factor),
            fixed_s=self.fixed_s * factor,
        )

    @property
    def update_s(self) -> float:
        """Seconds of zero_grad and the optimizer together."""
        return self.zero_grad.median_s + self.optimizer.median_s

    @property
    def fixed_part_s(self) -> float:
        """`fixed_s`, at most `update_s`."""
        return min(self.fixed_s, self.update_s)

    @property
    def spread_s(self) -> float:
        """The rest of `update_s`, of which layers and shared weights have their shares (`Costs.update_share`)."""
        return self.update_s - self.fixed_part_s

    def grown(self, by_bytes: float, *, by_update: float) -> StepCost:
        """The costs with all bytes times `by_bytes`, and `spread_s` times `by_update`."""
        factor = (self.fixed_part_s + by_update * self.spread_s) / self.update_s if self.update_s else 1.0
        return replace(
            self,
            optimizer=self.optimizer.times(factor),
            zero_grad=self.zero_grad.times(factor),
            state_bytes=round(by_bytes * self.state_bytes),
            workspace_bytes=round(by_bytes * self.workspace_bytes),
            master_bytes=round(by_bytes * self.master_bytes),
        )

    @classmethod
    def none(cls, *, origin: Origin = "given") -> StepCost:
        """The costs without an optimizer, or with nothing to train."""
        nothing = Timing.exactly(0.0, origin=origin)
        return cls(optimizer=nothing, zero_grad=nothing, optimizer_name="none", state_bytes=0, workspace_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """The whole model measured in one piece at one micro-batch size, to check the sum of the layers."""

    microbatch_size: int
    forward: Timing
    backward: Timing
    allocated_bytes: int = 0  # peak of forward and backward above the memory before; 0: not measured
    reserved_bytes: int = 0  # by the CUDA allocator for that; 0 elsewhere


def check_rising_sizes(costs: tuple[LayerCost, ...]) -> None:
    """Raise ValueError unless micro-batch sizes rise strictly."""
    if any(a.microbatch_size >= b.microbatch_size for a, b in pairwise(costs)):
        raise ValueError(f"micro-batch sizes are {microbatch_sizes_of(costs)}; expected rising sizes")


def microbatch_sizes_of(costs: tuple[LayerCost, ...]) -> tuple[int, ...]:
    """The micro-batch sizes of some costs, in their order."""
    return tuple(cost.microbatch_size for cost in costs)
