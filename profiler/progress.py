"""How work that takes long says where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, float], None]
"""Called with what is being done and the share that is done, 0 to 1."""


def silent(_text: str, _share: float) -> None:
    """Tells nobody."""


def part(progress: Progress, index: int, count: int) -> Progress:
    """Progress of one part of several that take as long."""
    return lambda text, share: progress(text, (index + share) / count)
