"""The profile of a model: its layers with their costs at one or more micro-batch sizes, and the values between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gplan.core.checks import (
    Granularity,
    LossReduction,
    Origin,
    check_amounts,
    check_names,
    check_not_empty,
    check_positive,
)
from gplan.core.host_load import LEAST_HEAVY, HostLoad
from gplan.core.layer_cost import LayerCost, StepCost, Timing, WholeModel, check_rising_sizes, microbatch_sizes_of
from gplan.core.machine import Device, EngineCost, Link
from gplan.core.precision import Precision
from gplan.core.two_clocks import Enqueued, both_done_s
from gplan.core.units import percent_text

SAMPLING_BUDGET_S = 20.0
"""Default of the longest sampling of the layers, for each micro-batch size.

A shared host changes its speed every few seconds: the samples should see several speeds.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCost:
    """The size of a value for one micro-batch of `microbatch_size` samples."""

    microbatch_size: int
    num_bytes: int
    gradient_bytes: int = 0  # of its gradient, which crosses the same cuts
    unsaved_bytes: int = 0  # part of num_bytes that no layer keeps for its backward pass
    saved_later_bytes: int = 0  # part of num_bytes that its consumers keep and its producer does not
    viewed_bytes: int = 0  # part of gradient_bytes that is a view of the gradient of what the last consumer makes

    def __post_init__(self) -> None:
        check_positive(self, "microbatch_size")
        check_amounts(self)
        if self.viewed_bytes > self.gradient_bytes:
            raise ValueError(
                f"viewed_bytes is {self.viewed_bytes}; expected at most gradient_bytes, {self.gradient_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor from its producer to its consumers; tensors with the same producer, consumers and views are one value.

    It crosses every cut with the producer on one side and any consumer on the other. `view_of` is for a tensor in the
    storage of another value, which only its producer reads, as after a dropout that is switched off.
    """

    producer: int | None  # a layer; None: an input of the model
    consumers: tuple[int, ...]  # layers, rising; L, the number of layers, is the model's output
    costs: tuple[ValueCost, ...]  # by rising micro-batch size
    view_of: int | None = None  # index in `Profile.values`

    def __post_init__(self) -> None:
        check_not_empty("consumers", self.consumers)
        check_not_empty("costs", self.costs)
        if list(self.consumers) != sorted(set(self.consumers)):
            raise ValueError(f"consumers is {self.consumers}; expected rising numbers of layers, each once")
        if self.producer in self.consumers:
            raise ValueError(f"layer {self.producer} makes and reads the same value; expected other layers to read it")

    def renumbered(self, positions: Mapping[int, int]) -> Value:
        """The value after layer i became layer `positions[i]`; L, the model's output, must be in it if it is read."""
        producer = None if self.producer is None else positions[self.producer]
        return replace(self, producer=producer, consumers=tuple(sorted(positions[x] for x in self.consumers)))


MOST_DISAGREEMENT = 0.2
"""Relative error of the layers' sum beside the whole model above which a warning is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSize:
    """One parameter, as replicas may divide it."""

    num_rows: int  # of its first dimension; 0: it stays whole
    num_bytes: int
    is_trained: bool = True

    def __post_init__(self) -> None:
        check_amounts(self)

    def part_bytes(self, num_replicas: int) -> int:
        """Bytes of one of `num_replicas` equal parts of rows, the last ones padded.

        >>> ParameterSize(num_rows=10, num_bytes=80).part_bytes(4)
        24
        """
        return -(-self.num_rows // num_replicas) * self.num_bytes // self.num_rows


BUCKET_BYTES = 25 * 2**20
"""Most bytes of the copy that replicas make of small gradients to average them in one message."""

LARGE_GRADIENT_BYTES = 2**20
"""From which size on they average a gradient in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShare:
    """What one of several replicas exchanges and updates of parameters that they divide (`gplan/corrections/sharding.py`)."""

    gathered_bytes: int  # of parameters, padded, that replicas get from each other
    reduced_bytes: int  # of gradients, padded, that are reduce-scattered
    updated_bytes: int  # of gradients that this replica's optimizer uses


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharable:
    """What layers and shared weights have alike, also for the replicas that may divide them."""

    name: str
    num_parameters: int
    weight_bytes: int  # parameters and buffers
    gradient_bytes: int  # of trained parameters
    parameters: tuple[ParameterSize, ...] = ()  # its own, of a shared weight one; none: not known
    share: ReplicaShare | None = None  # of one of several replicas; None: all of it
    update_s: float | None = None  # of an update: zero_grad and optimizer; None: not known

    @property
    def gathered_bytes(self) -> int:
        """Bytes of parameters that replicas get from each other."""
        return self.share.gathered_bytes if self.share else 0

    @property
    def reduced_bytes(self) -> int:
        """Bytes of gradients of which there is a copy while replicas sum them."""
        return self.share.reduced_bytes if self.share else 0

    @property
    def copied_bytes(self) -> int:
        """Bytes of small gradients, which whole replicas copy to average them; all where sizes are not known."""
        trained = [x.num_bytes for x in self.parameters if x.is_trained]
        per_byte = self.gradient_bytes / (sum(trained) or 1)  # gradients may be of another type
        small = sum(x for x in trained if x * per_byte < LARGE_GRADIENT_BYTES)
        return round(per_byte * small) if trained else self.gradient_bytes

    @property
    def updated_bytes(self) -> int:
        """Bytes of the gradients that the optimizer of a replica uses."""
        return self.share.updated_bytes if self.share else self.gradient_bytes

    @property
    def whole_update_amount(self) -> float:
        """Seconds of its whole part of an update, or gradient bytes where no seconds were measured."""
        return self.gradient_bytes if self.update_s is None else self.update_s

    @property
    def update_amount(self) -> float:
        """`whole_update_amount` of the part that a replica updates."""
        whole = self.whole_update_amount
        return whole * self.updated_bytes / self.gradient_bytes if self.share and self.gradient_bytes else whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Sharable):
    """A unit of the model as its author wrote it, or one operation. Shared weights are not included."""

    kind: str  # its class
    costs: tuple[LayerCost, ...]  # by rising micro-batch size
    same_as: int | None = None  # the layer of equal structure that was measured instead; None: measured itself
    largest_trained_bytes: int = 0  # of the largest trained parameter tensor

    def __post_init__(self) -> None:
        check_names("name", self.name)
        check_amounts(self)
        check_not_empty("costs", self.costs)
        check_rising_sizes(self.costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeight(Sharable):
    """A parameter used by several layers; each stage with any of them has one copy."""

    layers: tuple[int, ...]  # in order, each once

    def __post_init__(self) -> None:
        check_names("name", self.name)
        check_amounts(self)
        if len(self.layers) < 2 or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers is {self.layers!r}; expected at least two different layers in order")

    @property
    def largest_trained_bytes(self) -> int:
        """Bytes of the largest trained tensor, as far as a replica updates it: of this one."""
        return self.updated_bytes


OPERATIONS, JOINED = ".*", "+"
"""In `ModelId.divided`, after a module's path: its own operations are layers (the model itself is "*"); before a module's
path: it is part of the layer before it."""


def operations_entry(path: str) -> str:
    """The entry of `ModelId.divided` for a module whose own operations are layers.

    >>> operations_entry("blocks.3"), operations_entry("")
    ('blocks.3.*', '*')
    """
    return f"{path}{OPERATIONS}".removeprefix(".")


def modules_by_operation(divided: Sequence[str]) -> tuple[str, ...]:
    """The modules whose own operations are layers, from `ModelId.divided`; the model itself is "".

    >>> modules_by_operation(["*", "blocks.2", "blocks.3.*"])
    ('', 'blocks.3')
    """
    return tuple(f".{x}".removesuffix(OPERATIONS).removeprefix(".") for x in divided if x.endswith("*"))


MEGATRON_LM, NANOTRON_NAME = "Megatron-LM", "nanotron"
"""Trainers of computed profiles, by their names among the versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelId:
    """The identity of a model: name, settings, and a digest of its layers and parameters."""

    name: str
    settings: tuple[tuple[str, str], ...]
    digest: str
    in_memory: bool = False  # passed as an object, so there is no file to load it from
    traced: str = (
        ""  # the way of tracing that the profile took (gplan_profiler/capture/tracing_ways.py); "": as it is run
    )
    divided: tuple[str, ...] = ()  # of the author's layers (gplan_profiler/capture/division.py)
    inputs: str = (
        ""  # as gplan_profiler/model/model_reference.py describes them, such as "4,32:int64"; "": not expressible
    )
    file_digest: str = ""  # of the model file's text; "": not made from a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Costs of all layers on one device, and everything else the planner needs."""

    model: ModelId
    device: Device
    layers: tuple[Layer, ...]
    shared_weights: tuple[SharedWeight, ...]
    loss: tuple[LayerCost, ...]  # part of the last stage; empty if the model has none
    loss_reduction: LossReduction
    step: StepCost
    link: Link
    overhead_s: float  # added by a stage to each forward and backward of a micro-batch
    whole_model: tuple[WholeModel, ...]
    created: str  # ISO 8601, UTC
    versions: tuple[tuple[str, str], ...]
    origin: Origin = "measured"
    num_neighbours: int = 0  # processes that ran beside the measured one
    shares_host: bool = False  # whether all times are already those beside other devices of its host
    notes: tuple[str, ...] = ()  # shown with the profile
    plan_notes: tuple[str, ...] = ()  # shown with the profile and with every plan made from it
    granularity: Granularity = "layer"
    values: tuple[Value, ...] = ()  # what layers pass to each other; none: each layer feeds the next, without views
    engine: EngineCost | None = None  # None: not measured, assumed to be zero
    host_load: HostLoad | None = None  # of the host while layers were timed; None: not measured
    precision: Precision = field(default_factory=Precision)  # that it was measured or computed in

    def __post_init__(self) -> None:
        check_not_empty("layers", self.layers)
        check_amounts(self)
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"layers has {twice!r} twice; expected a different name for every layer")
        sizes = {layer.name: microbatch_sizes_of(layer.costs) for layer in self.layers}
        if self.loss:
            sizes["the loss"] = microbatch_sizes_of(self.loss)
            check_rising_sizes(self.loss)
        for name, found in sizes.items():
            if found != self.microbatch_sizes:
                raise ValueError(
                    f"{name} has costs at micro-batch sizes {found}; expected {self.microbatch_sizes} as in "
                    f"{self.layers[0].name}"
                )
        whole = tuple(x.microbatch_size for x in self.whole_model)
        if whole and whole != self.microbatch_sizes:
            raise ValueError(f"the whole model was measured at sizes {whole}; expected {self.microbatch_sizes}")
        without = [x.name for x in (*self.layers, *self.shared_weights) if x.update_s is None]
        if 0 < len(without) < len(self.layers) + len(self.shared_weights):
            raise ValueError(
                f"{without[0]} has no update_s; expected it for every layer and shared weight, or for none"
            )
        for shared in self.shared_weights:
            if not all(0 <= layer < len(self.layers) for layer in shared.layers):
                raise ValueError(f"{shared.name} names layers {shared.layers}; there are {len(self.layers)} layers")
        for layer in self.layers:
            if layer.same_as is not None and not 0 <= layer.same_as < len(self.layers):
                raise ValueError(f"{layer.name} is the same as layer {layer.same_as}; there are {len(self.layers)}")
        for index, layer in enumerate(self.layers):
            if any(index + x.num_later > len(self.layers) for cost in layer.costs for x in cost.leftovers):
                raise ValueError(f"{layer.name} has bytes left over by a layer after the last of {len(self.layers)}")
        self._check_values()

    @property
    def tied_weights(self) -> tuple[SharedWeight, ...]:
        """The shared weights that are parameters; others are buffers of which a stage holds one for several layers."""
        return tuple(x for x in self.shared_weights if x.num_parameters)

    @property
    def is_for_megatron(self) -> bool:
        """Whether it was computed for Megatron-LM, whose pipeline frees what torch's keeps."""
        return MEGATRON_LM in dict(self.versions)

    @property
    def sums_in_place(self) -> bool:
        """Whether it was computed for a trainer that sums gradients in one buffer: Megatron-LM or nanotron."""
        return self.is_for_megatron or NANOTRON_NAME in dict(self.versions)

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The profiled micro-batch sizes, rising."""
        return microbatch_sizes_of(self.layers[0].costs)

    def costs_at(self, index: int) -> tuple[LayerCost, ...]:
        """The costs of all layers, then of the loss, at the size with this index."""
        return (*(layer.costs[index] for layer in self.layers), *self.loss[index : index + 1])

    def one_stage_bytes(self, index: int) -> int:
        """Peak memory above the weights of a forward and backward of the whole model, at the size with this index."""
        stashed, peak = 0, 0
        for layer, cost in enumerate(self.costs_at(index)):
            waiting = sum(x.gradient_bytes for x in self.shared_weights if layer < x.layers[-1])  # to be added up
            stashed += cost.stash_bytes
            peak = max(peak, stashed + cost.workspace_bytes + waiting)
        return peak

    def one_stage_s(self, index: int) -> tuple[float, float]:
        """Seconds of forward and of backward of the whole model as one stage, at the size with this index."""
        costs = self.costs_at(index)
        if not self.has_host:
            forward_s, backward_s = sum(x.forward.median_s for x in costs), sum(x.backward.median_s for x in costs)
            return self.overhead_s + forward_s, self.overhead_s + backward_s
        pairs = [(x, x.on_host) for x in costs]
        forwards = [Enqueued(y.forward.median_s, x.forward.median_s, x.forward_waits) for x, y in pairs]
        backwards = [Enqueued(y.backward.median_s, x.backward.median_s, x.backward_waits) for x, y in reversed(pairs)]
        return self.overhead_s + both_done_s(forwards), self.overhead_s + both_done_s(backwards)

    @property
    def has_host(self) -> bool:
        """Whether it has two clocks: the host's seconds beside the device's."""
        return any(x.costs[0].host_forward is not None for x in self.layers)

    @property
    def all_notes(self) -> tuple[str, ...]:
        """What a reader of the profile must know."""
        return (*self.notes, *self.plan_notes, *self.doubts)

    @property
    def doubts(self) -> tuple[str, ...]:
        """A warning where times are uncertain: layers that do not add up, or other work on the host."""
        found, ratio = [], 1.0
        for index, whole in enumerate(self.whole_model):
            for name, total_s, timing in zip(
                ("forward", "backward"), self.one_stage_s(index), (whole.forward, whole.backward), strict=True
            ):
                relative = total_s / timing.median_s if timing.median_s else 1.0
                if abs(relative - 1.0) > MOST_DISAGREEMENT:
                    ratio = max(ratio, relative, 1.0 / relative if relative else math.inf)
                    error = percent_text(relative - 1.0, signed=True)
                    found.append(f"{name} {error} at micro-batch size {whole.microbatch_size}")
        if found:
            return (
                f"do not rely on these times: the sum of the layers differs from the whole model ({', '.join(found)}); "
                f"{self._disagreement_reason(ratio)}",
            )
        if self.host_load is not None and self.host_load.is_heavy:
            return (
                f"other work disturbed this profile ({self.host_load.text}; expected both below {percent_text(LEAST_HEAVY)}), "
                "so predictions can be far off: profile again when the host is quiet",
            )
        return ()

    def _disagreement_reason(self, ratio: float) -> str:
        """What explains a ratio of the larger to the smaller of layers and whole model: the host, if its figures do."""
        load = self.host_load
        if load is None:
            return (
                "profile again, and if the difference stays, this model's layers do not add up when measured one by one"
            )
        if load.is_evidence and load.stretch >= ratio:
            return f"this host was not quiet meanwhile ({load.text}): profile again when it is"
        host = f"there is no sign of other work on this host ({load.text})"
        if load.is_evidence:
            host = f"this host was not quiet meanwhile ({load.text}), but its load does not explain a factor of {ratio:.2f}"
        return f"{host}, so this model's layers do not add up when measured one by one"

    @property
    def precedence(self) -> tuple[tuple[int, int], ...]:
        """Pairs (before, after) of layers: the second reads an output of the first in the forward pass."""
        if not self.values:
            return tuple((i, i + 1) for i in range(len(self.layers) - 1))
        pairs = {(x.producer, y) for x in self.values if x.producer is not None for y in x.consumers}
        return tuple(sorted((before, after) for before, after in pairs if after < len(self.layers)))

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model, shared ones once."""
        return sum(x.num_parameters for x in self.layers) + sum(x.num_parameters for x in self.shared_weights)

    @property
    def trained_bytes(self) -> int:
        """Bytes of all gradients of the model, shared ones once."""
        return sum(x.gradient_bytes for x in self.layers) + sum(x.gradient_bytes for x in self.shared_weights)

    @property
    def whole_update_amount(self) -> float:
        """That of all layers and shared weights; 1 where nothing is updated, so that shares can be taken."""
        return math.fsum(x.whole_update_amount for x in (*self.layers, *self.shared_weights)) or 1.0

    @property
    def num_samples(self) -> int:
        """Number of samples of all layer timings."""
        return sum(t.num_samples for t in self._layer_timings())

    @property
    def num_refused(self) -> int:
        """Number of samples discarded because the thread lost its core."""
        return sum(t.num_refused for t in self._layer_timings())

    def with_costs(self, change: Callable[[LayerCost], LayerCost]) -> Profile:
        """The profile with the costs of every layer and of the loss changed alike."""
        layers = tuple(replace(x, costs=tuple(map(change, x.costs))) for x in self.layers)
        return replace(self, layers=layers, loss=tuple(map(change, self.loss)))

    @property
    def has_halves(self) -> bool:
        """Whether the halves of a split backward are known for any layer, at every micro-batch size."""
        sizes = zip(*(layer.costs for layer in self.layers), strict=True)
        return all(any(x.input_gradient or x.weight_gradient for x in costs) for costs in sizes)

    def reordered(self, order: Sequence[int]) -> Profile:
        """The same profile with layer `order[i]` at position i; raises ValueError if a layer precedes one it reads."""
        num_layers = len(self.layers)
        if list(order) == list(range(num_layers)):
            return self
        positions = {layer: i for i, layer in enumerate(order)} | {num_layers: num_layers}  # L: the model's output

        def renumbered(index: int, layer: Layer) -> Layer:
            """The layer with its leftovers counted in the new order."""
            costs = (x.renumbered(lambda later: positions[index + later] - positions[index]) for x in layer.costs)
            same_as = None if layer.same_as is None else positions[layer.same_as]
            return replace(layer, costs=tuple(costs), same_as=same_as)

        return replace(
            self,
            layers=tuple(renumbered(i, self.layers[i]) for i in order),
            shared_weights=tuple(
                replace(x, layers=tuple(sorted(positions[i] for i in x.layers))) for x in self.shared_weights
            ),
            values=tuple(x.renumbered(positions) for x in self.values),
        )

    def cost_key(self, index: int) -> Hashable:
        """Equal for layers of one kind with the same bytes and costs, whatever `same_as` says.

        Leftovers are left out, as they depend on the layer's position.
        """
        layer = self.layers[index]
        costs = tuple(replace(x, leftovers=()) if x.leftovers else x for x in layer.costs)
        return layer.kind, layer.weight_bytes, layer.gradient_bytes, layer.update_s, costs

    def _layer_timings(self) -> list[Timing]:
        costs = [cost for layer in self.layers if layer.same_as is None for cost in layer.costs]
        return [timing for cost in costs for timing in (cost.forward, cost.backward)]

    def _check_values(self) -> None:
        num_layers = len(self.layers)
        for place, count in Counter(x.view_of for x in self.values if x.view_of is not None).items():
            if count > 1:
                raise ValueError(f"{count} values are views of value {place}; expected at most one")
        for value in self.values:
            of = "the model's input" if value.producer is None else f"the value of layer {value.producer}"
            for layer in (value.producer or 0, *value.consumers):
                if not 0 <= layer <= num_layers or value.producer == num_layers:
                    raise ValueError(f"{of} names layer {layer}; there are {num_layers} layers")
            viewed = None if value.view_of is None else self.values[value.view_of : value.view_of + 1]
            if viewed is not None and not (viewed and viewed[0].consumers == (value.producer,)):
                raise ValueError(f"{of} is a view of value {value.view_of}; expected a value that only the layer reads")
            if value.producer is not None and value.consumers[0] < value.producer:
                raise ValueError(
                    f"{of} is read by layer {value.consumers[0]} before it; expected layers in an order in which they can run"
                )
            found = tuple(x.microbatch_size for x in value.costs)
            if found != self.microbatch_sizes:
                raise ValueError(
                    f"{of} has sizes at {found} samples; expected {self.microbatch_sizes} as the layers have"
                )


def group_equal(keys: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """The positions of equal keys, ordered by their first.

    >>> group_equal("abba")
    ((0, 3), (1, 2))
    """
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return tuple(map(tuple, groups.values()))
