"""What a view prints in a terminal of some width."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def printed(view: RenderableType, *, width: int = 120) -> list[str]:
    """The lines, without colours and trailing spaces."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(view)
    return [line.rstrip() for line in captured.get().splitlines()]
