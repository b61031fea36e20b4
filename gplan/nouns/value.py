"""What travels between layers: which layer makes a tensor, which ones read it, and how large it is."""

from __future__ import annotations

from dataclasses import dataclass

from gplan.nouns.checks import check_not_empty, check_not_negative, check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCost:
    """How large a value is for one micro-batch of `microbatch_size` samples."""

    microbatch_size: int
    num_bytes: int
    gradient_bytes: int = 0  # of the gradient that comes back for it, hop by hop on the same way
    unsaved_bytes: int = 0  # of num_bytes, what no layer keeps for its backward pass

    def __post_init__(self) -> None:
        check_positive(self, "microbatch_size")
        check_not_negative(self, "num_bytes", "gradient_bytes", "unsaved_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor from the layer that makes it to those that read it; several that go the same way are one value.

    It crosses every cut that has its producer on one side and any of its consumers on the other.
    """

    producer: int | None  # a layer; None: it is an input of the model
    consumers: tuple[int, ...]  # layers, rising; L, the number of layers, stands for the model's output
    costs: tuple[ValueCost, ...]  # by rising micro-batch size
    transfer_s: float | None = None  # seconds of one transfer where they are given; None: they follow from the link
    is_gradient: bool = False  # made in the backward pass, from a later layer to earlier ones

    def __post_init__(self) -> None:
        check_not_empty("consumers", self.consumers)
        check_not_empty("costs", self.costs)
        if list(self.consumers) != sorted(set(self.consumers)):
            raise ValueError(f"consumers is {self.consumers}; expected rising numbers of layers, each once")
        if self.producer in self.consumers:
            raise ValueError(f"layer {self.producer} makes and reads the same value; expected other layers to read it")
        if self.transfer_s is not None:
            check_not_negative(self, "transfer_s")
