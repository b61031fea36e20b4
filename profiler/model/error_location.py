"""Where in the author's code an error arose, and an error in one line.

The author's code is what is neither part of gplan nor installed (the standard library, site-packages) nor made at run
time; the innermost frame of it in a traceback is the line to look at.
"""

from __future__ import annotations

import math
import re
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gplan.core.errors import ModelError

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


# Which module of a model does what it should not: the first, in the order they end, whose output is at fault.


def first_not_finite(model: nn.Module, run: Callable[[], Any]) -> str | None:
    """The module whose output first holds a nan or an infinity while `run` calls the model."""
    return next((name for name, value in _fingerprints(model, run) if not math.isfinite(value)), None)


def first_difference(model: nn.Module, run: Callable[[], Any]) -> str | None:
    """The module whose output first differs between two calls of `run`."""
    pairs = zip(_fingerprints(model, run), _fingerprints(model, run), strict=False)
    return next((name for (name, one), (_, other) in pairs if one != other), None)


def failing_module(model: nn.Module, error: BaseException) -> str:
    """The innermost module of the model in which an error arose; the model's class where it was in none of them."""
    names = _names(model)
    found, frame = type(model).__name__, error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            found = names[module]
        frame = frame.tb_next
    return found


def _names(model: nn.Module) -> dict[nn.Module, str]:
    """Every module as messages name it: 1.1 (Log)."""
    names = {module: name or "the model" for name, module in model.named_modules()}
    return {module: f"{name} ({type(module).__name__})" for module, name in names.items()}


def _fingerprints(model: nn.Module, run: Callable[[], Any]) -> list[tuple[str, float]]:
    """The sum of each module's output, by name, in the order in which the modules end: the innermost first."""
    found: list[tuple[str, float]] = []
    names = _names(model)

    def note(module: nn.Module, _arguments: object, output: object) -> None:
        found.append((names[module], _sum(output)))

    hooks = [module.register_forward_hook(note) for module in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _sum(output: object) -> float:
    tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    return math.fsum(float(x.detach().double().sum()) for x in tensors)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is torch's or Python's word for memory that is not there, or arose from one."""
    if isinstance(error, ModelError):
        return is_out_of_memory(error.__cause__)
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(x in str(error).lower() for x in words)
