"""Seconds of a transfer as a linear expression of its bytes, exactly: a latency that is paid where anything is sent.

With measured points the seconds are piecewise linear: n bytes take seconds[j] + slope[j] (n - start[j]) in piece j.
Where the slopes rise, every piece is a row; where they do not, a binary for each piece says which one counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from gplan.balancer.milp.program import Expression, Program, total, weighted
from gplan.nouns import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """What is sent: bytes, whether there are any (0 or 1), and above which number they never are."""

    num_bytes: Expression
    is_any: Expression
    most_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Sizes from `start_bytes` on, which take `seconds` at their start; both are shares of the largest here."""

    start: float
    seconds: float
    slope: float


def transfer(program: Program, name: str, *, link: Link, amount: Amount, unit_s: float) -> Expression:
    """The time of one transfer, in units, or, where the program minimises it, a variable of at least that."""
    most = amount.most_bytes
    if not most:
        return 0.0
    pieces = _pieces(link, most, unit_s)
    sent = weighted([(1.0 / most, amount.num_bytes)])
    if len(pieces) == 1:
        return weighted([(pieces[0].seconds, amount.is_any), (pieces[0].slope, sent)])
    if all(one.slope <= other.slope for one, other in pairwise(pieces)):
        rows = (_line(piece, sent, amount.is_any) for piece in pieces)
        return program.at_least(name, rows)
    return _chosen(program, name, pieces, sent, amount.is_any)


def _pieces(link: Link, most_bytes: float, unit_s: float) -> list[_Piece]:
    """The pieces of a link up to the most bytes; of a share of them, in units of time."""
    if not link.points:
        return [_Piece(start=0.0, seconds=link.latency_s / unit_s, slope=most_bytes / link.bytes_per_s / unit_s)]
    sizes = [0, *(x.num_bytes for x in link.points)]
    seconds = [link.points[0].seconds, *(x.seconds for x in link.points)]
    rates = [(s - r) / (n - m) for (m, r), (n, s) in pairwise(zip(sizes, seconds, strict=True))]
    return [
        _Piece(start=size / most_bytes, seconds=at_s / unit_s, slope=rate * most_bytes / unit_s)
        for size, at_s, rate in zip(sizes, seconds, [*rates, 1 / link.bytes_per_s], strict=True)
        if size < most_bytes
    ]


def _line(piece: _Piece, sent: Expression, is_any: Expression) -> Expression:
    """The line of a piece, 0 where nothing is sent."""
    return weighted([(piece.seconds - piece.slope * piece.start, is_any), (piece.slope, sent)])


def _chosen(program: Program, name: str, pieces: list[_Piece], sent: Expression, is_any: Expression) -> Expression:
    """The time by the one piece that is chosen, which must reach as far as what is sent."""
    ends = [*(x.start for x in pieces[1:]), 1.0]
    chosen = [program.variable(f"{name}_piece_{j}", is_binary=True) for j in range(len(pieces))]
    beyond = [program.variable(f"{name}_beyond_{j}", high=1) for j in range(len(pieces))]
    for piece, end, is_chosen, more in zip(pieces, ends, chosen, beyond, strict=True):
        program.require(weighted([(end - piece.start, is_chosen)]), at_least=more)
    program.require_equal(total(chosen), is_any)
    reached = [(x.start, choice) for x, choice in zip(pieces, chosen, strict=True)] + [(1.0, more) for more in beyond]
    program.require(weighted(reached), at_least=sent)
    times = [(x.seconds, choice) for x, choice in zip(pieces, chosen, strict=True)]
    return weighted(times + [(x.slope, more) for x, more in zip(pieces, beyond, strict=True)])
