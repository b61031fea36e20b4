"""What a search over widths found: the choice, those after it, and what was ruled out, as fields and as lines of the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gplan.core.units import bytes_text, counted, flops_text, percent_text, seconds_text
from gplan.interop.receivers import receiver_named
from gplan.interop.width_choices import Choice
from gplan.interop.width_search import ChosenWidths, PlannedChoice
from gplan.reporting.text.plan import reserved_text
from gplan_profiler.analytic.decoder_config import Widths
from gplan_profiler.analytic.decoder_profile import num_parameters

_NUM_SHOWN = 10
_NO_GAP = 5e-4  # less is printed as 0.0 %
_PRODUCTS = ("matmul", "attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthAlternative:
    """A setting that was compared; without a partition, `step_s` is a lower bound."""

    choice: Choice
    step_s: float
    peak_bytes: int | None  # of tensors on the fullest device; None: without a partition

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens of a step over its seconds and devices."""
        split = self.choice.widths
        tokens = self.choice.num_microbatches * self.choice.microbatch_size * split.data * split.sequence_length
        return tokens / self.step_s / split.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPrediction:
    """Predicted step and memory of the chosen layout."""

    step_s: float
    lower_bound_s: float  # of all settings that were allowed
    tokens_per_s_per_device: float
    flops_per_s_per_device: float  # as Megatron-LM counts them
    peak_bytes: int  # of tensors on the fullest device
    reserved_bytes: int | None  # that its allocator reserves; None: not known
    needed_bytes: int  # with what CUDA and NCCL take beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMachine:
    """What is assumed of the devices; rates are of one device and one direction."""

    hardware: str
    memory_bytes: int | None
    devices_per_node: int
    link_bytes_per_s: float
    network_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutResult:
    """A layout as scripts read it: the trainer's text, and what the terminal shows beside it."""

    format: str
    text: str
    notes: tuple[str, ...]
    choice: Choice  # widths, in devices, and how they are run
    prediction: LayoutPrediction | None  # None: the model is served, not trained
    alternatives: tuple[WidthAlternative, ...]
    ruled_out: dict[str, int]  # settings, by the reason
    num_parameters: int  # of the model, without multi-token prediction
    active_parameters: int  # of them that a token uses
    machine: LayoutMachine

    @classmethod
    def of(cls, chosen: ChosenWidths, *, format: str, text: str, notes: tuple[str, ...]) -> LayoutResult:
        """The fields of what was chosen."""
        plan, prediction = chosen.plan, None
        if not receiver_named(chosen.search.receiver).serves:
            prediction = LayoutPrediction(
                step_s=chosen.best.step_s, lower_bound_s=chosen.lower_bound_s, tokens_per_s_per_device=_of(chosen.best).tokens_per_s_per_device,
                flops_per_s_per_device=device_flops(chosen) / chosen.best.step_s,
                peak_bytes=plan.peak_bytes, reserved_bytes=max(plan.reserved_bytes, default=None),
                needed_bytes=plan.device_total_bytes,
            )  # fmt: skip
        device, (total, active, _) = chosen.search.hardware, num_parameters(chosen.search.decoder)
        machine = LayoutMachine(
            hardware=device.name, memory_bytes=device.memory_bytes, devices_per_node=device.devices_per_node,
            link_bytes_per_s=device.link.bytes_per_s, network_bytes_per_s=device.network.bytes_per_s,
        )  # fmt: skip
        return cls(
            format=format, text=text, notes=notes, choice=_of(chosen.best).choice, prediction=prediction, num_parameters=total,
            active_parameters=active, machine=machine,
            alternatives=tuple(alternatives(chosen)[1:]), ruled_out=dict(chosen.ruled_out),
        )  # fmt: skip


def _of(one: PlannedChoice) -> WidthAlternative:
    return _alternative(one.choice, one.step_s, one.peak_bytes)


def _alternative(choice: Choice, step_s: float, peak_bytes: int | None) -> WidthAlternative:
    widths = replace(choice.widths, expert_tensor=choice.widths.of_expert)
    return WidthAlternative(choice=replace(choice, widths=widths), step_s=step_s, peak_bytes=peak_bytes)


def alternatives(chosen: ChosenWidths) -> list[WidthAlternative]:
    """The best setting of each set of widths, the chosen one first; those without a partition come last."""
    of_widths = dict[Widths, PlannedChoice]()
    for one in chosen.planned:
        of_widths.setdefault(one.choice.widths, one)
    found = [_of(x) for x in of_widths.values()]
    found += [_alternative(x, bound_s, None) for x, bound_s in chosen.unplanned]
    return found[:_NUM_SHOWN]


def widths_text(chosen: ChosenWidths) -> Iterator[str]:
    """The lines, best first; none of a model that is served, not trained."""
    if receiver_named(chosen.search.receiver).serves:
        return
    best, every = chosen.best, alternatives(chosen)
    devices = counted(best.choice.widths.devices, "device")
    yield (
        f"predicted: a step of {seconds_text(best.step_s)}, {every[0].tokens_per_s_per_device:,.0f} tokens/s and "
        f"{flops_text(device_flops(chosen) / best.step_s)}/s (as Megatron-LM counts them) for each of {devices}, "
        f"at most {bytes_text(best.peak_bytes)} of tensors on one"
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
    if any(x.step_s < best.step_s and x.choice.num_chunks > best.choice.num_chunks for x in chosen.planned):
        yield "of those nearly as fast as the fastest, the first has the fewest stages a device"
    yield "the best found of each set of widths, of which the first are searched most: its step, and what tensors take on the fullest device"
    for place, one in enumerate(every, 1):
        if one.peak_bytes is None:
            if every[place - 2].peak_bytes is not None:
                yield "widths that were not planned, with a step that none of their plans can beat:"
            yield f"      {one.choice}: at least {seconds_text(one.step_s)}"
            continue
        ratio = one.step_s / best.step_s - 1
        other = f", {percent_text(abs(ratio))} {'slower' if ratio > 0 else 'faster'}" if abs(ratio) >= _NO_GAP else ""
        yield f"  {place:2}. {one.choice}: {seconds_text(one.step_s)}{other}, {bytes_text(one.peak_bytes)}"
    if chosen.ruled_out:
        yield "why the others are not in the list:"
    for reason, count in chosen.ruled_out.most_common():
        yield f"  {counted(count, 'setting')}: {reason}"


def device_flops(chosen: ChosenWidths) -> float:
    """FLOPs of a step on each device, without recompute: three times the products and the causal attention of a forward."""
    choice = chosen.best.choice
    works = (x for layer in chosen.profile.layers for x in layer.costs[0].forward_work if x.kind in _PRODUCTS)
    return 3 * sum(x.num_flops for x in works) * choice.num_microbatches / choice.widths.pipeline
