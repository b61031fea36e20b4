"""Progress of long work, as a function that the work calls now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, float], None]
"""Called with a description of the current work and the share done, 0 to 1."""


def no_progress(_text: str, _share: float) -> None:
    """Ignore all progress."""


def part(progress: Progress, index: int, count: int) -> Progress:
    """The progress of part `index` of `count` parts of equal length."""
    return lambda text, share: progress(text, (index + share) / count)
