"""What a user asks of a partition beside its cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A layer that must be on a stage."""

    layer: str
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Constraints on a partition, by the names of layers; "up to" and "between" are in the profile's order."""

    cut_after: tuple[str, ...] = ()  # a stage ends with everything up to this layer
    keep_together: tuple[tuple[str, str], ...] = ()  # from the one to the other, all layers are on one stage
    pins: tuple[Pin, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is wished for."""
        return bool(self.cut_after or self.keep_together or self.pins)
