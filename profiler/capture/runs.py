"""A main operation and the light ones that follow it: where a cut between them is of use.

In `conv relu | pool`, what relu makes is read twice: behind the pool both would cross. In `linear gelu dropout` as many
bytes cross at every cut: the last is as good as any.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from profiler.capture.wiring import Wiring, bytes_of, outputs_of

_AS_GOOD = 0.9  # a cut with more than this share of another's bytes is not better


def is_useful(num_bytes: int, others: Sequence[int]) -> bool:
    """Whether a cut is crossed by clearly fewer bytes than all others.

    >>> is_useful(80, [100, 120]), is_useful(100, [100, 120])
    (True, False)
    """
    return num_bytes <= _AS_GOOD * min(others)


def split_run(nodes: Sequence[Node], wiring: Wiring) -> list[list[Node]]:
    """The run, cut where fewer bytes cross than at any later cut; quadratic in its length.

    Where a light operation comes first, they must also be fewer than those that cross before it.
    """
    crossing = [_crossing_bytes(nodes, cut, wiring) for cut in range(len(nodes) + 1)]
    others = [] if wiring.is_main(nodes[0]) else crossing[:1]
    parts: list[list[Node]] = [[]]
    for cut, node in enumerate(nodes, start=1):
        parts[-1].append(node)
        later = crossing[cut + 1 :]
        if later and is_useful(crossing[cut], [*others, *later]):
            parts.append([])
    return parts


def _crossing_bytes(nodes: Sequence[Node], cut: int, wiring: Wiring) -> int:
    """What crosses a cut within the run and not one behind it, and what is made before the cut and read after it."""
    made = outputs_of(nodes[:cut], wiring)
    before, behind = set(nodes[:cut]), set(nodes[cut:])
    consumed = {x for node in behind for x in wiring.reads[node] - before - behind if wiring.readers[x] <= {*nodes}}
    return bytes_of(made) + bytes_of(consumed)
