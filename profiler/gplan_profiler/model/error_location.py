"""Locate an error in the user's code; imports no torch, so that a supervising process starts fast.

The user's code is all code that is neither part of gplan, nor installed (standard library, site-packages), nor
generated at run time. The innermost frame of it in a traceback is reported.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import gplan.core.errors
from gplan.core.errors import ModelError

_OURS = Path(__file__).resolve().parents[1], Path(gplan.core.errors.__file__).resolve().parents[1]
_INSTALLED = tuple({Path(path).resolve() for name, path in sysconfig.get_paths().items() if "lib" in name})
_INSTALLED_PARTS = frozenset({"site-packages", "dist-packages"})
_MOST_CHARACTERS = 300
OWN_GRADIENTS = (
    "gradients that a model or a loss computes itself (torch.autograd.grad, .backward(), torch.func.grad), such as a gradient "
    "penalty, forces or other gradients of inputs, are not supported, as a stage has its own layers only; supported is a loss "
    "of the model's output and the target, whose gradients gplan computes"
)
_OF_GRADIENTS = ("torch/autograd/__init__.py", "torch/_functorch/eager_transforms.py")
_DUMPED_FRAME = re.compile(r'  File "(.+)", line (\d+) in ')


def author_line(error: BaseException) -> str | None:
    """File, number and text of the innermost line of the user's code in an error's traceback, or None."""
    frame = _author_frame(error)
    return None if frame is None else f"{frame.filename}, line {frame.lineno}: {frame.line}"


def describe(error: BaseException) -> str:
    """An exception in one line, with the user's line."""
    frame = _author_frame(error)
    where = "" if frame is None else f" ({frame.filename}, line {frame.lineno})"
    return f"{type(error).__name__}: {first_line(error) or 'no message'}{where}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut if it is long, after a word if possible; "" without a message.

    >>> first_line(ValueError("of " * 200))[-7:]
    'of of …'
    >>> len(first_line(ValueError("x" * 400)))
    300
    """
    line = next(iter(str(error).strip().splitlines()), "")
    if len(line) <= _MOST_CHARACTERS:
        return line
    cut = line[: _MOST_CHARACTERS - 1]
    words = cut.rpartition(" ")[0]
    return f"{words} …" if len(words) > _MOST_CHARACTERS // 2 else f"{cut}…"


def author_line_of_dump(lines: Sequence[str]) -> str | None:
    """File and number of the user's innermost line in a stack printed by Python's faulthandler, or None.

    >>> author_line_of_dump(['  File "<frozen runpy>", line 88 in _run_code', '  File "/x/model.py", line 12 in forward'])
    '/x/model.py, line 12'
    """
    found = (_DUMPED_FRAME.match(line) for line in lines)
    frames = [(match[1], match[2]) for match in found if match is not None]
    return next((f"{name}, line {number}" for name, number in frames if is_authors(name)), None)


def own_gradients_text(error: BaseException) -> str | None:
    """What a model or loss that computes gradients itself can do instead; None if the error comes from other code."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = next((i for i, x in reversed(list(enumerate(frames))) if is_authors(x.filename)), None)
    if inner is None or not any(x.filename.replace("\\", "/").endswith(_OF_GRADIENTS) for x in frames[inner:]):
        return None
    return f"{describe(error)}: {OWN_GRADIENTS}"


def objects_running(error: BaseException) -> Iterator[object]:
    """The `self` of each frame on the stack of an error, from the outermost."""
    frame = error.__traceback__
    while frame is not None:
        yield frame.tb_frame.f_locals.get("self")
        frame = frame.tb_next


def root_cause(error: BaseException) -> BaseException:
    """The first error of a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _author_frame(error: BaseException) -> traceback.FrameSummary | None:
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if is_authors(frame.filename)), None)


def is_authors(filename: str) -> bool:
    """Whether a file is the user's code."""
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    if _INSTALLED_PARTS & set(path.parts):
        return False
    return not any(path.is_relative_to(root) for root in (*_OURS, *_INSTALLED))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is an out-of-memory error of torch or Python."""
    if isinstance(error, ModelError):
        return is_out_of_memory(error.__cause__)
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(x in str(error).lower() for x in words)
