"""The values of a comparison of two profiles: a change of a time or of a size, a layer's changes, the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gplan.nouns import Link

Verdict: TypeAlias = Literal["slower", "faster", "more", "less", "same"]
"""Of a time or a size, new against old."""

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChange:
    """One time, old and new; they are the same where they differ by no more than the noise."""

    quantity: str
    old_s: float
    new_s: float
    noise_s: float
    verdict: Verdict

    @property
    def change_s(self) -> float:
        """Positive where it became slower."""
        return self.new_s - self.old_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesChange:
    """One size, old and new; both are exact."""

    quantity: str
    old_bytes: int
    new_bytes: int
    verdict: Verdict

    @property
    def change_bytes(self) -> int:
        """Positive where it became larger."""
        return self.new_bytes - self.old_bytes


Change: TypeAlias = TimeChange | BytesChange


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """A layer, or several that share their figures in both profiles; the figures are those of one of them."""

    names: tuple[str, ...]
    times: tuple[TimeChange, ...]
    memory: tuple[BytesChange, ...]

    @property
    def change_s(self) -> float:
        """Forward and backward, of all of them; positive where they became slower."""
        return len(self.names) * sum(x.change_s for x in self.times if x.quantity in (FORWARD, BACKWARD))

    @property
    def change_bytes(self) -> int:
        """Of all sizes, up or down."""
        return len(self.names) * sum(abs(x.change_bytes) for x in self.memory)

    @property
    def is_changed(self) -> bool:
        """Whether a time changed beyond the noise, or a size at all."""
        return self.change_bytes > 0 or any(x.verdict != "same" for x in self.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeDifference:
    """Two profiles at one micro-batch size: the whole model, and the layers that both have, in the new one's order."""

    microbatch_size: int
    times: tuple[TimeChange, ...]  # of the whole model as one stage; the step is one of one micro-batch
    memory: tuple[BytesChange, ...]
    layers: tuple[LayerDifference, ...]  # the loss last
    median_change: float  # of the layers' forwards and backwards, a share: what happened to all of them alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two profiles held against each other, at one or several micro-batch sizes that both have."""

    old_model: str
    new_model: str
    old_created: str
    new_created: str
    old_link: Link
    new_link: Link
    remarks: tuple[str, ...]  # what else differs: machine, versions, settings
    appeared: tuple[str, ...]  # layers of the new profile only
    vanished: tuple[str, ...]
    sizes: tuple[SizeDifference, ...]
