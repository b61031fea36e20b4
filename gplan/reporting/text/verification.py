"""A verification as text: predictions beside measurements, the error in parts and the rivals."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.core import Contender, Verification
from gplan.core.units import counted, error_text, percent_text, seconds_text
from gplan.evaluate.compare import samples_per_s
from gplan.evaluate.verify import Ranking, ranking_of
from gplan.reporting.text.explanation import rate_text
from gplan.reporting.text.fitted_table import FittedTable, Line, note_lines
from gplan.reporting.text.run import OTHER_ORDER, attribution_table, comparison_table

_CLOSEST_RUN = "this is the run closest to the mean of its rounds; the mean is in the table of rivals"


def verification_view(verification: Verification) -> RenderableType:
    """Predicted beside measured, the error in parts, the rivals, and a few lines about the errors and the regret."""
    chosen, shown = verification.chosen, {x.label for x in verification.contenders}
    left_out = (
        f"{'not run in all rounds' if x.label in shown else 'left out'}: {x.label}: {x.reason}"
        for x in verification.left_out
    )
    return Group(
        comparison_table(chosen.run),
        *([Text(_CLOSEST_RUN, style="dim")] if verification.num_rounds > 1 else []),
        Text(),
        attribution_table(chosen.run) or Text(OTHER_ORDER),
        Text(),
        _rivals_table(verification),
        *_standing_lines(verification),
        *(Text(x, style="dim") for x in left_out),
        *note_lines(verification.notes),
    )


def _rivals_table(verification: Verification) -> FittedTable:
    """A row for every plan; compared per sample if batches differ."""
    is_by_sample = len({x.plan.batch_size for x in verification.contenders}) > 1
    has_rounds = verification.num_rounds > 1
    below = [
        *(["rounds: the shortest and the longest"] if has_rounds else []),
        *(["to this plan: per sample, as batches differ"] if is_by_sample else []),
    ]
    return FittedTable(
        title="the plan and its rivals, step time: "
        + (f"geometric mean of {counted(verification.num_rounds, 'round')}, in turns" if has_rounds else "one round"),
        lines=tuple(_rival_line(x, verification) for x in verification.contenders),
        spare=("rounds", "samples/s", "to this plan"),
        below="; ".join(below),
    )


def _rival_line(contender: Contender, verification: Verification) -> Line:
    chosen, plan, measured_s = verification.chosen, contender.plan, contender.measured_s
    relative = verification.beside(contender) * chosen.plan.batch_size / plan.batch_size - 1.0
    rate = rate_text(samples_per_s(plan, measured_s))
    batch = "" if plan.batch_size == chosen.plan.batch_size else f" (batch {plan.batch_size})"
    cells = {
        "plan": contender.label + batch,
        "predicted": seconds_text(contender.predicted_s),
        "measured": seconds_text(measured_s),
        "error": error_text(contender.error, "seconds"),
        "to this plan": "" if contender is chosen else percent_text(relative, signed=True),
        "samples/s": rate,
    }
    if verification.num_rounds > 1:
        cells["rounds"] = f"{seconds_text(min(contender.steps_s))} .. {seconds_text(max(contender.steps_s))}"
    return Line(cells=cells, shorter=(contender.label,), style="bold" if contender is chosen else "")


def _standing_lines(verification: Verification) -> Iterator[Text]:
    standing, chosen = ranking_of(verification), verification.chosen
    correlation = standing.rank_correlation
    ranks = "" if correlation is None else f"; rank correlation of predicted and measured {correlation:+.2f}"
    yield Text(
        f"error of the step over {counted(len(verification.contenders), 'plan')}: median "
        f"{percent_text(standing.median_error)}, largest {percent_text(standing.largest_error)}{ranks}"
    )
    if standing.num_same_batch > 1:
        yield Text(_regret_text(standing, chosen))
    yield Text(f"this plan was measured over {chosen.run.steps_text}")


def _regret_text(standing: Ranking, chosen: Contender) -> str:
    """How much faster the best plan of the same batch is, and whether that is more than noise."""
    among = f"of {counted(standing.num_same_batch, 'plan')} with a batch of {chosen.plan.batch_size}"
    if standing.best == chosen.label:
        return f"regret: none; {among} this one was measured fastest"
    lead = standing.predicted_lead
    how = f"{percent_text(lead)} faster" if lead > 0 else "no faster"
    regret = f"regret: {percent_text(standing.regret)}; {among} the fastest was {standing.best} (predicted to be {how})"
    if standing.uncertainty is None:
        return f"{regret}; too few rounds to estimate the noise"
    noise = f"the rounds' noise of {percent_text(standing.uncertainty)}"
    return f"{regret}; {'within' if standing.is_within_noise else 'more than'} {noise}"
