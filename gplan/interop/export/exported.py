"""What an export is: text in the syntax of the receiving project, and what the text cannot say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan as another project reads it."""

    format: str
    text: str
    notes: tuple[str, ...] = ()  # what a reader must know or do beside
