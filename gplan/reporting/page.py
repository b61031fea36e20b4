"""The report as one HTML file that needs nothing else: no network, no script, charts as inline SVG.

Neutral colours of the charts become CSS variables, so that they follow a dark screen; colours with a meaning stay.
Every word that comes from a file is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import chain
from pathlib import Path

from gplan.nouns import Run
from gplan.reporting.colours import NEUTRALS, Neutral
from gplan.reporting.draw import Drawing
from gplan.reporting.frames import MEASURED, PREDICTED, Subject, plan_of, side_text
from gplan.reporting.layout import layout_text
from gplan.reporting.tables import (
    DEVICE_COLUMNS,
    STAGE_COLUMNS,
    Fact,
    Figures,
    Headline,
    device_lines,
    headlines,
    notes_of,
    plan_facts,
    run_facts,
    stage_lines,
    step_rows,
)
from gplan.units import counted

_GROUND = Neutral(name="ground", light="#f6f7f9", dark="#12161b")
_LINE = Neutral(name="line", light="#dfe4ea", dark="#2d353f")
_CAPTIONS = {
    "pipeline": (
        "Pipeline",
        "A row is a device; numbers are micro-batches, and of a device's stages the later ones are lighter. Idle time is "
        "shaded by its cause: warm-up and drain come with every pipeline, imbalance from stages of unequal cost, "
        "communication from waiting for a transfer, optimizer from waiting for the others before or after the update. "
        "A yellow strip below a device is its output on the way.",
    ),
    "partition": (
        "Partition",
        "Above, every layer's cost in model order; dashed lines are the cuts. Below, the device time that one "
        "micro-batch occupies on each stage, with what the stage receives from its neighbours.",
    ),
    "memory": (
        "Memory",
        "What each device holds at its peak, by category, and the action at which the peak occurs. Where a device has "
        "several stages, thin lines part what each of them holds, the first one's at the bottom.",
    ),
    "memory-timeline": (
        "Memory over time",
        "What each device holds as the predicted step goes on: from a forward to its backward the activations grow and "
        "shrink. While an action runs, the most that is held during it is shown.",
    ),
}


def page(subject: Subject, drawings: Sequence[Drawing]) -> str:
    """The whole HTML file for a plan or a run, with its charts."""
    title = escape(plan_of(subject).model.name)
    body = "\n".join(chain(_top(subject), _charts(drawings), _tables(subject)))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>gplan report: {title}</title>\n'
        f"<style>\n{_style()}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def inline_svg(drawing: Drawing) -> str:
    """An SVG file as an element of a page: no prologue, as wide as its place, neutral colours as CSS variables."""
    svg = drawing.svg.decode()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    for neutral in NEUTRALS:
        svg = svg.replace(neutral.light, f"var(--{neutral.name})")
    label = escape(_CAPTIONS[drawing.name][0])
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label} chart" ', 1).strip()


def _style() -> str:
    light, dark = (
        " ".join(f"--{x.name}: {getattr(x, shade)};" for x in (*NEUTRALS, _GROUND, _LINE))
        for shade in ("light", "dark")
    )
    sheet = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{sheet}"


def _top(subject: Subject) -> Iterator[str]:
    plan = plan_of(subject)
    samples = counted(plan.microbatch_size, "sample")
    facts = f"{layout_text(plan)} of {samples}, recompute {plan.recompute}"
    yield '<p class="kicker">gplan report</p>'
    yield f'<h1>{escape(plan.model.name)}</h1>\n<p class="lead">{escape(facts)}</p>'
    if isinstance(subject, Run) and subject.engine == "virtual":
        yield (
            '<p class="warn"><strong>Virtual engine.</strong> One process really computed and timed every action; '
            "the devices and the links between them exist on the clock only.</p>"
        )
    yield f'<div class="cards">{"".join(_card(x) for x in headlines(subject))}</div>'
    yield from (f'<p class="warn">{escape(note)}</p>' for note in notes_of(subject))


def _card(headline: Headline) -> str:
    big, origin = headline.measured or headline.predicted, "measured" if headline.measured else "computed"
    small = [origin, f"predicted {headline.predicted}", f"error {headline.error}"][: 3 if headline.measured else 1]
    lines = "".join(f'<div class="small">{escape(line)}</div>' for line in small)
    return f'<div class="card"><h3>{escape(headline.name)}</h3><div class="big">{escape(big)}</div>{lines}</div>'


def _charts(drawings: Sequence[Drawing]) -> Iterator[str]:
    by_name = {drawing.name: drawing for drawing in drawings}
    for name in (name for name in _CAPTIONS if name in by_name):
        title, caption = _CAPTIONS[name]
        yield f"<h2>{title}</h2>"
        yield (
            f'<figure><div class="chart">{inline_svg(by_name[name])}</div>'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )


def _tables(subject: Subject) -> Iterator[str]:
    if isinstance(subject, Run):
        yield from _comparison(subject)
    yield from _stages(subject)
    yield from _devices(subject)
    if isinstance(subject, Run):
        yield f"<h2>How it was measured</h2>\n{_facts(run_facts(subject))}"
    yield f"<h2>The plan</h2>\n{_facts(plan_facts(plan_of(subject)))}"
    yield "<footer>Made by gplan. Computed figures come from the cost model and the simulator.</footer>"


def _comparison(run: Run) -> Iterator[str]:
    yield "<h2>Predicted against measured</h2>"
    yield (
        "<p>An error is the prediction less the measurement, over the measurement; of shares it is the difference in "
        "percentage points. Positive: the prediction was too high. Idle time is of all devices together.</p>"
    )
    yield '<div class="scroll"><table><thead><tr><th class="text">whole step</th>'
    sides = (escape(side_text(run, side)) for side in (PREDICTED, MEASURED))
    yield "".join(f"<th>{name}</th>" for name in (*sides, "error")) + "</tr></thead><tbody>"
    for quantity, predicted, measured, error in step_rows(run):
        cells = f"<td>{predicted}</td><td><b>{measured}</b></td><td>{error}</td>"
        yield f'<tr><td class="text">{escape(quantity)}</td>{cells}</tr>'
    yield "</tbody></table></div>"


def _stages(subject: Subject) -> Iterator[str]:
    yield "<h2>Stages</h2>"
    yield "<p>Forward and backward are means per micro-batch; a backward has its halves and its recompute in it.</p>"
    yield _table_head("stage", "layers", STAGE_COLUMNS)
    for line in stage_lines(subject):
        names = (f'<span class="name">{escape(x)}</span>' for x in dict.fromkeys((line.first_layer, line.last_layer)))
        yield _table_row(line.name, f"{escape(line.indices)}<br>{' to '.join(names)}", line.figures)
    yield "</tbody></table></div>"


def _devices(subject: Subject) -> Iterator[str]:
    yield "<h2>Devices</h2>"
    yield "<p>Busy and idle are the time of one step, from the first forward to the last backward of all devices.</p>"
    yield _table_head("device", "stages", DEVICE_COLUMNS)
    yield from (_table_row(line.name, escape(line.stages), line.figures) for line in device_lines(subject))
    yield "</tbody></table></div>"


def _table_head(name: str, what: str, columns: Iterable[str]) -> str:
    start = f'<div class="scroll"><table><thead><tr><th class="text">{name}</th><th class="text">{what}</th><th></th>'
    return start + "".join(f"<th>{column}</th>" for column in columns) + "</tr></thead><tbody>"


def _table_row(name: str, what: str, figures: Figures) -> str:
    """A row; `what` is HTML."""
    sides = ("computed", "measured", "error")[: len(figures[0])]
    cells = "".join(_stacked(lines) for lines in (sides, *figures))
    return f'<tr><td class="text">{escape(name)}</td><td class="text layers">{what}</td>{cells}</tr>'


def _stacked(lines: Sequence[str]) -> str:
    """A cell with the computed figure and, for a run, the measured one and the error below it."""
    tags = zip(("span", "b", "small"), lines, strict=False)
    return f"<td>{'<br>'.join(f'<{tag}>{escape(line)}</{tag}>' for tag, line in tags)}</td>"


def _facts(facts: Iterable[Fact]) -> str:
    pairs = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f'<dl class="facts">{pairs}</dl>'
