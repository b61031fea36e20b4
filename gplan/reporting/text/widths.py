"""What a search over widths found, as lines of the terminal: the choice, those after it, and what was ruled out."""

from __future__ import annotations

from collections.abc import Iterator

from gplan.core.units import bytes_text, counted, percent_text, seconds_text
from gplan.interop.width_search import ChosenWidths, PlannedChoice
from gplan.reporting.text.plan import reserved_text
from gplan_profiler.analytic.decoder_config import Widths

_NUM_SHOWN = 10


def widths_text(chosen: ChosenWidths) -> Iterator[str]:
    """The lines, best first."""
    best, choice = chosen.best, chosen.best.choice
    split, devices = choice.widths, counted(choice.widths.devices, "device")
    tokens = choice.num_microbatches * choice.microbatch_size * split.data * split.sequence_length
    yield (
        f"predicted: a step of {seconds_text(best.step_s)}, {tokens / best.step_s / split.devices:,.0f} tokens/s for each of {devices}, "
        f"at most {bytes_text(best.peak_bytes)} of tensors on one"
    )
    if reserved := reserved_text(chosen.plan):
        yield reserved
    if chosen.num_choices == 1:
        return
    yield f"the best found of {chosen.num_choices} settings; by this model no other is more than {percent_text(chosen.gap)} faster"
    yield "the best of each set of widths: its step, and what tensors take on the fullest device"
    of_widths = dict[Widths, PlannedChoice]()
    for one in chosen.planned:
        of_widths.setdefault(one.choice.widths, one)
    planned = list(of_widths.values())[:_NUM_SHOWN]
    for place, one in enumerate(planned, 1):
        slower = f", {percent_text(one.step_s / best.step_s - 1)} slower" if one.step_s > best.step_s else ""
        yield f"  {place:2}. {one.choice}: {seconds_text(one.step_s)}{slower}, {bytes_text(one.peak_bytes)}"
    unplanned = chosen.unplanned[: _NUM_SHOWN - len(planned)]
    if unplanned:
        yield "the same without a partition, by a lower bound of the step:"
    for choice, bound_s in unplanned:
        yield f"      {choice}: at least {seconds_text(bound_s)}"
    if chosen.ruled_out:
        yield "why the others are not in the list:"
    for reason, count in chosen.ruled_out.most_common():
        yield f"  {counted(count, 'setting')}: {reason}"
