"""The rows of numbers that no other row matches or beats in every number."""

from __future__ import annotations

import numpy as np

from gplan.graph.down_sets import Bools, Floats, Ints

_CHUNK = 512  # rows compared at once


def undominated(rows: Floats | Ints, *, slack: float = 0) -> Ints:
    """Indices of rows, [N, D], that no other one matches or beats in every number; smaller is better.

    A number that is larger by up to `slack` still matches. Of equal rows the first is kept.
    """
    order = np.argsort(rows.sum(axis=1), kind="stable")  # a row comes after those that dominate it
    kept = order[:0]
    for start in range(0, len(order), _CHUNK):
        chunk = order[start : start + _CHUNK]
        chunk = chunk[~_at_most(rows[chunk], rows[kept], slack).any(axis=1)]
        earlier = np.tri(len(chunk), k=-1, dtype=np.bool_)
        inside = _at_most(rows[chunk], rows[chunk], slack) & earlier
        kept = np.concatenate([kept, chunk[~inside.any(axis=1)]])
    return kept


def _at_most(rows: Floats | Ints, others: Floats | Ints, slack: float) -> Bools:
    """[rows, others]: whether the other row is nowhere larger."""
    at_most = np.ones((len(rows), len(others)), dtype=np.bool_)
    for mine, theirs in zip(rows.T, others.T, strict=True):
        at_most &= theirs[None, :] <= mine[:, None] + slack
    return at_most
