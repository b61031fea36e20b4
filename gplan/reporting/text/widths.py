"""What a search over widths found, as lines of the terminal: the choice, those after it, and what was ruled out."""

from __future__ import annotations

from collections.abc import Iterator

from gplan.core.units import bytes_text, counted, flops_text, percent_text, seconds_text
from gplan.interop.width_search import ChosenWidths, PlannedChoice
from gplan.reporting.text.plan import reserved_text
from gplan_profiler.analytic.decoder_config import Widths

_NUM_SHOWN = 10
_NO_GAP = 5e-4  # less is printed as 0.0 %
_PRODUCTS = ("matmul", "attention")


def widths_text(chosen: ChosenWidths) -> Iterator[str]:
    """The lines, best first."""
    best, choice = chosen.best, chosen.best.choice
    split, devices = choice.widths, counted(choice.widths.devices, "device")
    tokens = choice.num_microbatches * choice.microbatch_size * split.data * split.sequence_length
    yield (
        f"predicted: a step of {seconds_text(best.step_s)}, {tokens / best.step_s / split.devices:,.0f} tokens/s and "
        f"{flops_text(device_flops(chosen) / best.step_s)}/s (as Megatron-LM counts them) for each of {devices}, at most {bytes_text(best.peak_bytes)} of tensors on one"
    )
    if reserved := reserved_text(chosen.plan):
        yield reserved
    if chosen.num_choices == 1:
        return
    if chosen.gap < _NO_GAP:
        yield f"proven best of these {chosen.num_choices} settings, as they are predicted"
    else:
        longer = "; a longer --time-limit may narrow this" if chosen.is_cut_short else ""
        yield f"the best found of {chosen.num_choices} settings: as predicted, no other is more than {percent_text(chosen.gap)} faster{longer}"
    if any(x.step_s < best.step_s and x.choice.num_chunks > choice.num_chunks for x in chosen.planned):
        yield "of those nearly as fast as the fastest, the first has the fewest stages a device"
    yield "the best of each set of widths: its step, and what tensors take on the fullest device"
    of_widths = dict[Widths, PlannedChoice]()
    for one in chosen.planned:
        of_widths.setdefault(one.choice.widths, one)
    planned = list(of_widths.values())[:_NUM_SHOWN]
    for place, one in enumerate(planned, 1):
        ratio = one.step_s / best.step_s - 1
        other = f", {percent_text(abs(ratio))} {'slower' if ratio > 0 else 'faster'}" if abs(ratio) >= _NO_GAP else ""
        yield f"  {place:2}. {one.choice}: {seconds_text(one.step_s)}{other}, {bytes_text(one.peak_bytes)}"
    unplanned = chosen.unplanned[: _NUM_SHOWN - len(planned)]
    if unplanned:
        yield "widths that were not planned, with a step that none of their plans can beat:"
    for choice, bound_s in unplanned:
        yield f"      {choice}: at least {seconds_text(bound_s)}"
    if chosen.ruled_out:
        yield "why the others are not in the list:"
    for reason, count in chosen.ruled_out.most_common():
        yield f"  {counted(count, 'setting')}: {reason}"


def device_flops(chosen: ChosenWidths) -> float:
    """FLOPs of a step on each device, without recompute: three times the products and the causal attention of a forward."""
    choice = chosen.best.choice
    works = (x for layer in chosen.profile.layers for x in layer.costs[0].forward_work if x.kind in _PRODUCTS)
    return 3 * sum(x.num_flops for x in works) * choice.num_microbatches / choice.widths.pipeline
