"""The explanation of a plan as HTML: the sentences of `gplan explain`, and its tables."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from gplan.core.units import bytes_text, percent_text, seconds_text
from gplan.evaluate.explain.explanation import Explanation, Option
from gplan.reporting.page.html import table
from gplan.reporting.text.explanation import (
    change_text,
    headline,
    holder_text,
    option_text,
    rate_text,
    spread_text,
    step_parts,
)


def sentences(explanation: Explanation) -> str:
    """Which stage sets the pace, what limits the step, and what would help most."""
    return f'<div class="words">{"".join(f"<p>{_unbroken(x)}</p>" for x in headline(explanation))}</div>'


def _unbroken(words: str) -> str:
    """HTML in which no line begins with a percent sign."""
    return escape(words).replace(" %", "&nbsp;%")


def reasons(explanation: Explanation) -> str:
    """The tables of an explanation, and how the step varies."""
    notes = "".join(f'<p class="warn">{escape(note)}</p>' for note in explanation.notes)
    return "".join((notes, _step(explanation), _options(explanation), _rules(explanation), _spread(explanation)))


def _step(explanation: Explanation) -> str:
    found, step_s = explanation.bottleneck, explanation.step_s
    holder = holder_text(found, explanation.setting)
    rows = ((name, seconds_text(x), _bar(x / step_s)) for name, x in step_parts(found).items())
    return f"<h3>Where the step goes</h3>{table((holder, 'time per step', 'of the step'), rows)}"


def _bar(share: float) -> str:
    width = f"{100 * min(1.0, max(0.0, share)):.1f}%"
    return f'<span class="bar"><i style="width:{width}"></i></span><span class="value">{percent_text(share)}</span>'


def _options(explanation: Explanation) -> str:
    tried = [x for x in explanation.options if x.outcome is not None]
    left_out = [x for x in explanation.options if x.outcome is None]
    if not tried:
        return f"<p>What would help is not known: {escape(explanation.options[0].reason)}.</p>"
    rows = (_option_row(option, explanation) for option in tried)
    names = ("each balanced again", "step", "samples/s", "change", "peak memory")
    found = f'<div class="options">{table(names, rows)}</div>'
    return f"<h3>What would help</h3>{found}{_left_out(left_out, explanation)}"


def _option_row(option: Option, explanation: Explanation) -> tuple[str, ...]:
    outcome = option.outcome
    assert outcome is not None, "only options with an outcome have a row"
    marks = (" (interpolated)" if option.is_interpolated else "") + ("" if outcome.is_proven else " (not proven)")
    return (
        escape(option_text(option, plan=explanation.setting) + marks),
        seconds_text(outcome.step_s),
        rate_text(outcome.samples_per_s),
        change_text(outcome.samples_per_s, explanation.samples_per_s),
        bytes_text(outcome.peak_bytes),
    )


def _left_out(options: list[Option], explanation: Explanation) -> str:
    if not options:
        return ""
    items = (f"{option_text(x, plan=explanation.setting)}: {x.reason}" for x in options)
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<details><summary>{len(options)} left out</summary><ul>{listed}</ul></details>"


def _rules(explanation: Explanation) -> str:
    if len(explanation.rules) < 2 or explanation.setting.num_stages == 1:
        return ""
    return f"<h3>The same layers, partitioned by simpler rules</h3>{table(('rule', 'step', 'change', 'peak memory'), _rule_rows(explanation))}"


def _rule_rows(explanation: Explanation) -> Iterator[tuple[str, ...]]:
    own_s = explanation.rules[0].step_s or 0.0
    for place, rule in enumerate(explanation.rules):
        if rule.cuts is not None and rule.step_s is not None:
            text = change_text(rule.step_s, own_s) if place else ""
            peak = bytes_text(rule.peak_bytes or 0) + ("" if rule.fits else " (does not fit)")
            yield escape(rule.rule), seconds_text(rule.step_s), text, peak


def _spread(explanation: Explanation) -> str:
    return f"<p>{escape(spread_text(explanation).capitalize())}.</p>" if explanation.spread.num_draws else ""
