"""Lines that several views have below their tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from gplan.nouns import Link
from gplan.units import bytes_text, seconds_text


def note_lines(notes: Sequence[str]) -> list[Text]:
    """What a reader must know, a line each."""
    return [Text(f"note: {note}", style="yellow") for note in notes]


def link_text(link: Link) -> str:
    """A link's latency, rate and origin."""
    points = f" at {len(link.points)} sizes" if link.points else ""
    return f"{seconds_text(link.latency_s)} + {bytes_text(link.bytes_per_s)}/s ({link.origin}{points})"
