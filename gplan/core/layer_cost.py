"""What a part of a model costs: durations with their spread, bytes, and the operations behind them.

Seconds are per micro-batch; bytes too, unless the field speaks of weights. Stash bytes are charged to the layer that
produced the storage, so that every storage is counted once however many layers keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from gplan.core.checks import OperationKind, Origin, check_not_negative, check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A duration with its spread: the median of the samples and their quartiles, in seconds."""

    median_s: float
    low_s: float
    high_s: float
    num_samples: int
    num_refused: int = 0  # samples thrown away because other work used the processor
    origin: Origin = "measured"

    def __post_init__(self) -> None:
        check_not_negative(self, "median_s", "low_s", "high_s", "num_samples", "num_refused")
        if not self.low_s <= self.median_s <= self.high_s:
            raise ValueError(f"median_s is {self.median_s!r}; expected {self.low_s!r} <= median_s <= {self.high_s!r}")

    def less(self, seconds: float) -> Timing:
        """The same without a fixed part, at least 0."""
        low_s, median_s, high_s = (max(0.0, x - seconds) for x in (self.low_s, self.median_s, self.high_s))
        return replace(self, low_s=low_s, median_s=median_s, high_s=high_s)

    def times(self, factor: float) -> Timing:
        """The same for a part `factor` times as large."""
        return replace(self, low_s=self.low_s * factor, median_s=self.median_s * factor, high_s=self.high_s * factor)

    def corrected(self, factor: float) -> Timing:
        """What was measured `factor` times as long, and so no more as it was measured; the same for 1."""
        return self if factor == 1.0 else replace(self.times(factor), origin="computed")

    @classmethod
    def exactly(cls, seconds: float, *, origin: Origin = "given") -> Timing:
        """A duration without spread."""
        return cls(median_s=seconds, low_s=seconds, high_s=seconds, num_samples=0, origin=origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the operations of one kind do for one micro-batch, counted, not timed."""

    kind: OperationKind
    num_operations: int
    num_flops: int
    num_bytes: int  # read and written, each operation's operands and results once

    def __post_init__(self) -> None:
        check_not_negative(self, "num_operations", "num_flops", "num_bytes")

    def __add__(self, other: Work) -> Work:
        """Both together; raises ValueError for two kinds."""
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
    """What one layer's backward has left when that of an earlier one runs."""

    num_later: int  # how many layers later the one is; after the last layer comes the loss
    num_bytes: int  # that it made and that are held, less what it freed of the stashes up to the earlier layer's

    def __post_init__(self) -> None:
        check_positive(self, "num_later")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer costs for one micro-batch of `microbatch_size` samples, and what is alive at the cut after it."""

    microbatch_size: int
    forward: Timing
    backward: Timing  # with the gradient buffers already allocated
    stash_bytes: int  # produced here and kept until the backward pass
    forward_workspace_bytes: int  # transient peak of the forward pass above what stays
    backward_workspace_bytes: int  # peak of the backward pass above the stashes up to this layer's
    output_bytes: int  # distinct tensors alive across the cut after this layer
    output_gradient_bytes: int  # those of them that a gradient comes back for
    output_unsaved_bytes: int  # those of them that no layer keeps for its backward pass
    recompute: Timing | None = None  # what recomputing it in the backward pass adds; None: as forward
    first_backward: Timing | None = None  # of a step's first micro-batch, which makes the gradients; None: as backward
    input_gradient: Timing | None = None  # of a split backward the first half; None: it has none, or it is not known
    weight_gradient: Timing | None = None  # the second half, all of it where there is no first one; None: not known
    pending_bytes: int = 0  # kept between the halves of a split backward, above the stash
    leftovers: tuple[Leftover, ...] = ()  # what of backward_workspace_bytes comes of the backward of later layers
    contention: float = 1.0  # how much longer all of this takes while the host's other cores do the same
    forward_work: tuple[Work, ...] = ()
    backward_work: tuple[Work, ...] = ()

    def __post_init__(self) -> None:
        check_positive(self, "microbatch_size", "contention")
        check_not_negative(
            self, "stash_bytes", "forward_workspace_bytes", "backward_workspace_bytes", "output_bytes",
            "output_gradient_bytes", "output_unsaved_bytes", "pending_bytes",
        )  # fmt: skip

    def renumbered(self, distance: Callable[[int], int]) -> LayerCost:
        """The same where what so many layers later did is done `distance` of that later; nothing if it comes before."""
        leftovers: dict[int, int] = {}
        for x in self.leftovers:
            num_later = distance(x.num_later)
            leftovers[num_later] = leftovers.get(num_later, 0) + x.num_bytes
        left = ((num_later, num_bytes) for num_later, num_bytes in leftovers.items() if num_later > 0)
        return replace(self, leftovers=tuple(Leftover(num_later=i, num_bytes=x) for i, x in left))

    @property
    def timings(self) -> dict[str, Timing]:
        """The times that are known, by name; without recompute, which follows from forward."""
        fields = ("forward", "backward", "first_backward", "input_gradient", "weight_gradient")
        found: dict[str, Timing | None] = {field.replace("_", " "): getattr(self, field) for field in fields}
        return {name: timing for name, timing in found.items() if timing is not None}

    @property
    def has_halves(self) -> bool:
        """Whether the halves of a split backward are known."""
        return self.weight_gradient is not None

    def corrected(self, *, forward: float, backward: float, recompute: float) -> LayerCost:
        """With its times as many times as long; what it does in the backward pass but recomputing by one factor."""

        def of_backward(timing: Timing | None) -> Timing | None:
            return timing and timing.corrected(backward)

        return replace(
            self,
            forward=self.forward.corrected(forward),
            backward=self.backward.corrected(backward),
            recompute=(self.recompute or self.forward).corrected(recompute),
            first_backward=of_backward(self.first_backward),
            input_gradient=of_backward(self.input_gradient),
            weight_gradient=of_backward(self.weight_gradient),
        )

    @property
    def workspace_bytes(self) -> int:
        """The larger of the transient peaks of forward and backward."""
        return max(self.forward_workspace_bytes, self.backward_workspace_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a step costs outside the micro-batch loop, for the whole model on one device."""

    optimizer: Timing
    zero_grad: Timing
    optimizer_name: str
    state_bytes: int
    workspace_bytes: int
    contention: float = 1.0  # how much longer the step takes while the host's other cores do the same
    tensor_s: float = 0.0  # of both, for every trained tensor however small; the rest grows with the bytes

    def __post_init__(self) -> None:
        check_not_negative(self, "state_bytes", "workspace_bytes", "tensor_s")
        check_positive(self, "contention")

    def corrected(self, factor: float) -> StepCost:
        """The same with its times longer by a factor."""
        return replace(
            self,
            optimizer=self.optimizer.corrected(factor),
            zero_grad=self.zero_grad.corrected(factor),
            tensor_s=self.tensor_s * factor,
        )

    @property
    def update_s(self) -> float:
        """Seconds of both together."""
        return self.zero_grad.median_s + self.optimizer.median_s

    def shares_s(self, num_tensors: int) -> tuple[float, float]:
        """Seconds of each of its tensors, however small, and of the bytes of all; together no more than all takes."""
        tensor_s = min(self.tensor_s, self.update_s / num_tensors) if num_tensors else 0.0
        return tensor_s, max(0.0, self.update_s - num_tensors * tensor_s)

    def grown(self, by_bytes: float, *, num_tensors: int, num_all: int) -> StepCost:
        """That of `num_all` tensors with `by_bytes` times the bytes, this one being that of `num_tensors`."""
        tensor_s, bytes_s = self.shares_s(num_tensors)
        factor = (by_bytes * bytes_s + num_all * tensor_s) / self.update_s if self.update_s else 1.0
        return replace(
            self,
            optimizer=self.optimizer.times(factor),
            zero_grad=self.zero_grad.times(factor),
            state_bytes=round(by_bytes * self.state_bytes),
            workspace_bytes=round(by_bytes * self.workspace_bytes),
        )

    @classmethod
    def none(cls, *, origin: Origin = "given") -> StepCost:
        """Without an optimizer, or with nothing to train."""
        nothing = Timing.exactly(0.0, origin=origin)
        return cls(optimizer=nothing, zero_grad=nothing, optimizer_name="none", state_bytes=0, workspace_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """The model measured in one piece at one micro-batch size: what the sum of the layers is held against."""

    microbatch_size: int
    forward: Timing
    backward: Timing
    allocated_bytes: int = 0  # peak of its forward and backward above what was there before; 0: not measured
    reserved_bytes: int = 0  # what the CUDA allocator held for that; 0 elsewhere


def check_rising_sizes(costs: tuple[LayerCost, ...]) -> None:
    """Costs come by rising micro-batch size, each size once."""
    if any(a.microbatch_size >= b.microbatch_size for a, b in pairwise(costs)):
        raise ValueError(f"micro-batch sizes are {microbatch_sizes_of(costs)}; expected them rising")


def microbatch_sizes_of(costs: tuple[LayerCost, ...]) -> tuple[int, ...]:
    """The micro-batch sizes of some costs, in their order."""
    return tuple(cost.microbatch_size for cost in costs)
