"""Which layers of a profile share their figures, so that one row can stand for all of them.

Layers of one structure are measured together, or a few of them for all: their costs are then equal to the last digit.
That is what makes them alike here, whatever `same_as` says, so that a row never shows a figure that one of its layers
lacks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from gplan.nouns import Profile


def figures_key(profile: Profile, index: int) -> Hashable:
    """Equal for layers of one kind with the same bytes and costs; what they hold for others depends on their place."""
    layer = profile.layers[index]
    costs = tuple(replace(x, waiting=()) if x.waiting else x for x in layer.costs)
    return layer.kind, layer.weight_bytes, layer.gradient_bytes, costs


def grouped(keys: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """The positions of equal keys, ordered by their first.

    >>> grouped("abba")
    ((0, 3), (1, 2))
    """
    found: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        found.setdefault(key, []).append(index)
    return tuple(tuple(members) for members in found.values())
