"""The settings of a machine and a model: widths that divide devices, heads, experts and tokens, and how they are run.

A tensor group stays inside a node. The devices of a stage are tensor x context x data; expert groups are parts of them. A
batch is divided into micro-batches of whole samples. A dial that is given keeps its value; where no setting is left, the
error names the nearest values that work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

from gplan.core.errors import UsageError
from gplan.core.units import counted
from gplan.interop.receivers import receiver_named
from gplan_profiler.analytic.decoder_config import ORDER, Decoder, Widths, places_alike
from gplan_profiler.analytic.decoder_profile import check_divisions, token_divisions
from gplan_profiler.analytic.hardware import Hardware

MICROBATCH_SIZES = (1, 2, 4, 8)
_MOST_CONTEXT = 16  # ranks that divide a sequence; assumed
_LEAST_DIVIDED_TOKENS = 8192  # shorter sequences are not divided over ranks; assumed
_FEW_CHUNKS = 6  # all numbers of stages a device up to this are settings; above, those that share blocks out evenly
OPTIONS = {
    "tensor": "--tensor", "context": "--context", "expert": "--expert", "data": "--data", "pipeline": "--pp",
    "num_chunks": "--vpp", "microbatch_size": "--microbatch-size", "recompute": "--recompute",
}  # fmt: skip
"""The option of each dial."""
_RECOMPUTE = ("never", "always")
_WIDTHS = ("data", "pipeline", "context", "tensor")  # whose product is the number of devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A setting: widths, and how they are run."""

    widths: Widths
    num_chunks: int
    microbatch_size: int
    recompute: str
    num_microbatches: int

    def __str__(self) -> str:
        split = self.widths
        found = [f"tensor {split.tensor}", f"pipeline {split.pipeline}", f"data {split.data}"]
        found += [f"context {split.context}"] * (split.context > 1)
        found += [f"expert {split.expert}"] * (split.expert > 1)
        found += [f"{self.num_chunks} stages a device"] * (self.num_chunks > 1)
        found += [f"order {split.order}"] * (split.order != ORDER)
        found += [f"micro-batches of {self.microbatch_size}"]
        return ", ".join(found + ["recompute"] * (self.recompute == "always"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthSpace:
    """The settings; a dial that is None is open."""

    decoder: Decoder
    hardware: Hardware
    num_devices: int
    batch_size: int
    sequence_length: int
    order: str = ORDER  # in which groups are placed
    receiver: str
    fixed: dict[str, int | str | None] = field(default_factory=dict)  # dials that are given, by their names

    def choices(self) -> Iterator[Choice]:
        """Every setting whose counts fit together."""
        modes = [x for x in _RECOMPUTE if x in (receiver_named(self.receiver).recompute or _RECOMPUTE)]
        if given := self.fixed.get("recompute"):
            modes = [str(given)]
        for widths in self._widths():
            for size in self._values("microbatch_size", MICROBATCH_SIZES):
                num_microbatches, rest = divmod(self.batch_size, size * widths.data)
                if rest or not num_microbatches:
                    continue
                for chunks in self._values("num_chunks", self._chunks(widths.pipeline)):
                    if chunks > 1 and (widths.pipeline == 1 or num_microbatches % widths.pipeline):
                        continue
                    for recompute in modes:
                        yield Choice(
                            widths=widths, num_chunks=chunks, microbatch_size=size, recompute=recompute,
                            num_microbatches=num_microbatches,
                        )  # fmt: skip

    def _widths(self) -> Iterator[Widths]:
        """Widths that use every device."""
        every = divisors(self.num_devices)
        tensors = [x for x in every if x <= self.hardware.devices_per_node and self._is_divided_by(x)]
        contexts = [x for x in every if x <= _MOST_CONTEXT] if self.sequence_length >= _LEAST_DIVIDED_TOKENS else [1]
        pipelines = [x for x in every if x <= self.decoder.num_hidden_layers]
        for tensor, context, pipeline in product(
            self._values("tensor", tensors), self._values("context", contexts), self._values("pipeline", pipelines)
        ):
            data, rest = divmod(self.num_devices, tensor * context * pipeline)
            divided = token_divisions(self.sequence_length, tensor=tensor, context=context)
            is_whole = not rest and data and not any(count % width for _, count, width, _ in divided)
            if is_whole and self.fixed.get("data") in (None, data):
                ranks, experts = tensor * context * data, self.decoder.routed_experts or 1
                for expert in self._values("expert", divisors(ranks)):
                    is_alike = expert == 1 or places_alike(self.order, tensor * context, expert, pipeline)
                    if ranks % expert or experts % expert or not is_alike:
                        continue
                    yield Widths(
                        tensor=tensor, context=context, expert=expert, expert_tensor=1 if expert > 1 else 0, data=data,
                        pipeline=pipeline, sequence_length=self.sequence_length, order=self.order,
                    )  # fmt: skip

    def _chunks(self, pipeline: int) -> list[int]:
        """Stages of a device: a few, and more where blocks, with the first or last layer or both, are shared out evenly."""
        num_blocks = self.decoder.num_hidden_layers
        most = 1 if pipeline == 1 else (num_blocks + 2) // pipeline
        most = min(most, receiver_named(self.receiver).max_chunks or most)
        is_even = {x for x in range(1, most + 1) for ends in range(3) if not (num_blocks + ends) % (x * pipeline)}
        return [x for x in range(1, most + 1) if x <= _FEW_CHUNKS or x in is_even]

    def _values(self, name: str, choices: Sequence[int]) -> Sequence[int]:
        """The values of a dial: the one that is given, else all choices."""
        given = self.fixed.get(name)
        return choices if given is None else (int(given),)

    def _is_divided_by(self, tensor: int) -> bool:
        """Whether a tensor width divides the heads."""
        model, copies = self.decoder, receiver_named(self.receiver).copies_keys
        heads = [model.linear_num_key_heads, model.linear_num_value_heads]
        for own in model.variants:
            heads += [own.num_attention_heads, tensor if copies and not tensor % own.kv_heads else own.kv_heads]
        return not any(x % tensor for x in heads)

    def check(self) -> None:
        """Raise UsageError for a dial that cannot be, with the nearest value that can."""
        given = {name: value for name, value in self.fixed.items() if isinstance(value, int)}
        for name, value in given.items():
            if value < 1:
                raise UsageError(f"{OPTIONS[name]} is {value}; expected at least 1")
        for flag, number in (
            ("--gpus", self.num_devices),
            ("--batch-size", self.batch_size),
            ("--sequence-length", self.sequence_length),
        ):
            if number < 1:
                raise UsageError(f"{flag} is {number}; expected at least 1")
        tensor, per_node = given.get("tensor", 1), self.hardware.devices_per_node
        if tensor > per_node:
            raise UsageError(
                f"a tensor group of {tensor} does not fit a node of {counted(per_node, 'device')}, and links between nodes are too slow "
                f"for it; take --tensor {_nearest(per_node, divisors(self.decoder.num_attention_heads))}, or --gpus-per-node {tensor} if one "
                "fast link connects as many"
            )
        sizes = {x: given.get(x, 1) for x in ("tensor", "context", "expert")}
        check_divisions(self.decoder, **sizes, sequence_length=self.sequence_length)
        if given.get("expert", 1) > 1 and not self.decoder.routed_experts:
            raise UsageError(f"--expert is {given['expert']}, and the model has no experts; leave it out")
        if (pipeline := given.get("pipeline", 1)) > self.decoder.num_hidden_layers:
            raise UsageError(
                f"a pipeline of {pipeline} devices has fewer than one of {self.decoder.num_hidden_layers} blocks on each; take --pp "
                f"{_nearest(self.decoder.num_hidden_layers, divisors(self.num_devices))}"
            )
        check_num_stages(self.decoder, pipeline, given.get("num_chunks"))
        if not self._has_whole_nodes:
            nodes, same = self.num_devices // per_node, max(x for x in divisors(self.num_devices) if x <= per_node)
            raise UsageError(
                f"--gpus is {self.num_devices}, and nodes have {per_node} devices; expected whole nodes: --gpus {nodes * per_node} or "
                f"{(nodes + 1) * per_node}, or --gpus-per-node {same}"
            )

    def no_choice_text(self) -> str:
        """Why no counts fit together, with the nearest batch that does."""
        steps = {
            size * widths.data for widths in self._widths() for size in self._values("microbatch_size", MICROBATCH_SIZES)
        }  # fmt: skip
        given = ", ".join(f"{OPTIONS[x]} {y}" for x, y in self.fixed.items() if y is not None)
        having = f" with {given}" if given else ""
        if not steps:
            widths = [int(y) for x, y in self.fixed.items() if x in _WIDTHS and y is not None]
            together = f", whose product is {prod(widths)}" if widths[1:] else ""
            return f"no widths use all of {self.num_devices} devices{having}{together}; take {' or '.join(self._nearest_widths())}"
        near = min((max(1, round(self.batch_size / x)) * x for x in steps), key=lambda x: abs(x - self.batch_size))
        chunks = self.fixed.get("num_chunks")
        if isinstance(chunks, int) and chunks > 1 and near == self.batch_size:
            return (
                f"{chunks} stages a device need a multiple of the pipeline's devices as micro-batches, and {self.batch_size} samples give "
                f"none{having}; leave --vpp open"
            )
        return f"a batch of {self.batch_size} samples is divided by no widths of {self.num_devices} devices{having}; the nearest that is: {near}"

    @property
    def _has_whole_nodes(self) -> bool:
        return self.num_devices <= (most := self.hardware.devices_per_node) or not self.num_devices % most

    def _nearest_widths(self) -> Iterator[str]:
        """Where no widths use every device: the nearest number of devices that some use, and other values of one width."""
        widths = {x: int(y) for x in _WIDTHS if (y := self.fixed.get(x)) is not None}
        whole = prod(widths.values())
        counts = {whole, *(whole * max(1, self.num_devices // whole + x) for x in range(-8, 9))}
        for count in sorted(counts, key=lambda x: abs(x - self.num_devices)):
            other = replace(self, num_devices=count)
            if other._has_whole_nodes and any(other._widths()):
                yield f"--gpus {count}"
                break
        for name, value in widths.items():
            others = {getattr(x, name) for x in replace(self, fixed={**self.fixed, name: None})._widths()}
            if others:
                yield f"{OPTIONS[name]} {min(others, key=lambda x: abs(x - value))}"

    def batch_hint(self) -> str:
        """The nearest batches that more data widths divide, where this one is divided by few; else ""."""
        widths = {x.data for x in self._widths() if x.data <= self.batch_size}

        def num_divisors(size: int) -> int:
            return sum(not size % x for x in widths)

        own = num_divisors(self.batch_size)
        if not 0 < 2 * own < len(widths):
            return ""
        first = self.batch_size + 1
        lower, upper = range(self.batch_size - 1, 0, -1), range(first, first + self.num_devices)
        found = (next((x for x in sizes if 2 * num_divisors(x) >= len(widths)), 0) for sizes in (lower, upper))
        near = " and ".join(f"{x} ({num_divisors(x)})" for x in found if x)
        return (
            f"{own} of {len(widths)} possible data widths divide a batch of {self.batch_size} samples, so few settings are left; more "
            f"divide {near}"
        )


def check_num_stages(decoder: Decoder, pipeline: int, num_chunks: int | None) -> None:
    """Raise UsageError for more stages than there are blocks, but for one with the first layer and one with the last."""
    num_blocks = decoder.num_hidden_layers
    if num_chunks is not None and num_chunks < 1:
        raise UsageError(f"--vpp is {num_chunks}; expected at least 1")
    if (num_stages := pipeline * (num_chunks or 1)) > num_blocks + 2:
        nearest = f"--pp {num_blocks}" if pipeline > num_blocks else f"--vpp {num_blocks // pipeline}"
        raise UsageError(
            f"{num_stages} stages ({pipeline} devices, {num_chunks or 1} each) need as many blocks, and the model has {num_blocks}; "
            f"take {nearest}"
        )


def divisors(number: int) -> list[int]:
    """All of them, rising."""
    return [x for x in range(1, number + 1) if number % x == 0]


def _nearest(number: int, choices: Sequence[int]) -> int:
    """The largest choice up to a number."""
    return max(x for x in choices if x <= number)
