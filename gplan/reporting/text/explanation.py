"""An explanation of a plan as text: a summary, where the step goes, and what would help."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.core.units import bytes_text, counted, percent_text, quantity_text, seconds_text, some_names
from gplan.evaluate.bottleneck import Bottleneck
from gplan.evaluate.explain import Explanation
from gplan.evaluate.options import OptionKind
from gplan.evaluate.replanning import PlanSettings
from gplan.reporting.text.fitted_table import FittedTable, Line, note_lines
from gplan.reporting.text.plan import host_bound_lines, setting_text
from gplan.schedules.registry import make_schedule

_OPTION_GROUPS: dict[str, tuple[OptionKind, ...]] = {
    "on the same devices": ("same", "no constraints", "smaller microbatches", "schedule", "recompute"),
    "with a larger batch": ("more microbatches",),
    "with other hardware": ("more memory", "more devices", "faster link"),
    "with less hardware": ("fewer devices",),
}
"""The headline names the best option of each group. The groups are in order of cost: the first needs nothing new."""
_LEAST_GAIN = 0.001  # of the rate, to be named as what would help


def headline(explanation: Explanation) -> tuple[str, ...]:
    """The summary in sentences: which stage sets the pace, what limits the step, and what would help most."""
    slow_host = host_bound_lines(explanation.step_s, explanation.host_bound)
    return (
        *_pace(explanation),
        *(f"{x[0].upper()}{x[1:]}." for x in slow_host),
        _binding(explanation),
        _help(explanation),
    )


def holder_text(found: Bottleneck, setting: PlanSettings) -> str:
    """The name of the bottleneck: a stage if each device has one, else a device."""
    return f"device {found.device}" if devices_differ_from_stages(setting) else f"stage {found.device}"


def step_parts(found: Bottleneck) -> dict[str, float]:
    """Where the step goes on the device that sets the pace: each part and its seconds per step."""
    return {
        "compute": found.busy_s,
        "filling and draining, with its transfers": found.filling_s,
        "idle for a slower neighbour": found.imbalance_s,
        "idle for a transfer": found.communication_s,
        **({"idle for engine overhead": found.engine_s} if found.engine_s else {}),
        "after the last backward": found.tail_s,
    }


def devices_differ_from_stages(setting: PlanSettings) -> bool:
    """Whether device numbers and stage numbers differ: some device does not hold exactly the stage of its number."""
    schedule = make_schedule(
        setting.schedule, num_devices=setting.num_devices, num_microbatches=setting.num_microbatches
    )
    return schedule.devices != tuple(range(schedule.num_devices))


def _pace(explanation: Explanation) -> Iterator[str]:
    found, step_s = explanation.bottleneck, explanation.step_s
    setting = explanation.setting
    if not found.busy_s:
        yield f"No stage takes any time to compute; the step of {seconds_text(step_s)} is transfers and the optimizer."
        return
    of_step = f"{percent_text(found.busy_s / step_s)} of the predicted step of {seconds_text(step_s)}"
    what, num_devices = "device" if devices_differ_from_stages(setting) else "stage", setting.num_devices
    if num_devices == 1:
        yield f"One {what} holds the whole model and computes for {of_step}{_most_expensive(found, setting)}."
    elif len(found.equals) == num_devices - 1:
        yield f"All {num_devices} {what}s compute equally long, within 1 %: for {of_step}."
    elif found.equals:
        numbers = some_names(list(map(str, sorted((found.device, *found.equals)))), most=6)
        longest = f"{what.capitalize()}s {numbers} compute longest and, within 1 %, equally long"
        yield f"{longest}: for {of_step}{_most_expensive(found, setting)}."
    else:
        holder = holder_text(found, setting).capitalize()
        holder += f" (stages {some_names(list(map(str, found.stages)))})" if len(found.stages) > 1 else ""
        yield f"{holder} computes longest: for {of_step}{_most_expensive(found, setting)}."


def _most_expensive(found: Bottleneck, setting: PlanSettings) -> str:
    """The layers that take most of a device's time, as the end of a sentence."""
    if not found.layers:
        return ""
    holder = holder_text(found, setting)
    if found.num_layers == 1:
        return f"; {found.layers[0].layer} is the only layer of {holder}"
    if len(found.layers) == found.num_layers:
        return f"; none of its {found.num_layers} layers stands out"
    names, share = tuple(x.layer for x in found.layers), sum(x.share for x in found.layers)
    verb = "takes" if len(names) == 1 else "take"
    return f"; of the {found.num_layers} layers of {holder}, {some_names(names)} {verb} {percent_text(share)} of their time"


def _binding(explanation: Explanation) -> str:
    found, step_s, setting = explanation.bottleneck, explanation.step_s, explanation.setting
    if found.binds == "memory":
        limit = bytes_text(setting.memory_bytes or 0)
        gain = percent_text((found.memory_gain_s or 0.0) / step_s)
        recompute = "" if setting.recompute == "never" else ", with nothing recomputed,"
        return f"Memory limits the step: without the limit of {limit} a device{recompute} the step would be {gain} shorter."
    if found.binds == "cut":
        worst = max(found.cuts, key=lambda cut: cut.exposed_s)
        alone = f"; the cut after {worst.layer} alone accounts for {percent_text(worst.exposed_s / step_s)}"
        exposed = percent_text(found.exposed_s / step_s)
        more = alone if len(found.cuts) > 1 else f" (the only cut is after {worst.layer})"
        return f"Transfers limit the step: if they took no time, it would be {exposed} shorter{more}."
    if found.binds == "filling":
        count = counted(setting.num_microbatches, "micro-batch")
        return (
            f"Filling and draining the pipeline limits the step: with {count} in {setting.num_stages} stages, "
            f"{holder_text(found, setting)} is idle for it during {percent_text(found.filling_s / step_s)} of the step; more "
            "micro-batches reduce this share."
        )
    if found.binds == "optimizer":
        return f"Gradient sync and optimizer limit the step: {percent_text(found.tail_s / step_s)} of it is after the last backward."
    memory = _share_text(found.memory_gain_s, step_s)
    if setting.memory_bytes is None:
        last = "there is no memory limit"
    else:
        last = f"the memory limit costs {memory}" if memory else "what the memory limit costs is not known"
    lesser = f"one {'device' if devices_differ_from_stages(setting) else 'stage'} neither waits nor sends"
    if setting.num_devices > 1:
        filling, exposed = _share_text(found.filling_s, step_s), _share_text(found.exposed_s, step_s)
        lesser = f"of the step, filling and draining take {filling}, exposed transfers {exposed}"
    return f"Compute limits the step: {lesser}; {last}."


def _share_text(seconds: float | None, step_s: float) -> str:
    if seconds is None:
        return ""
    return percent_text(seconds / step_s) if seconds else "nothing"


def _help(explanation: Explanation) -> str:
    """For each group of options the best one, if it trains more samples per second than the plan."""
    if explanation.options[0].outcome is None:
        return f"What would help is not known: {explanation.options[0].reason}."
    parts, least = [], explanation.samples_per_s * (1 + _LEAST_GAIN)
    for where, kinds in _OPTION_GROUPS.items():
        rates = {x.label: x.outcome.samples_per_s for x in explanation.options if x.kind in kinds and x.outcome}
        best = max(rates, key=rates.__getitem__, default="")
        if best and rates[best] >= least:
            gain = percent_text(rates[best] / explanation.samples_per_s - 1, signed=True)
            parts.append(f"{where}, {best}: {gain} samples/s")
    if not parts:
        return "None of the options below trains more samples per second."
    return f"What would help most: {'; '.join(parts)}."


def explanation_view(explanation: Explanation) -> RenderableType:
    """The summary first, then a table for each part of the explanation."""
    return Group(
        Text(f"{explanation.model}: {setting_text(explanation.setting)}", style="bold"),
        *map(Text, headline(explanation)),
        Text(),
        step_table(explanation),
        *_cut_views(explanation),
        *_option_views(explanation),
        Text(),
        *note_lines((*explanation.notes, *explanation.doubts)),
    )


def step_table(explanation: Explanation) -> FittedTable:
    """The time of the device that sets the pace, part by part."""
    found, step_s = explanation.bottleneck, explanation.step_s
    holder = holder_text(found, explanation.setting)
    lines = tuple(
        Line(
            cells={holder: name, "time per step": seconds_text(x), "of the step": percent_text(x / step_s)},
            shorter=(name.partition(",")[0],),
        )
        for name, x in step_parts(found).items()
    )
    return FittedTable(title="Where the step goes", lines=lines)


def _cut_views(explanation: Explanation) -> Iterator[RenderableType]:
    """The cuts with what their transfers add to the step."""
    if not explanation.bottleneck.cuts:
        return
    cuts = sorted(explanation.bottleneck.cuts, key=lambda cut: cut.exposed_s, reverse=True)
    yield Text()
    yield FittedTable(
        title="Transfers in both directions; exposed: how much shorter the step would be without them",
        lines=tuple(
            Line(
                cells={
                    "cut after": cut.layer,
                    "stages": f"{cut.stage} to {cut.stage + 1}",
                    "transfers": seconds_text(explanation.setting.num_microbatches * cut.transfer_s),
                    "exposed": seconds_text(cut.exposed_s),
                    "of the step": percent_text(cut.exposed_s / explanation.step_s),
                }
            )
            for cut in cuts
        ),
        groups={"per step": ("transfers", "exposed")},
        spare=("stages",),
    )


def options_table(explanation: Explanation) -> FittedTable | None:
    """The options that were tried; None if none was."""
    tried = [(option, option.outcome) for option in explanation.options if option.outcome is not None]
    if not tried:
        return None
    lines = []
    for option, outcome in tried:
        marks = (" (interpolated)" if option.is_interpolated else "") + ("" if outcome.is_proven else " *")
        cells = {
            "option": option.label + marks,
            "step": seconds_text(outcome.step_s),
            "step change": change_text(outcome.step_s, explanation.step_s),
            "samples/s": rate_text(outcome.samples_per_s),
            "rate change": change_text(outcome.samples_per_s, explanation.samples_per_s),
            "peak memory": bytes_text(outcome.peak_bytes),
        }
        lines.append(Line(cells=cells, shorter=(option.label.partition(" (")[0], option.label.partition(",")[0])))
    is_proven = all(outcome.is_proven for _, outcome in tried)
    return FittedTable(
        title=f"What would help (each balanced again for {explanation.setting.minimize})",
        lines=tuple(lines),
        spare=("step change", "peak memory", "samples/s"),
        below="" if is_proven else "*: the search ended before the plan was proven best",
    )


def _option_views(explanation: Explanation) -> Iterator[RenderableType]:
    yield Text()
    if found := options_table(explanation):
        yield found
    for option in explanation.options:
        if option.outcome is None:
            yield Text(f"left out: {option.label}: {option.reason}", style="dim")


def rate_text(samples_per_s: float) -> str:
    """Samples per second, below a head with the unit."""
    return quantity_text(samples_per_s, "samples_per_s").removesuffix(" samples/s")


def change_text(value: float, before: float) -> str:
    """By what share a value is larger than before, without a sign if it rounds to 0; "–" after 0."""
    if not before:
        return "–"
    share = value / before - 1
    return percent_text(share, signed=abs(share) >= 0.0005)
