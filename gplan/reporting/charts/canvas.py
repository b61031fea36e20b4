"""What all charts share: the style, drawing, words for stages and layers, and figures as PNG and SVG bytes.

Figures have no global state. Text in SVG stays text. Every id in an SVG begins with the chart's name, so several charts
can be in one HTML page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from gplan.core import Plan
from gplan.core.stage_cost import Floats
from gplan.reporting.looks import FAINT, GRID, HATCH, INK, PAPER, Look

_MOST_LISTED = 4


def stages_text(stages: Sequence[int]) -> str:
    """The stages of a device; of many, the first two and the last.

    >>> stages_text([3]), stages_text([0, 4]), stages_text(range(0, 64, 8))
    ('stage 3', 'stages 0, 4', 'stages 0, 8 … 56')
    """
    if len(stages) == 1:
        return f"stage {stages[0]}"
    if len(stages) <= _MOST_LISTED:
        return f"stages {', '.join(map(str, stages))}"
    return f"stages {', '.join(map(str, stages[:2]))} … {stages[-1]}"


def stage_text(plan: Plan, stage: int) -> str:
    """A stage, with its device if devices hold several."""
    return f"stage {stage}, device {plan.devices[stage]}" if plan.has_chunks else f"stage {stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One chart in both formats."""

    name: str
    png: bytes
    svg: bytes


Handle: TypeAlias = Artist | tuple[Artist, ...]

WIDTH_INCHES, HALF_INCHES = 11.0, 5.6
_DOTS_PER_INCH = 150
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.color": INK.light,
    "axes.labelcolor": FAINT.light,
    "axes.edgecolor": GRID.light,
    "axes.facecolor": PAPER.light,
    "axes.titlesize": 10.0,
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.facecolor": PAPER.light,
    "grid.color": GRID.light,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.4,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a "$" in a layer's name is no formula
    "xtick.color": GRID.light,
    "ytick.color": GRID.light,
    "xtick.labelcolor": FAINT.light,
    "ytick.labelcolor": INK.light,
}


@contextmanager
def chart_style(name: str) -> Iterator[None]:
    """The style of all charts; `name` makes the SVG's ids unique."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):  # type: ignore[dict-item]
        yield


def blank_figure(height_inches: float, *, width_inches: float = WIDTH_INCHES) -> Figure:
    """A figure that makes room for its labels."""
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def headline(figure: Figure, title: str) -> None:
    """The chart's title, at the left edge."""
    figure.suptitle(title, x=0.008, ha="left", fontsize=12.5, fontweight="bold")


def boxes(
    axes: Axes, look: Look, *, left: Floats, right: Floats, bottom: Floats, height: float, gap_points: float = 0.0
) -> None:
    """Rectangles of one look as a single path, with a seam of `gap_points` in the colour of the paper.

    The limits of the axes do not change: computing those of many boxes takes longer than drawing them.
    """
    if not len(left):
        return
    top = bottom + height
    corners = np.stack([left, bottom, right, bottom, right, top, left, top], axis=1).reshape(-1, 4, 2)
    edge = HATCH.light if look.hatch else PAPER.light
    path = Path.make_compound_path_from_polys(corners)
    width = 0.0 if look.hatch else gap_points
    axes.add_artist(PathPatch(path, facecolor=look.colour, edgecolor=edge, hatch=look.hatch, linewidth=width))


def swatch(look: Look) -> Patch:
    """The legend's picture of a look."""
    edge = HATCH.light if look.hatch else look.colour
    return Patch(facecolor=look.colour, edgecolor=edge, hatch=look.hatch, linewidth=0.0, label=look.name)


def note(axes: Axes, x: float, y: float, text: str, **style: object) -> None:
    """Text with a background, so that lines behind it do not strike it through."""
    behind = {"facecolor": PAPER.light, "edgecolor": "none", "pad": 0.6}
    axes.annotate(text, (x, y), textcoords="offset points", bbox=behind, **style)  # type: ignore[arg-type]


def tooltip(artist: Artist, *lines: str) -> None:
    """A tooltip of a mark in the SVG; the first line is its heading."""
    artist.set_gid(_TOOLTIP + _LINE_END.join(lines))


def legend(figure: Figure, handles: Sequence[Handle], *, most_in_a_row: int = 6) -> None:
    """One legend below all axes; handles in a tuple share the name of the first."""
    num_rows = max(1, -(-len(handles) // most_in_a_row))
    num_columns = max(1, -(-len(handles) // num_rows))
    names = [str((x[0] if isinstance(x, tuple) else x).get_label()) for x in handles]
    beside = {tuple: HandlerTuple(ndivide=None, pad=0.0)}
    place = "outside lower center"
    figure.legend(list(handles), names, loc=place, ncols=num_columns, handler_map=beside)  # type: ignore[call-overload]


def end_of_name(name: str, longest: int) -> str:
    """A name of at most `longest` characters, without its beginning if it is longer.

    >>> end_of_name("examples/transformer_lm.py", 12), end_of_name("model.py", 12)
    ('…ormer_lm.py', 'model.py')
    """
    return name if len(name) <= longest else f"…{name[len(name) - longest + 1 :]}"


def short_names(names: Sequence[str], longest: int) -> list[str]:
    """Names of layers with at most `longest` characters (at least 10), all different if the names are.

    A longer name loses the parts that tell it from no other, then letters of its other words but the last, then the end of
    the last; where two would be equal, they are numbered.

    >>> short_names(["head", "blocks.4.attention.out", "blocks.4.mlp.0.linear"], 16)
    ['head', 'bloc.4.attention', 'blocks.4.mlp.0']
    >>> short_names([f"attention.query_key_value_{x}" for x in "ab"], 10)
    ['query_key…', '2:query_k…']
    """
    children: dict[tuple[str, ...], set[str]] = {}
    for parts in (name.split(".") for name in names):
        for i, part in enumerate(parts):
            children.setdefault(tuple(parts[:i]), set()).add(part)
    found = {name: name for name in names if len(name) <= longest}
    taken = set(found.values())
    for index, name in enumerate(names, start=1):
        if name not in found:
            parts = name.split(".")
            telling = [x for i, x in enumerate(parts) if x.isdigit() or len(children[tuple(parts[:i])]) > 1] or parts[
                -1:
            ]
            forms = [
                ".".join([*(x if x.isdigit() else x[:letters] for x in telling[:-1]), telling[-1]])
                for letters in (longest, 4, 3, 2, 1)
            ]
            forms += [f"{forms[-1][: longest - 1]}…", f"{index}:{forms[-1]}"[: longest - 1] + "…"]
            found[name] = next((x for x in (*forms, str(index)) if len(x) <= longest and x not in taken), name)
            taken.add(found[name])
    return [found[name] for name in names]


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DOTS_PER_INCH)
    return content.getvalue()


def to_svg(figure: Figure, name: str) -> bytes:
    """The figure as an SVG file whose ids begin with `name`; coordinates to a hundredth of a point."""
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None, "Title": name})
    return _TAG.sub(lambda tag: _tidied(tag[0], name), content.getvalue().decode()).encode()


_TOOLTIP, _LINE_END = "tooltip:", " | "
_TOOLTIP_GROUP = re.compile(rf'<g id="{_TOOLTIP}([^"]*)">')
_TAG = re.compile(r"<[a-z][^>]*>")
_ID = re.compile(r'(\bid="|href="#|url\(#)')
_COORDINATES = re.compile(r' (?:d|x|y|transform)="[^"]*"')
_LONG_DECIMALS = re.compile(r"(\.\d\d)\d+")
_NEEDLESS_SPACE = re.compile(r"\s+(?=[MLCQz])|(?<=[MLCQz])\s+")  # beside the letters of a path

_RECTANGLE = re.compile(r"M(\S+) (\S+)L(\S+) \2L\3 (\S+)L\1 \4z")


def _tidied(tag: str, name: str) -> str:
    match = _TOOLTIP_GROUP.fullmatch(tag)
    if match:
        words = match[1].replace(_LINE_END, "&#10;")
        return f'<g class="point"><title>{words}</title>'
    named = _ID.sub(rf"\g<1>{name}-", tag)
    short = _COORDINATES.sub(lambda match: _NEEDLESS_SPACE.sub("", _LONG_DECIMALS.sub(r"\1", match[0])), named)
    return _RECTANGLE.sub(r"M\1 \2H\3V\4H\1z", short)
