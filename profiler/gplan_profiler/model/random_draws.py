"""Random numbers that a user's code draws: the line that first does, and draws that do not depend on their order."""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from gplan_profiler.model.error_location import is_authors
from gplan_profiler.torch_compat import TorchDispatchMode


def line_of_first_draw(run: Callable[[], object]) -> str | None:
    """File, number and text of the author's line during which `run` first draws; None if no line of theirs does.

    Slow: the states of the generators are compared at every line.
    """
    before = _states()
    running: list[tuple[str, int]] = [("", 0)]  # the lines of the author's frames, from the outermost
    found: list[tuple[str, int]] = []

    def look() -> None:
        nonlocal before
        now = _states()
        if now != before and running[-1][1]:
            found.append(running[-1])
        before = now

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if found or not is_authors(frame.f_code.co_filename):
            return None
        look()  # at the first call too: `run` may have seeded the generators before
        if event == "call":
            running.append((frame.f_code.co_filename, frame.f_lineno))
        elif event == "line":
            running[-1] = frame.f_code.co_filename, frame.f_lineno
        elif event == "return":
            running.pop()
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(previous)
    if not found:
        return None
    path, line = found[0]
    return f"{path}, line {line}: {linecache.getline(path, line).strip()}"


def is_random(run: Callable[[], object]) -> bool:
    """Whether `run` draws from a generator of torch, Python or numpy."""
    before = _states()
    run()
    return _states() != before


def _states() -> tuple[Any, ...]:
    """The states of the generators."""
    on_gpu = [x.tolist() for x in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return host_random_state(), bytes(torch.random.get_rng_state().numpy()), on_gpu


def host_random_state() -> tuple[Any, ...]:
    """The states of the generators of Python and numpy."""
    numpy = sys.modules.get("numpy")
    host = None if numpy is None else [x.tolist() if hasattr(x, "tolist") else x for x in numpy.random.get_state()]
    return random.getstate(), host


class DrawsByShape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, the random numbers that torch draws depend on their shape alone, not on the draws before."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            sizes = (getattr(x, "shape", x) for x in args)
            shape = next((x for x in sizes if isinstance(x, list | tuple)), args[:1])  # of `randint` behind the limits
            torch.manual_seed(hash(tuple(shape)))
        return function(*args, **(kwargs or {}))
