"""The table of layers: which columns a profile has figures for, what each says, and which go first where room is short.

A row stands for one layer or for several that share their figures; its figures are those of one of them, its share and
bar those of all of them. A time with another origin than the profile's is marked by the letter of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from gplan.nouns import LayerCost, Origin, Profile
from gplan.tables.fitting import Column, FittedTable, Line, limited, shortened
from gplan.units import bytes_text, flops_text, intensity_text, percent_text, seconds_text

Sort: TypeAlias = Literal["cost", "order", "memory"]
"""What comes first: the dearest layer, the model's first one, or the one that holds most."""

_BAR_CELLS = 8
_LAST_IN_ORDER = 20  # of a table that is cut: the head and the loss are worth seeing
_PASSES = ("forward", "backward")  # times whose quartiles are shown
_HALVES = ("first backward", "input gradient", "weight gradient")
_SPARE = (
    "kind", *_HALVES, "pending", "gradient", "bar", "output", "workspace", "intensity", "spread", "contention", "rate",
    "stash", "weights", "share",
)  # fmt: skip
_SPARE_BY_MEMORY = (
    "kind", "spread", *_HALVES, "intensity", "contention", "rate", "bar", "gradient", "pending", "output", "backward",
    "forward", "workspace", "share",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One layer, or several alike, or the loss."""

    names: tuple[str, ...]  # the whole text, then shorter forms
    kind: str
    num_layers: int
    weight_bytes: int  # of each of them
    gradient_bytes: int
    cost: LayerCost

    @property
    def time_s(self) -> float:
        """Forward and backward of one micro-batch, of all of them."""
        return self.num_layers * (self.cost.forward.median_s + self.cost.backward.median_s)

    @property
    def held_bytes(self) -> int:
        """Weights, gradients and the stash of one micro-batch, of all of them."""
        return self.num_layers * (self.weight_bytes + self.gradient_bytes + self.cost.stash_bytes)

    @property
    def num_flops(self) -> int:
        """Counted operations of one layer, forward and backward."""
        return sum(x.num_flops for x in (*self.cost.forward_work, *self.cost.backward_work))

    @property
    def work_bytes(self) -> int:
        """What these operations read and write."""
        return sum(x.num_bytes for x in (*self.cost.forward_work, *self.cost.backward_work))


_Shown: TypeAlias = tuple[Column, Callable[[LayerRow], str]]
"""A column and the text that it has for a row."""


def layer_table(title: str, rows: Sequence[LayerRow], profile: Profile, *, sort: Sort, is_limited: bool) -> FittedTable:
    """One line a row in the order asked for; a limited table says how many rows it leaves out."""

    def amount(row: LayerRow) -> float:
        return row.held_bytes if sort == "memory" else row.time_s

    shown = [*_name_columns(), *_time_columns(rows, profile), *_share_columns(rows, amount), *_byte_columns(rows)]
    ranked = rows if sort == "order" else sorted(rows, key=amount, reverse=True)
    table = FittedTable(
        title=title,
        columns=tuple(column for column, _ in shown),
        lines=tuple(Line(cells=tuple(text(row) for _, text in shown), shorter=row.names[1:]) for row in ranked),
        spare=_SPARE_BY_MEMORY if sort == "memory" else _SPARE,
    )
    num_last = _LAST_IN_ORDER if sort == "order" else 0
    return limited(table, num_last=num_last, remedy="gplan show --all") if is_limited else table


def marked_origins(rows: Sequence[LayerRow], profile: Profile) -> tuple[Origin, ...]:
    """The origins that some time in the table is marked with."""
    timings = [timing for row in rows for timing in row.cost.timings.values()]
    return tuple(dict.fromkeys(x.origin for x in timings if x.origin != profile.origin))


def _name_columns() -> Iterator[_Shown]:
    yield Column(key="layer", is_left=True, is_flexible=True), lambda row: row.names[0]
    yield Column(key="kind", is_left=True), lambda row: shortened(row.kind, 20)


def _time_columns(rows: Sequence[LayerRow], profile: Profile) -> Iterator[_Shown]:
    """Times with their spread, and what only some profiles have: halves of the backward, contention, counted work."""
    for key in (*_PASSES, *_HALVES):
        if any(key in row.cost.timings for row in rows):
            yield Column(key=key), partial(_time_text, key=key, usual=profile.origin)
        if key in _PASSES and any(row.cost.timings[key].num_samples for row in rows):
            yield Column(key="spread", title="±"), partial(_spread_text, key=key)
    if profile.num_neighbours:
        yield Column(key="contention"), lambda row: f"× {row.cost.contention:.2f}"
    if any(row.num_flops for row in rows):
        yield Column(key="rate"), _rate_text
        yield Column(key="intensity"), _intensity_text


def _share_columns(rows: Sequence[LayerRow], amount: Callable[[LayerRow], float]) -> Iterator[_Shown]:
    """Of the whole as a number, and of the largest row as a bar."""
    total, largest = sum(map(amount, rows)), max(map(amount, rows))
    yield Column(key="share"), lambda row: percent_text(amount(row) / total) if total else "–"
    yield (
        Column(key="bar", title="", is_left=True),
        lambda row: "█" * max(1, round(_BAR_CELLS * amount(row) / largest)) if amount(row) else "",
    )


def _byte_columns(rows: Sequence[LayerRow]) -> Iterator[_Shown]:
    yield Column(key="weights"), lambda row: bytes_text(row.weight_bytes)
    yield Column(key="stash"), lambda row: bytes_text(row.cost.stash_bytes)
    if any(row.cost.pending_bytes for row in rows):
        yield Column(key="pending"), lambda row: bytes_text(row.cost.pending_bytes)
    yield Column(key="workspace"), lambda row: bytes_text(row.cost.workspace_bytes)
    yield Column(key="output"), lambda row: bytes_text(row.cost.output_bytes)
    yield Column(key="gradient"), lambda row: bytes_text(row.cost.output_gradient_bytes)


def _time_text(row: LayerRow, *, key: str, usual: Origin) -> str:
    timing = row.cost.timings.get(key)
    if timing is None:
        return "–"
    text = seconds_text(timing.median_s)
    return text if timing.origin == usual else f"{timing.origin[0]} {text}"


def _spread_text(row: LayerRow, *, key: str) -> str:
    """Half the distance of the quartiles, as a share of the median."""
    timing = row.cost.timings[key]
    return percent_text((timing.high_s - timing.low_s) / 2 / timing.median_s) if timing.median_s else "–"


def _rate_text(row: LayerRow) -> str:
    """Counted operations over the time of one layer."""
    time_s = row.time_s / row.num_layers
    return f"{flops_text(row.num_flops / time_s)}/s" if row.num_flops and time_s else "–"


def _intensity_text(row: LayerRow) -> str:
    return intensity_text(row.num_flops / row.work_bytes) if row.num_flops and row.work_bytes else "–"
