"""Where in the author's code an error arose, and an error in one line.

The author's code is what is neither part of gplan nor installed (the standard library, site-packages) nor made at run
time; the innermost frame of it in a traceback is the line to look at.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

_OURS = Path(__file__).resolve().parents[1], Path(__file__).resolve().parents[2] / "gplan"
_INSTALLED = tuple({Path(path).resolve() for name, path in sysconfig.get_paths().items() if "lib" in name})
_INSTALLED_PARTS = frozenset({"site-packages", "dist-packages"})
_DUMPED_FRAME = re.compile(r'  File "(.+)", line (\d+) in ')


def author_line(error: BaseException) -> str | None:
    """File, number and text of the author's line that an error arose at, or None where it arose in no such line."""
    frame = _author_frame(error)
    return None if frame is None else f"{frame.filename}, line {frame.lineno}: {frame.line}"


def describe(error: BaseException) -> str:
    """An exception in one line, with the author's line it arose at."""
    frame = _author_frame(error)
    where = "" if frame is None else f" ({frame.filename}, line {frame.lineno})"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}{where}"


def author_line_of_dump(lines: Sequence[str]) -> str | None:
    """File and number of the author's innermost line in a stack that Python's faulthandler printed, if there is one.

    >>> author_line_of_dump(['  File "<frozen runpy>", line 88 in _run_code', '  File "/x/model.py", line 12 in forward'])
    '/x/model.py, line 12'
    """
    found = (_DUMPED_FRAME.match(line) for line in lines)
    frames = [(match[1], match[2]) for match in found if match is not None]
    return next((f"{name}, line {number}" for name, number in frames if _is_authors(name)), None)


def root_cause(error: BaseException) -> BaseException:
    """The error that the others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _author_frame(error: BaseException) -> traceback.FrameSummary | None:
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if _is_authors(frame.filename)), None)


def _is_authors(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    if _INSTALLED_PARTS & set(path.parts):
        return False
    return not any(path.is_relative_to(root) for root in (*_OURS, *_INSTALLED))
