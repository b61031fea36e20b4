"""Trace past the author's checks of values: an `if` that only raises an error, or an `assert`.

A trace has no values, so such a check cannot be evaluated in it. It passes there and becomes an operation of the graph,
which raises an error in training for a batch that does not pass.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from gplan.core.errors import ModelError

torch.library.define("gplan::check", "(Tensor value, bool expected, str where) -> ()")
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


@torch.library.impl("gplan::check", "CompositeExplicitAutograd")
def _check(value: Tensor, expected: bool, where: str) -> None:
    """Raise ModelError for a value that does not pass."""
    if bool(value) != expected:
        raise ModelError(f"a check of the model fails for this batch: {where}")


def _fake_check(value: Tensor, expected: bool, where: str) -> None:
    """A trace has no values."""


torch.library.register_fake("gplan::check", _fake_check)


def passed_check(value: Tensor) -> bool | None:
    """The truth with which the running check passes, which is then part of the trace; None where there is no check."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE)):
        frame = frame.f_back
    if frame is None:
        return None
    path, line = frame.f_code.co_filename, frame.f_lineno
    expected = next((passes for first, end, passes in _checks_in(path) if first <= line <= end), None)
    if expected is not None:
        torch.ops.gplan.check(value, expected, f"{path}, line {line}")
    return expected


@cache
def _checks_in(path: str) -> tuple[tuple[int, int, bool], ...]:
    """The first and last line of the condition of each check in a file, and the truth with which it passes."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(
        (node.test.lineno, node.test.end_lineno or node.test.lineno, isinstance(node, ast.Assert))
        for node in ast.walk(tree)
        if isinstance(node, ast.If | ast.Assert) and _only_raises(node) and not _negates(node.test)
    )


def _only_raises(node: ast.If | ast.Assert) -> bool:
    return isinstance(node, ast.Assert) or (not node.orelse and all(isinstance(x, ast.Raise) for x in node.body))


def _negates(test: ast.expr) -> bool:
    """Whether the truth of a part of a condition may be the opposite of the whole's."""
    return any(isinstance(x, ast.Not | ast.IfExp | ast.Lambda | ast.GeneratorExp) for x in ast.walk(test))
