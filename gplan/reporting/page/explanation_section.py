"""The explanation of a plan as HTML: the sentences of `gplan explain`, and its tables."""

from __future__ import annotations

from html import escape

from gplan.evaluate.explain.explanation import Explanation
from gplan.reporting.page.html import table
from gplan.reporting.text.explanation import (
    headline,
    option_text,
    options_table,
    rules_table,
    spread_text,
    step_parts,
    step_table,
)


def sentences(explanation: Explanation) -> str:
    """Which stage sets the pace, what limits the step, and what would help most."""
    return f'<div class="words">{"".join(f"<p>{_unbroken(x)}</p>" for x in headline(explanation))}</div>'


def _unbroken(words: str) -> str:
    """HTML in which no line begins with a percent sign."""
    return escape(words).replace(" %", "&nbsp;%")


def reasons(explanation: Explanation) -> str:
    """The tables of an explanation, and how the step varies."""
    shares = [x / explanation.step_s for x in step_parts(explanation.bottleneck).values()]
    step, options, rules = step_table(explanation), options_table(explanation), rules_table(explanation)
    parts = [f'<p class="warn">{escape(note)}</p>' for note in explanation.notes]
    parts.append(f"<h3>{step.title}</h3>{table(step, shares=shares)}")
    if options is None:
        parts.append(f"<p>What would help is not known: {escape(explanation.options[0].reason)}.</p>")
    else:
        parts.append(f"<h3>{escape(options.title)}</h3>{table(options)}{_left_out(explanation)}")
    if rules is not None:
        parts.append(f"<h3>{escape(rules.title)}</h3>{table(rules)}")
    if explanation.spread.num_draws:
        parts.append(f"<p>{escape(spread_text(explanation).capitalize())}.</p>")
    return "".join(parts)


def _left_out(explanation: Explanation) -> str:
    items = [
        f"<li>{escape(f'{option_text(x, plan=explanation.setting)}: {x.reason}')}</li>"
        for x in explanation.options
        if x.outcome is None
    ]
    return f"<details><summary>{len(items)} left out</summary><ul>{''.join(items)}</ul></details>" if items else ""
