"""The difference of two profiles as text: the whole model, the layers that changed most, then what else differs.

Each row is one quantity of one micro-batch, old and new. A row for several identical layers has the figures of one of
them; only its last column, "in total", is of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.core.units import bytes_text, error_text, percent_text, seconds_text, some_names
from gplan.evaluate.compare import prediction_error
from gplan.evaluate.profile_difference import (
    BytesChange,
    Change,
    Difference,
    SizeDifference,
    TimeChange,
)
from gplan.reporting.text.fitted_table import Column, FittedTable, Line, limited, names_of_equal, note_lines
from gplan.reporting.text.machine import link_text

_COLUMNS = (
    Column(key="layer", is_left=True, is_flexible=True),
    Column(key="quantity", is_left=True),
    *(Column(key=name) for name in ("old", "new", "change", "noise", "verdict", "in total")),
)
_SPARE = ("in total", "noise", "old")
_STYLES = {"slower": "red", "more": "red", "faster": "green", "less": "green", "same": ""}
_COMMON_CHANGE = 0.02  # a median change that suggests another cause than the model
_MOST_NAMES = 8


def difference_view(difference: Difference, *, only_changed: bool = True) -> RenderableType:
    """A table for each micro-batch size, the largest change of seconds first; below, what else differs.

    Only what changed is shown, and a long table is cut; or all layers and all rows.
    """
    views: list[RenderableType] = []
    for size in difference.sizes:
        title = f"{difference.new_model}, micro-batch size {size.microbatch_size}, per micro-batch: new against old"
        lines = tuple(_lines(size, only_changed=only_changed))
        table = FittedTable(title=title, columns=_COLUMNS, lines=lines, spare=_SPARE)
        views.append(limited(table, num_last=0, remedy="gplan diff --all") if only_changed else table)
        views.append(Text(_summary(size)))
    views.append(Text(f"link: {link_text(difference.old_link)} → {link_text(difference.new_link)}"))
    views.append(Text(f"old: made {difference.old_created}; new: made {difference.new_created}"))
    both = (("were added", difference.appeared), ("were removed", difference.vanished))
    moved = [f"layers that {what}: {some_names(names, most=_MOST_NAMES)}" for what, names in both if names]
    return Group(*views, *note_lines([*moved, *difference.remarks]))


def _lines(size: SizeDifference, *, only_changed: bool) -> Iterator[Line]:
    """The whole model's times, changed or not, and its sizes; then the layers by their change of seconds, then of bytes."""
    changes: list[Change] = [*size.times, *(x for x in size.memory if not only_changed or x.verdict != "same")]
    for index, change in enumerate(changes):
        yield _line("whole model" if index == 0 else "", change, count=1)
    for layer in sorted(size.layers, key=lambda x: (abs(x.change_s), x.change_bytes), reverse=True):
        count, changes = len(layer.names), [*layer.times, *layer.memory]
        names = layer.names[:1] if count == 1 else names_of_equal(layer.names[0], count)
        for index, change in enumerate(x for x in changes if not only_changed or x.verdict != "same"):
            name, *shorter = names if index == 0 else ("",)  # only a layer's first line has its name
            yield _line(name, change, count=count, shorter=tuple(shorter))


def _line(name: str, change: Change, *, count: int, shorter: tuple[str, ...] = ()) -> Line:
    numbers = _time_cells(change, count) if isinstance(change, TimeChange) else _bytes_cells(change, count)
    return Line(cells=(name, change.quantity, *numbers), shorter=shorter, style=_STYLES[change.verdict])


def _time_cells(change: TimeChange, count: int) -> tuple[str, ...]:
    """Old, new, change, noise, verdict, and the change of all identical layers together."""
    old_s, new_s = change.old_s, change.new_s
    share = error_text(prediction_error(new_s, old_s, "seconds"), "seconds")
    noise = f"± {percent_text(change.noise_s / old_s)}" if old_s else f"± {seconds_text(change.noise_s)}"
    total = _signed(seconds_text(count * change.change_s), change.change_s)
    return seconds_text(old_s), seconds_text(new_s), share, noise, change.verdict, total


def _bytes_cells(change: BytesChange, count: int) -> tuple[str, ...]:
    """The same cells for bytes, which are exact."""
    old, new = change.old_bytes, change.new_bytes
    share = error_text(prediction_error(new, old, "bytes"), "bytes")
    total = _signed(bytes_text(count * change.change_bytes), change.change_bytes)
    return bytes_text(old), bytes_text(new), share, "exact", change.verdict, total


def _signed(text: str, value: float) -> str:
    return f"+{text}" if value > 0 else text


def _summary(size: SizeDifference) -> str:
    """How many layers changed, and whether all changed alike."""
    num_layers = sum(len(x.names) for x in size.layers)
    num_changed = sum(len(x.names) for x in size.layers if x.is_changed)
    left = num_layers - num_changed
    return (
        f"{num_changed} of {num_layers} layers changed beyond the noise, {left} did not; in the median the layers' times "
        f"changed by {percent_text(size.median_change, signed=True)}"
        + (
            ": if all layers change alike, check the machine before the model"
            if abs(size.median_change) > _COMMON_CHANGE
            else ""
        )
    )
