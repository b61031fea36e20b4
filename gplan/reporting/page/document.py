"""The report as one HTML file: it contains its styles, scripts and charts, and its policy forbids loading anything.

Neutral colours of the charts become CSS variables, so that they adapt to a dark screen; colours with a meaning stay.
All text from files is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median

from gplan.core import Plan, Run
from gplan.core.precision import precision_suffix
from gplan.core.units import bytes_text, counted, error_text, percent_text, quantity_text, seconds_text
from gplan.evaluate.compare import (
    BUBBLE,
    PEAK_MEMORY,
    STEP_TIME,
    ComparisonRow,
    compare,
    samples_per_s,
    stale_prediction_notes,
)
from gplan.evaluate.explain import Explanation
from gplan.reporting.analysis import PlanAnalysis
from gplan.reporting.charts.canvas import Drawing
from gplan.reporting.looks import NEUTRALS, Neutral
from gplan.reporting.page.figures import charts_of, pipeline_figure, strip
from gplan.reporting.subject import Subject, capacity_bytes, capacity_name, measured_peaks, plan_of
from gplan.reporting.text.explanation import (
    headline,
    options_table,
    step_parts,
    step_table,
)
from gplan.reporting.text.fitted_table import FittedTable
from gplan.reporting.text.machine import device_text, link_text
from gplan.reporting.text.plan import host_bound_lines, setting_text, sharding_text, stages_table
from gplan.reporting.text.run import (
    OTHER_ORDER,
    attribution_table,
    check_text,
    comparison_table,
    devices_table,
    step_text,
    whole_batch_text,
)
from gplan.schedules.registry import schedule_info
from gplan.simulation.simulator import simulate

_GROUND = Neutral(name="ground", light="#f6f7f9", dark="#12161b")
_LINE = Neutral(name="line", light="#dfe4ea", dark="#2d353f")
_SCRIPTS = ("text", "tip", "pipeline", "drawing", "hands")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_BEGINNING = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>gplan report: {title}</title>
<style>
{style}</style>
</head>
<body>
<main>
"""
_STRIP_CAPTION = (
    "The width of a layer is its forward and backward time of one micro-batch. A block is a stage, a gap is a cut. Point "
    "at a layer or a stage for its name and times."
)

Section = tuple[str, str, str]
"""Its id, its title and its HTML."""

Fact = tuple[str, str]
"""Its name and its value."""


def page(subject: Subject, drawings: Sequence[Drawing], analysis: PlanAnalysis) -> str:
    """The whole HTML file for a plan or a run, with its charts."""
    title = escape(plan_of(subject).model.name)
    sections = [x for x in _sections(subject, drawings, analysis) if x[2]]
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading, _ in sections)
    body = "\n".join(
        (
            *_top(subject, analysis),
            f'<nav aria-label="Contents"><ul>{links}</ul></nav>',
            *(f'<section id="{name}">\n<h2>{title}</h2>\n{html}\n</section>' for name, title, html in sections),
            "<footer>Made by gplan. Predicted figures come from the cost model and the simulator.</footer>",
        )
    )
    light, dark = (
        " ".join(f"--{x.name}: {getattr(x, shade)};" for x in (*NEUTRALS, _GROUND, _LINE))
        for shade in ("light", "dark")
    )
    folder = Path(__file__).parent
    sheet = folder.joinpath("page.css").read_text(encoding="utf-8")
    style = f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{sheet}"
    parts = (folder.joinpath(f"script/{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    script = "(() => {\n" + "\n".join(('"use strict";', *parts)) + "})();\n"  # in a scope of their own
    beginning = _BEGINNING.format(policy=_POLICY, title=title, style=style)
    return f"{beginning}{body}\n</main>\n<script>\n{script}</script>\n</body>\n</html>\n"


def _top(subject: Subject, analysis: PlanAnalysis) -> Iterator[str]:
    plan = plan_of(subject)
    facts = f"{setting_text(plan)}{precision_suffix(plan.precision)}"
    yield '<p class="kicker">gplan report</p>'
    yield f'<h1>{escape(plan.model.name)}</h1>\n<p class="lead">{escape(facts)}</p>'
    if isinstance(subject, Run) and subject.engine == "virtual":
        yield (
            '<p class="warn"><strong>Virtual engine.</strong> One process computed and timed every action; the '
            "devices and the links between them are simulated.</p>"
        )
    yield f'<div class="cards">{"".join(_card(x) for x in headlines(subject))}</div>'
    if analysis.explanation is not None:
        words = (escape(x).replace(" %", "&nbsp;%") for x in headline(analysis.explanation))  # no line begins with %
        yield f'<div class="words">{"".join(f"<p>{x}</p>" for x in words)}</div>'
    if notes := "".join(f"<li>{escape(note)}</li>" for note in dict.fromkeys(_notes_of(subject))):
        yield f'<ul class="warn">{notes}</ul>'


def _notes_of(subject: Subject) -> tuple[str, ...]:
    """The notes at the top of the page."""
    return subject.all_notes if isinstance(subject, Run) else (*subject.notes, *stale_prediction_notes(subject))


def _card(figure: Headline) -> str:
    """A headline figure: the measured value, and below it the prediction and its error."""
    big, origin = figure.measured or figure.predicted, "measured" if figure.measured else "predicted"
    pairs = [
        ("predicted", figure.predicted if figure.measured else None),
        ("error", figure.error),
    ]
    lines = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs if value)
    return (
        f'<div class="card"><h3>{escape(figure.name)}</h3><div class="big">{escape(big)}</div>'
        f'<div class="small">{escape(", ".join(filter(None, (origin, figure.detail))))}</div>{f"<dl>{lines}</dl>" if lines else ""}</div>'
    )


def _sections(subject: Subject, drawings: Sequence[Drawing], analysis: PlanAnalysis) -> Iterator[Section]:
    """The sections below the headlines; those without content have empty HTML."""
    plan = plan_of(subject)
    charts = charts_of(drawings, plan)
    caption = f'<p class="caption">{_STRIP_CAPTION}</p>'
    yield "partition", "Partition", f'<div class="panel">{strip(plan)}{caption}</div>{charts("partition")}'
    yield "pipeline", "Pipeline", pipeline_figure(subject, drawings)
    yield "memory", "Memory", charts("memory-timeline", "memory")
    if isinstance(subject, Run):
        parts = attribution_table(subject)
        why = f"<p>{OTHER_ORDER}.</p>" if parts is None else f"<h3>{parts.title.capitalize()}</h3>{table(parts)}"
        compared = charts("accuracy", "errors") + table(comparison_table(subject)) + why
        yield "accuracy", "Predicted against measured", compared
    yield "choices", "Other choices", charts("choices", "frontier")
    if analysis.explanation is not None:
        yield "reasons", "Why this plan", _reasons(analysis.explanation, told=_notes_of(subject))
    stages = table(stages_table(plan, simulate(plan)))
    if isinstance(subject, Run):
        stages = f"<h3>Predicted</h3>{stages}<h3>Measured</h3>{table(devices_table(subject))}"
    yield "stages", "Stages and devices", stages
    if isinstance(subject, Run):
        yield "measuring", "How it was measured", _facts_list(run_facts(subject))
    yield "plan", "The plan", _facts_list(plan_facts(plan))


def _reasons(explanation: Explanation, *, told: Sequence[str]) -> str:
    """The tables of an explanation, and its notes but those that were `told`."""
    shares = [x / explanation.step_s for x in step_parts(explanation.bottleneck).values()]
    step, options = step_table(explanation), options_table(explanation)
    parts = [f'<p class="warn">{escape(note)}</p>' for note in explanation.notes if note not in told]
    parts.append(f"<h3>{step.title}</h3>{table(step, shares=shares)}")
    if options is None:
        parts.append(f"<p>What would help is not known: {escape(explanation.options[0].reason)}.</p>")
    else:
        missing = [f"<li>{escape(f'{x.label}: {x.reason}')}</li>" for x in explanation.options if x.outcome is None]
        parts.append(f"<h3>{escape(options.title)}</h3>{table(options)}")
        if missing:
            parts.append(f"<details><summary>{len(missing)} left out</summary><ul>{''.join(missing)}</ul></details>")
    return "".join(parts)


def _facts_list(facts: Iterable[Fact]) -> str:
    """Names with their values."""
    pairs = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f'<dl class="facts">{pairs}</dl>'


def table(shown: FittedTable, *, shares: Sequence[float] = ()) -> str:
    """All columns and rows of a table without its title; `shares`, by row, are drawn as bars in the last column."""
    kinds = [' class="text"' if shown.is_left(key) else "" for key in shown.keys]
    heads = [f"{shown.head(key)} {shown.group(key)}".strip() for key in shown.keys]
    head = "".join(f"<th{kind}>{escape(text)}</th>" for kind, text in zip(kinds, heads, strict=True))
    rows = [
        [f"<td{kind}>{escape(text)}</td>" for kind, text in zip(kinds, line.cells.values(), strict=True)]
        for line in shown.lines
    ]
    for row, share in zip(rows, shares, strict=False):
        bar = f'<span class="bar"><i style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></i></span>'
        row[-1] = f'<td{kinds[-1]}>{bar}<span class="value">{percent_text(share)}</span></td>'
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    below = "".join(f"<p>{escape(x)}</p>" for x in shown.notes_below(shown.keys))
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{below}'


# The figures at the top of the page, and the facts about the measurement and the plan at its end


_BUBBLE_LEGEND = "idle time, the less the better"
_ENGINES = {"virtual": "virtual: one process computed every action; the devices and links are simulated"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One of the figures at the top of the page."""

    name: str
    predicted: str
    measured: str | None = None
    error: str | None = None
    detail: str = ""  # of the large figure


def headlines(subject: Subject) -> tuple[Headline, ...]:
    """The step time with its samples per second, the bubble and the largest peak memory of a device."""
    plan = plan_of(subject)
    step_s = subject.timeline.step_s if isinstance(subject, Run) else plan.prediction.step_s
    rate = quantity_text(samples_per_s(plan, step_s), "samples_per_s")
    if isinstance(subject, Run):
        comparison = compare(subject)
        details = {STEP_TIME: rate, BUBBLE: _BUBBLE_LEGEND}
        found = [_headline(x, comparison.row(x), detail) for x, detail in details.items()]
        if measured_peaks(subject):
            peak = max((x for x in comparison.rows if x.quantity == PEAK_MEMORY), key=lambda x: x.measured)
            found.append(_headline(f"peak memory, device {peak.device}", peak))
        return tuple(found)
    return (
        Headline(name=STEP_TIME, predicted=seconds_text(step_s), detail=rate),
        Headline(name=BUBBLE, predicted=percent_text(plan.prediction.bubble), detail=_BUBBLE_LEGEND),
        Headline(name="largest peak memory", predicted=bytes_text(subject.peak_bytes)),
    )


def run_facts(run: Run) -> list[Fact]:
    """How the figures of a run were measured."""
    return [
        ("engine", _ENGINES.get(run.engine, f"{run.engine}: one process per device")),
        ("steps", run.steps_text),
        ("times", "means over these steps" if run.versions else "medians over these steps"),
        *([("other work on the host", run.host_load.text)] if run.host_load is not None else []),
        ("median of all steps after the warm-up", seconds_text(median(run.step_s[run.num_warmup_steps :]))),
        *([("loss, first to last step", f"{run.losses[0]:.4g} to {run.losses[-1]:.4g}")] if run.losses else []),
        ("gradients", check_text(run.check)),
        *(
            [("the whole mini-batch", whole_batch_text(whole))]
            if (whole := run.check and run.check.whole_batch)
            else []
        ),
        *([(STEP_TIME, step_text(run, compare(run)).removeprefix(f"{STEP_TIME} "))] if run.equal_speed else []),
        ("date", run.created),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.versions) or "–"),
    ]


def plan_facts(plan: Plan) -> list[Fact]:
    """What was planned, for which machine, and the plan's bound and gap."""
    capacity = capacity_bytes(plan)
    settings = ", ".join(f"{name}={value}" for name, value in plan.model.settings)
    gap = "0: proven optimal" if plan.proof.is_proven else percent_text(plan.proof.gap)
    gap += ", as it was made" if stale_prediction_notes(plan) else ""
    return [
        ("model", f"{plan.model.name} ({settings})" if settings else plan.model.name),
        ("schedule", schedule_info(plan.schedule).title),
        ("micro-batches", f"{plan.num_microbatches} of {counted(plan.microbatch_size, 'sample')}"),
        ("recompute", plan.recompute),
        ("replicas", sharding_text(plan) or str(plan.num_replicas)),
        ("objective", plan.minimize),
        ("solver", f"{plan.proof.solver}, {seconds_text(plan.proof.solve_s)}"),
        ("value of the objective", seconds_text(plan.proof.objective_s)),
        ("lower bound", seconds_text(plan.proof.lower_bound_s)),
        ("gap", gap),
        *(("host", x) for x in host_bound_lines(plan.prediction.step_s, plan.prediction.host_bound)),
        ("bubble with equal stages and free transfers", percent_text(plan.prediction.ideal_bubble)),
        (capacity_name(plan), bytes_text(capacity) if capacity is not None else "unknown"),
        ("device", device_text(plan.device)),
        ("link", link_text(plan.link)),
    ]


def _headline(name: str, row: ComparisonRow, detail: str = "") -> Headline:
    predicted, measured = (quantity_text(x, row.unit) for x in (row.predicted, row.measured))
    error = error_text(row.error, row.unit)
    return Headline(name=name, predicted=predicted, measured=measured, error=error, detail=detail)
