"""Every schedule at the same costs, drawn on one time axis, and a table.

    python benchmarks/schedule_gallery.py            some seconds; writes reports/schedules/

Nothing is measured: the orders are gplan's, the times the simulator's. A unit of time is one forward of one micro-batch
on one device; both halves of a backward take as long, a transfer a tenth. A device with two stages has two halves of
the work, so that the work is the same for all. Every formula in the table is held against the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from suite import markdown, options_of, write_report

from gplan.core import Schedule, StageBytes, StageCost, Timeline
from gplan.core.units import percent_text
from gplan.reporting.charts.canvas import blank_figure, chart_style, headline, legend, to_png
from gplan.reporting.charts.pipeline_chart import draw_gantt, gantt_handles
from gplan.schedules.registry import make_schedule, schedule_info
from gplan.simulation.memory_timeline import device_holdings, fullest
from gplan.simulation.simulator import simulate_schedule

K, M = 4, 8
TRANSFER = 0.1
LONGEST = 36.0  # of the axis of time, which all pictures share
_SHARES = 2  # of a whole stage: what is held is counted in half stages


PerDevice = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One schedule of the gallery, with what the literature says of equal stages and free transfers."""

    name: str
    title: str
    idea: str
    bubble: tuple[float, str]  # with its formula
    held: tuple[PerDevice, str]  # the most micro-batches of all a device's layers between F and B (or W)
    source: str


USUAL = (K - 1) / (M + K - 1), "(K-1)/(M+K-1)"
CHUNKED = (K - 1) / (2 * M + K - 1), "(K-1)/(vM+K-1)"
NARAYANAN = "[Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), 2.2"
ENTRIES = (
    Entry(
        name="gpipe", title="GPipe", bubble=USUAL, held=((M,) * K, "M"),
        idea="All forwards, then all backwards. Every device holds the activations of the whole mini-batch.",
        source="[Huang et al. 2019](https://arxiv.org/abs/1811.06965), figure 2c",
    ),
    Entry(
        name="1f1b", title="1F1B", bubble=USUAL, held=(tuple(min(M, K - d) for d in range(K)), "min(M, K-d)"),
        idea="A backward starts as soon as it can, so that activations are let go early. The bubble stays the same.",
        source=NARAYANAN,
    ),
    Entry(
        name="eager-1f1b", title="Eager 1F1B", bubble=USUAL,
        held=(tuple(min(M, 2 * (K - d) - 1) for d in range(K)), "min(M, 2(K-d)-1)"),
        idea="More forwards at the start: what a device computes next arrives while it computes, for more memory.",
        source="[Zhuang et al. 2022](https://arxiv.org/abs/2211.05322)",
    ),
    Entry(
        name="interleaved-1f1b:2", title="Interleaved 1F1B, 2 stages a device", bubble=CHUNKED,
        held=(tuple((2 * (K - d - 1) + K + 1) / 2 for d in range(K)), "(2(K-d-1)+(v-1)K+1)/v"),
        idea="Shorter stages fill the pipeline sooner: 1/v of the bubble, for v times the transfers and more memory.",
        source=NARAYANAN,
    ),
    Entry(
        name="looped-bfs:2", title="Looped BFS, 2 stages a device", bubble=CHUNKED, held=((M,) * K, "M"),
        idea="All micro-batches through one stage before the next: transfers have time, memory is that of GPipe.",
        source="[Lamy-Poirier 2023](https://arxiv.org/abs/2211.05953)",
    ),
    Entry(
        name="zb-h1", title="ZB-H1", bubble=((K - 1) / (3 * M + K - 1), "(K-1)/(3M+K-1)"),
        held=((min(M, K),) * K, "min(M, K)"),
        idea="Weight gradients, which nobody waits for, run where a device would wait: a third as long as in 1F1B.",
        source="[Qi et al. 2024](https://arxiv.org/abs/2401.10241), 2.1",
    ),
    Entry(
        name="zb-v", title="ZB-V, 2 stages a device", bubble=((K - 1) / (6 * M + K - 1), "(K-1)/(6M+K-1)"),
        held=((K,) * K, "K"),
        idea="A micro-batch goes down the devices and back up, and ends where it began; all devices hold the same.",
        source="[Qi et al. 2024](https://arxiv.org/abs/2401.10241), 6",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the simulator says of a schedule."""

    timeline: Timeline
    free_bubble: float  # with free transfers
    held: PerDevice


def main() -> None:
    """Simulate, hold against the formulas, draw and write."""
    output: Path = options_of(__doc__, "schedules").parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    found = {entry.name: simulated(entry) for entry in ENTRIES}
    with chart_style("schedules"):
        (output / "all.png").write_bytes(to_png(all_chart(found)))
    write_report(output, readme(found))


def simulated(entry: Entry) -> Found:
    """The schedule's step; raises ValueError where a formula does not hold."""
    schedule = make_schedule(entry.name, num_devices=K, num_microbatches=M)
    timeline, free = (
        simulate_schedule(schedule, [stage_cost(schedule, x)] * schedule.num_stages, recompute="never")
        for x in (TRANSFER, 0.0)
    )
    held = held_at_most(schedule, timeline)
    if not math.isclose(free.bubble, entry.bubble[0]) or held != entry.held[0]:
        raise ValueError(f"{entry.name}: bubble {free.bubble}, held {held}; expected {entry.bubble}, {entry.held}")
    return Found(timeline=timeline, free_bubble=free.bubble, held=held)


def stage_cost(schedule: Schedule, transfer: float) -> StageCost:
    """A stage's share of one unit for each of forward, input gradient and weight gradient."""
    share = schedule.num_devices / schedule.num_stages
    return StageCost(
        forward_s=share, backward_s=2 * share, input_gradient_s=share, weight_gradient_s=share, recompute_s=0.0,
        optimizer_s=0.0, activation_bytes=1, gradient_bytes=1, activation_s=transfer, gradient_s=transfer,
    )  # fmt: skip


def held_at_most(schedule: Schedule, timeline: Timeline) -> PerDevice:
    """For each device the most micro-batches whose activations it holds at once, in whole stages."""
    nothing = dict.fromkeys(StageBytes.__struct_fields__, 0)
    stash = _SHARES * schedule.num_devices // schedule.num_stages
    parts = dict.fromkeys(range(schedule.num_stages), StageBytes(**{**nothing, "stash": stash}))
    held = (device_holdings(schedule, timeline, d, parts, recompute="never") for d in range(K))
    return tuple(fullest(x).num_bytes / _SHARES for x in held)


def all_chart(found: dict[str, Found]) -> Figure:
    """All schedules below each other on one axis of time."""
    figure = blank_figure(1.2 + 1.32 * len(ENTRIES))
    panels = figure.subplots(len(ENTRIES), 1, sharex=True)
    for axes, entry in zip(panels, ENTRIES, strict=True):
        timeline = found[entry.name].timeline
        draw_gantt(axes, timeline, longest_s=LONGEST, scale=1.0)
        axes.set_yticklabels([f"device {d}" for d in range(K)], fontsize=7.5)
        axes.set_title(entry.title, loc="left", fontweight="bold")
        axes.set_title(f"step {timeline.step_s:.1f}, bubble {percent_text(timeline.bubble)}", loc="right")
        axes.tick_params(axis="x", length=0)
    panels[-1].set(xlabel="time, in forwards of a micro-batch on a device", xlim=(0, LONGEST))
    whole = [x.timeline for name, x in found.items() if schedule_info(name).num_chunks == 1]
    *_, shades = gantt_handles([found["zb-v"].timeline])
    legend(figure, [*gantt_handles(whole), shades])
    headline(figure, f"The same work by seven schedules: {K} devices, {M} micro-batches")
    return figure


def readme(found: dict[str, Found]) -> Iterator[str]:
    """The page with the table and the pictures."""
    yield f"""# Schedules

What gplan's schedules do with the same work: K = {K} devices, M = {M} micro-batches, equal stages, forward : input gradient :
weight gradient = 1 : 1 : 1, every transfer {TRANSFER:g}. The unit of time is one forward of a micro-batch on one device. A device with two
stages has half the work in each. Simulated, not measured; made by `python benchmarks/schedule_gallery.py`.

![All schedules on one axis of time](all.png)
"""
    heads = [
        "schedule",
        "step",
        "bubble",
        "bubble, free transfers",
        "formula for it",
        f"most held, devices 0 to {K - 1}",
    ]
    yield from markdown([*heads, "formula for it", "source"], (cells(entry, found[entry.name]) for entry in ENTRIES))
    yield """
d is the device and v the number of its stages. *Most held*: of how many micro-batches a device keeps the activations of all its
layers at once, from the forward to the end of the backward (with a split backward, of its second half); the peak memory
of a device is its weights, gradients and optimizer state, this number times the activations of one micro-batch, and what is
temporary. The script fails where a formula and the simulator differ.

As in torch, the first stage of a split backward has no input gradient to make: its I takes no time and its W the whole backward.
Pictures have micro-batches in the boxes; of a device's stages the later ones are lighter. Yellow strips are transfers."""
    for entry in ENTRIES:
        yield f"\n## {entry.title}\n\n`--schedule {entry.name}`: {entry.idea}"


def cells(entry: Entry, x: Found) -> list[str]:
    """A schedule's row, with a link to its heading."""
    anchor = "".join(x for x in entry.title.lower().replace(" ", "-") if x.isalnum() or x == "-")
    times = [f"{x.timeline.step_s:.1f}", percent_text(x.timeline.bubble), percent_text(x.free_bubble)]
    held = [", ".join(f"{held:g}" for held in x.held), f"`{entry.held[1]}`"]
    return [f"[{entry.title}](#{anchor})", *times, f"`{entry.bubble[1]}`", *held, entry.source]


if __name__ == "__main__":
    main()
