"""The hardware a plan is for: devices, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from gplan.nouns.checks import Origin, check_not_negative, check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One pipeline device. On a CPU it is a share of the cores; `memory_bytes` is None where no limit is known."""

    name: str
    kind: str  # "cpu", "cuda" or "tpu"
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
