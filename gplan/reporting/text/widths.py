"""What a search over widths found, as lines of the terminal: the choice, those after it, and what was ruled out."""

from __future__ import annotations

from collections.abc import Iterator

from gplan.core.units import bytes_text, percent_text, seconds_text
from gplan.interop.width_search import Found, Widest
from gplan.reporting.text.plan import reserved_text

_NUM_SHOWN = 10


def widths_text(found: Widest) -> Iterator[str]:
    """The lines, best first."""
    best = found.found[0]
    yield f"predicted: a step of {seconds_text(best.step_s)}, {_details(best)}"
    if reserved := reserved_text(found.plan):
        yield reserved
    if found.num_choices == 1:
        return
    yield f"the best of {found.num_choices} settings; none can be more than {percent_text(found.gap)} faster by this model:"
    for place, one in enumerate(found.found[:_NUM_SHOWN], 1):
        slower = "" if place == 1 else f", {percent_text(one.step_s / best.step_s - 1)} slower"
        yield f"  {place:2}. {one.choice}: {seconds_text(one.step_s)}{slower}, {bytes_text(one.peak_bytes)}"
    for choice, bound_s in found.others[: max(0, _NUM_SHOWN - len(found.found))]:
        yield f"   -  {choice}: {seconds_text(bound_s)} at least"
    for reason, count in found.ruled_out.most_common():
        yield f"  {count} settings: {reason}"


def _details(one: Found) -> str:
    split, choice = one.choice.widths, one.choice
    tokens = choice.num_microbatches * choice.microbatch_size * split.data * split.sequence_length
    rate = tokens / one.step_s / split.devices
    return f"{rate:,.0f} tokens/s for each of {split.devices} devices, at most {bytes_text(one.peak_bytes)} of tensors on one"
