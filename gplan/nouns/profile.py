"""What was measured: a model as a chain of layers, each with its costs at one or more micro-batch sizes.

Seconds are per micro-batch; bytes too, unless the field speaks of weights. Stash bytes are charged to the layer that
produced the storage, so that every storage is counted once however many layers keep it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from gplan.nouns.checks import LossReduction, Origin, check_not_empty, check_not_negative, check_positive


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

    @classmethod
    def exactly(cls, seconds: float, *, origin: Origin = "given") -> Timing:
        """A duration without spread."""
        return cls(median_s=seconds, low_s=seconds, high_s=seconds, num_samples=0, origin=origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer costs for one micro-batch of `microbatch_size` samples, and what is alive at the cut after it."""

    microbatch_size: int
    forward: Timing
    backward: Timing  # with the gradient buffers already allocated
    stash_bytes: int  # produced here and kept until the backward pass
    forward_workspace_bytes: int  # transient peak of the forward pass above what stays
    backward_workspace_bytes: int  # transient peak of the backward pass above what was there when it began
    output_bytes: int  # distinct tensors alive across the cut after this layer
    output_gradient_bytes: int  # those of them that a gradient comes back for
    output_unsaved_bytes: int  # those of them that no layer keeps for its backward pass

    def __post_init__(self) -> None:
        check_positive(self, "microbatch_size")
        check_not_negative(
            self, "stash_bytes", "forward_workspace_bytes", "backward_workspace_bytes", "output_bytes",
            "output_gradient_bytes", "output_unsaved_bytes",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One link of the chain: what the model's author wrote as a unit. Its weights leave out the shared ones."""

    name: str
    kind: str  # the class that the author gave it
    num_parameters: int
    weight_bytes: int  # parameters and buffers
    gradient_bytes: int  # of the parameters that are trained
    costs: tuple[LayerCost, ...]  # by rising micro-batch size

    def __post_init__(self) -> None:
        check_not_negative(self, "num_parameters", "weight_bytes", "gradient_bytes")
        check_not_empty("costs", self.costs)
        check_rising_sizes(self.costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeight:
    """A parameter used by several layers; a stage that holds any of them holds it once."""

    name: str
    layers: tuple[int, ...]
    num_parameters: int
    weight_bytes: int
    gradient_bytes: int

    def __post_init__(self) -> None:
        check_not_negative(self, "num_parameters", "weight_bytes", "gradient_bytes")
        if len(set(self.layers)) < 2:
            raise ValueError(f"layers is {self.layers!r}; expected at least two different layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One pipeline device. On a CPU it is a share of the cores; `memory_bytes` is None where no limit is known."""

    name: str
    kind: str  # "cpu" or "cuda"
    num_threads: int = 1
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        check_positive(self, "num_threads")
        if self.memory_bytes is not None:
            check_positive(self, "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Moving n bytes between neighbouring devices takes latency_s + n / bytes_per_s."""

    latency_s: float
    bytes_per_s: float
    origin: Origin = "given"

    def __post_init__(self) -> None:
        check_not_negative(self, "latency_s")
        check_positive(self, "bytes_per_s")

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds to move `num_bytes`; nothing to move takes no time."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a step costs outside the micro-batch loop, for the whole model on one device."""

    optimizer: Timing  # zero_grad and the optimizer's step
    optimizer_name: str
    state_bytes: int
    workspace_bytes: int

    def __post_init__(self) -> None:
        check_not_negative(self, "state_bytes", "workspace_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """The model measured in one piece at one micro-batch size: what the sum of the layers is held against."""

    microbatch_size: int
    forward: Timing
    backward: Timing
    recompute: Timing  # what recomputing all of it in the backward pass adds


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelId:
    """Which model: its name, the settings it was built with, and a digest of its layers and parameters."""

    name: str
    settings: tuple[tuple[str, str], ...]
    digest: str
    in_memory: bool = False  # handed over as an object: no file to load it from


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Every layer's costs on one device, and all that the planner needs beside them."""

    model: ModelId
    device: Device
    layers: tuple[Layer, ...]
    shared_weights: tuple[SharedWeight, ...]
    loss: tuple[LayerCost, ...]  # the loss belongs to the last layer's stage; empty where the model has none
    loss_reduction: LossReduction
    step: StepCost
    link: Link
    overhead_s: float  # what a stage adds to each forward or backward of a micro-batch
    whole: tuple[WholeModel, ...]
    created: str  # ISO 8601, UTC
    versions: tuple[tuple[str, str], ...]
    origin: Origin = "measured"

    def __post_init__(self) -> None:
        check_not_empty("layers", self.layers)
        check_not_negative(self, "overhead_s")
        sizes = {layer.name: _sizes(layer.costs) for layer in self.layers}
        if self.loss:
            sizes["the loss"] = _sizes(self.loss)
            check_rising_sizes(self.loss)
        for name, found in sizes.items():
            if found != self.microbatch_sizes:
                raise ValueError(
                    f"{name} has costs at micro-batch sizes {found}; expected {self.microbatch_sizes} as in "
                    f"{self.layers[0].name}"
                )
        whole = tuple(x.microbatch_size for x in self.whole)
        if whole and whole != self.microbatch_sizes:
            raise ValueError(f"the whole model was measured at sizes {whole}; expected {self.microbatch_sizes}")
        for shared in self.shared_weights:
            if not all(0 <= layer < len(self.layers) for layer in shared.layers):
                raise ValueError(f"{shared.name} names layers {shared.layers}; there are {len(self.layers)} layers")

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes that were profiled, rising."""
        return _sizes(self.layers[0].costs)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, shared ones once."""
        return sum(x.num_parameters for x in self.layers) + sum(x.num_parameters for x in self.shared_weights)

    @property
    def num_samples(self) -> int:
        """Samples behind the timings of the layers."""
        return sum(t.num_samples for t in self._layer_timings())

    @property
    def num_refused(self) -> int:
        """Samples that were thrown away because other work used the processor."""
        return sum(t.num_refused for t in self._layer_timings())

    def _layer_timings(self) -> list[Timing]:
        costs = [cost for layer in self.layers for cost in layer.costs]
        return [timing for cost in costs for timing in (cost.forward, cost.backward)]


def check_rising_sizes(costs: tuple[LayerCost, ...]) -> None:
    """Costs come by rising micro-batch size, each size once."""
    if any(a.microbatch_size >= b.microbatch_size for a, b in pairwise(costs)):
        raise ValueError(f"micro-batch sizes are {_sizes(costs)}; expected them rising")


def _sizes(costs: tuple[LayerCost, ...]) -> tuple[int, ...]:
    return tuple(cost.microbatch_size for cost in costs)
