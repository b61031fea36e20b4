"""How many lines the files in `written/` have that a user writes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WRITTEN = {
    "gplan": ("with_gplan.py", "torchrun"),
    "torch.distributed.pipelining by hand": ("by_hand.py", "torchrun"),
    "torchgpipe": ("with_torchgpipe.py", "python"),
}
"""Who: the file that is run here, and what starts it."""


def line_rows() -> Iterator[dict[str, Any]]:
    """A row for each peer: the lines of its file, those of `plan` and of the loop over the batches among them."""
    for who, (name, started_by) in WRITTEN.items():
        source = (Path(__file__).parent / "written" / name).read_text()
        functions = {
            x.name: ast.get_source_segment(source, x) or ""
            for x in ast.parse(source).body
            if isinstance(x, ast.FunctionDef)
        }
        yield {
            "table": "lines",
            "rule": who,
            "num_lines": code_lines(source),
            "num_plan_lines": code_lines(functions.get("plan", "")),
            "started_by": started_by,
        }


def code_lines(source: str) -> int:
    """Lines of Python that hold a token of a statement which is no docstring.

    >>> code_lines('"What it does."\\n\\nx = 1  # one\\n# two\\ny = [\\n    x,\\n]\\n')
    4
    """
    tree = ast.parse(source)
    skipped = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(source.splitlines(), start=1)
    return sum(bool(x.strip()) and not x.strip().startswith("#") and i not in skipped for i, x in lines)
