"""Results that tests share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def memoized(function: Callable[P, T]) -> Callable[P, T]:
    """Keep a function's results, also beside the class of a model, where each capture empties `functools.cache`."""
    kept: dict[object, T] = {}

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        key = (args, tuple(options.items()))
        if key not in kept:
            kept[key] = function(*args, **options)
        return kept[key]

    return call
