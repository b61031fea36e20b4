"""The reasons for a plan as text: a headline, where the step goes, what would help, how far it is from changing, the
rules of thumb beside it, and how the step varies."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.explain import Explanation
from gplan.explain.explanation import CutCost, Option, RuleOutcome, Sensitivity, Setting, TurningPoint
from gplan.schedules import named
from gplan.tables.fitting import Column, FittedTable, Line
from gplan.tables.headline import headline, holder_text, joined, option_text, plural, step_parts, tells_devices_apart
from gplan.tables.notes import note_lines
from gplan.units import bytes_text, percent_text, quantity_text, seconds_text

_MOST_CUTS = 8
_NEVER = "never"


def explanation_view(explanation: Explanation) -> RenderableType:
    """The headline first; every table in whatever width it is printed."""
    setting = explanation.setting
    replicas = f" in each of {setting.num_replicas} replicas" if setting.num_replicas > 1 else ""
    stages = f"{setting.num_stages} {plural('stage', setting.num_stages)}"
    if tells_devices_apart(setting):
        stages += f" on {setting.num_devices} {plural('device', setting.num_devices)}"
    title = (
        f"{explanation.model}: {stages}{replicas}, {named(setting.schedule).title}, "
        f"{setting.num_microbatches} {plural('micro-batch', setting.num_microbatches, 'es')} of {setting.microbatch_size}, "
        f"recompute {setting.recompute}"
    )
    return Group(
        Text(title, style="bold"),
        *map(Text, headline(explanation)),
        *_step_views(explanation),
        *_option_views(explanation),
        *_sensitivity_views(explanation),
        *_rule_views(explanation),
        Text(),
        Text(_spread_text(explanation)),
        *note_lines(explanation.notes),
    )


def _step_views(explanation: Explanation) -> Iterator[RenderableType]:
    """The bottleneck's time, and the cuts with what their transfers add to the step."""
    found, step_s = explanation.bottleneck, explanation.step_s
    columns = (
        Column(key="part", title=holder_text(found, explanation.setting), is_left=True, is_flexible=True),
        *(Column(key=name) for name in ("time", "of the step")),
    )
    lines = tuple(
        Line(cells=(name, seconds_text(x), percent_text(x / step_s)), shorter=(name.partition(",")[0],))
        for name, x in step_parts(found).items()
    )
    yield Text()
    yield FittedTable(title="Where the step goes", columns=columns, lines=lines)
    if found.cuts:
        yield Text()
        yield _cut_table(explanation)


def _cut_table(explanation: Explanation) -> FittedTable:
    cuts = sorted(explanation.bottleneck.cuts, key=lambda cut: cut.exposed_s, reverse=True)
    columns = (
        Column(key="cut after", is_left=True, is_flexible=True),
        *(Column(key=name) for name in ("stages", "transfers", "exposed", "of the step")),
    )
    left_out = len(cuts) - _MOST_CUTS
    return FittedTable(
        title="Transfers, both ways for one micro-batch; exposed: what the step would lose without them",
        columns=columns,
        lines=tuple(_cut_line(cut, explanation.step_s) for cut in cuts[:_MOST_CUTS]),
        spare=("stages",),
        below=f"{left_out} more cuts are exposed less" if left_out > 0 else "",
    )


def _cut_line(cut: CutCost, step_s: float) -> Line:
    stages = f"{cut.stage} to {cut.stage + 1}"
    numbers = (seconds_text(cut.transfer_s), seconds_text(cut.exposed_s), percent_text(cut.exposed_s / step_s))
    return Line(cells=(cut.layer, stages, *numbers))


def _option_views(explanation: Explanation) -> Iterator[RenderableType]:
    tried = [option for option in explanation.options if option.outcome is not None]
    yield Text()
    if tried:
        columns = (
            Column(key="option", is_left=True, is_flexible=True),
            *(Column(key=name) for name in ("step", "step change", "samples/s", "rate change", "peak memory")),
        )
        unproven = any(option.outcome and not option.outcome.is_proven for option in tried)
        yield FittedTable(
            title=f"What would help (each balanced anew for {explanation.setting.minimize})",
            columns=columns,
            lines=tuple(_option_line(option, explanation) for option in tried),
            spare=("step change", "peak memory", "samples/s"),
            below="*: the search was stopped before the plan was proven the best" if unproven else "",
        )
    for option in explanation.options:
        if option.outcome is None:
            text = option_text(option, plan=explanation.setting)
            yield Text(f"left out: {text}: {_short(option.reason)}", style="dim")


def _option_line(option: Option, explanation: Explanation) -> Line:
    outcome = option.outcome
    assert outcome is not None, "only options with an outcome have a line"
    text = option_text(option, plan=explanation.setting)
    marks = (" (interpolated)" if option.is_interpolated else "") + ("" if outcome.is_proven else " *")
    cells = (
        text + marks,
        seconds_text(outcome.step_s),
        _change_text(outcome.step_s, explanation.step_s),
        quantity_text(outcome.samples_per_s, "samples_per_s").removesuffix(" samples/s"),
        _change_text(outcome.samples_per_s, explanation.samples_per_s),
        bytes_text(outcome.peak_bytes),
    )
    return Line(cells=cells, shorter=(text.partition(" (")[0], text.partition(",")[0]))


def _short(reason: str) -> str:
    """The first two clauses of a reason: what is the case, and what would be needed."""
    return "; ".join(reason.split("; ")[:2])


def _sensitivity_views(explanation: Explanation) -> Iterator[RenderableType]:
    found = explanation.sensitivities
    yield Text()
    factor = f"{found.most_factor:g}"
    if found.layers:
        names = ("stage", "time", "slower", "then moves", "faster", "then moves")
        below = f"{_NEVER}: not between 1/{factor} and {factor} times; factors to half a percent, by bisection"
        yield FittedTable(
            title="How much a layer may change before the best plan does",
            columns=(Column(key="layer", is_left=True, is_flexible=True), *(Column(key=name) for name in names)),
            lines=tuple(_sensitivity_line(one) for one in found.layers),
            spare=("then moves", "stage"),
            below=below,
        )
    elif found.reason:
        yield Text(f"how much a layer may change before the plan does: not asked, {found.reason}", style="dim")
    else:
        yield Text("how much a layer may change before the plan does: no layer was asked", style="dim")
    if not found.is_proven:
        yield Text("the best plan is not proven here: changes may come sooner than is said", style="dim")
    if found.left_out:
        yield Text(f"the time was over before {joined(found.left_out)}", style="dim")


def _sensitivity_line(one: Sensitivity) -> Line:
    turns = [cell for point in (one.slower, one.faster) for cell in _turn_cells(point)]
    return Line(cells=(one.layer, str(one.stage), seconds_text(one.time_s), *turns))


def _turn_cells(point: TurningPoint | None) -> tuple[str, str]:
    return (_NEVER, "") if point is None else (f"× {point.factor:.2f}", joined(point.moved, most=1))


def _rule_views(explanation: Explanation) -> Iterator[RenderableType]:
    if not explanation.rules or explanation.setting.num_stages == 1:
        return
    own, *_ = explanation.rules
    unasked = ", which know no wishes" if explanation.setting.wishes else ""
    largest = f"largest {'device' if tells_devices_apart(explanation.setting) else 'stage'}"
    yield Text()
    yield FittedTable(
        title=f"The same layers, cut by others' rules{unasked}",
        columns=(
            Column(key="rule", is_left=True, is_flexible=True),
            *(Column(key=name) for name in ("step", "change", largest, "peak memory")),
        ),
        lines=tuple(_rule_line(rule, own, explanation.setting) for rule in explanation.rules if rule.cuts is not None),
        spare=(largest, "peak memory"),
    )
    for rule in explanation.rules:
        if rule.reason:
            what = "left out" if rule.cuts is None else "does not fit"
            yield Text(f"{what}: {rule.rule}: {_short(rule.reason)}", style="dim")


def _rule_line(rule: RuleOutcome, own: RuleOutcome, setting: Setting) -> Line:
    peak = bytes_text(rule.peak_bytes or 0)
    cells = (
        rule.rule,
        seconds_text(rule.step_s or 0.0),
        "" if rule is own else _change_text(rule.step_s or 0.0, own.step_s or 0.0),
        seconds_text(rule.largest_s or 0.0),
        peak if rule.fits else f"{peak} > {bytes_text(setting.memory_bytes or 0)}",
    )
    return Line(cells=cells, shorter=(rule.rule.partition(",")[0],), style="" if rule.fits else "red")


def _spread_text(explanation: Explanation) -> str:
    spread, step_s = explanation.spread, explanation.step_s
    if not spread.num_draws:
        return (
            f"step time p50 and p95: both are the predicted {seconds_text(step_s)}, as no time in the profile has a spread "
            "(computed and given times have none)"
        )
    is_later = explanation.setting.num_devices > 1 and spread.median_s > step_s
    why = "; the prediction adds up means and knows of no wait for a slow draw" if is_later else ""
    return (
        f"step time p50 {seconds_text(spread.median_s)}, p95 {seconds_text(spread.p95_s)} (predicted: "
        f"{seconds_text(step_s)}), in {spread.num_draws} steps whose layers' times were drawn one by one from the quartiles "
        f"of the profile{why}"
    )


def _change_text(value: float, before: float) -> str:
    """A signed percentage; without a sign where it rounds to nothing."""
    if not before:
        return "–"
    share = value / before - 1
    return percent_text(share, signed=abs(share) >= 0.0005).replace("-0.0", "0.0")
