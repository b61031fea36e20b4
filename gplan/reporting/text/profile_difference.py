"""The difference of two profiles as text: the whole model, the layers that changed most, then what else differs.

Each row is one quantity of one micro-batch, old and new. A row for several identical layers has the figures of one of
them; only its last column, "in total", is of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.core.units import error_text, percent_text, quantity_text, seconds_text, some_names
from gplan.evaluate.compare import prediction_error
from gplan.evaluate.profile_difference import Change, Difference, SizeDifference
from gplan.reporting.text.fitted_table import FittedTable, Line, limited, names_of_equal, note_lines
from gplan.reporting.text.machine import link_text

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
        table = FittedTable(title=title, lines=lines, left=("quantity",), spare=_SPARE)
        views.append(limited(table, num_last=0, remedy="gplan diff --all") if only_changed else table)
        views.append(Text(_summary(size)))
    views.append(Text(f"link: {link_text(difference.old_link)} → {link_text(difference.new_link)}"))
    views.append(Text(f"old: made {difference.old_created}; new: made {difference.new_created}"))
    both = (("were added", difference.appeared), ("were removed", difference.vanished))
    moved = [f"layers that {what}: {some_names(names, most=_MOST_NAMES)}" for what, names in both if names]
    return Group(*views, *note_lines([*moved, *difference.remarks]))


def _lines(size: SizeDifference, *, only_changed: bool) -> Iterator[Line]:
    """The whole model's times, changed or not, and its sizes; then the layers by their change of seconds, then of bytes."""
    changes = [x for x in size.whole_model if not only_changed or x.verdict != "same" or x.unit == "seconds"]
    for index, change in enumerate(changes):
        yield _line(("whole model",) if index == 0 else ("",), change, count=1)
    for layer in sorted(size.layers, key=lambda x: (abs(x.change_s), x.change_bytes), reverse=True):
        count = len(layer.names)
        names = layer.names[:1] if count == 1 else names_of_equal(layer.names[0], count)
        for index, change in enumerate(x for x in layer.changes if not only_changed or x.verdict != "same"):
            yield _line(names if index == 0 else ("",), change, count=count)  # only a layer's first line has its name


def _line(names: tuple[str, ...], change: Change, *, count: int) -> Line:
    """Old, new, change, noise, verdict, and the change of all `count` identical layers together."""
    old, new, unit = change.old, change.new, change.unit
    noise = f"± {percent_text(change.noise / old)}" if old else f"± {seconds_text(change.noise)}"
    cells = {
        "layer": names[0],
        "quantity": change.quantity,
        "old": quantity_text(old, unit),
        "new": quantity_text(new, unit),
        "change": error_text(prediction_error(new, old, unit), unit),
        "noise": "exact" if unit == "bytes" else noise,
        "verdict": change.verdict,
        "in total": ("+" if change.change > 0 else "") + quantity_text(count * change.change, unit),
    }
    return Line(cells=cells, shorter=names[1:], style=_STYLES[change.verdict])


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
