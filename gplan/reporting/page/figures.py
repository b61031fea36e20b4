"""Figures of the page: charts as inline SVG, the partition strip, and the pipeline, which a script makes zoomable.

The script gets the timelines as JSON in integer ticks. A tick is a power of ten of a second, at most a thousandth of the
median action. The actions of a device are one flat list of kind, chunk, micro-batch, gap since the previous action and
length: 60 kB for 8 stages and 64 micro-batches.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from statistics import median

from gplan.core import ActionKind, Idle, IdleCause, Plan, Span, Stage, Timeline, Transfer
from gplan.core.units import bytes_text, counted, percent_text, seconds_text
from gplan.reporting.charts.canvas import Drawing, short_names
from gplan.reporting.charts.pipeline_chart import shown_looks
from gplan.reporting.looks import ACTIONS, COMMUNICATION, IDLE, NEUTRALS, shades_of
from gplan.reporting.subject import PREDICTED, Subject, plan_of, side_text, timelines_of
from gplan.simulation.bubble import idle_pieces
from gplan.simulation.schedule_trial import has_whole_backward

_CAPTIONS = {
    "partition": (
        "Above: the cost of every layer in model order; dashed lines are cuts. Below: the time of one micro-batch on each "
        "stage, with the transfers that the stage receives from its neighbours."
    ),
    "memory-timeline": (
        "Memory of each device during the predicted step. Each forward adds activations, each backward frees them. For "
        "every action the largest value during the action is shown."
    ),
    "memory": (
        "Peak memory of each device by category, and the action at which it occurs. If a device has several stages, thin "
        "lines separate them, the first stage at the bottom."
    ),
    "accuracy": (
        "One mark for each stage or device and for the whole step. On the line, prediction and measurement are equal; in the "
        "band, they differ by less than 10 %."
    ),
    "errors": "The error of every compared quantity, one mark for each stage or device.",
    "choices": "The best plan for each number of devices K and micro-batches M, at this plan's micro-batch size.",
    "frontier": (
        "Plans for the same batch. The grey line joins those that no other plan beats in both memory and step time."
    ),
}
_AFTER_A_SEARCH = " A search finds more of them: `gplan balance --k {} --schedule auto --recompute auto`."
_HALVES = ("memory-timeline", "memory", "accuracy", "errors", "choices", "frontier")
_TOOLS = (("out", "−", "zoom out"), ("in", "+", "zoom in"), ("all", "whole step", "show the whole step"))
_HINT = "Drag to pan, Ctrl and wheel or + and − to zoom, arrow keys to move from box to box."
_TOUCH_HINT = "Tap a box, drag to pan, pinch to zoom."
_PIPELINE_CAPTION = (
    "Each row is a device, each number a micro-batch. Later stages of a device are lighter. Idle time is grey or pale, by "
    "cause. The thin line marks the end of the step, the dashed line its predicted end."
)
_TICKS_OF_AN_ACTION = 1000
MEANINGS = {
    IdleCause.WARM_UP: "the pipeline fills",
    IdleCause.DRAIN: "the pipeline drains",
    IdleCause.IMBALANCE: "other stages take longer",
    IdleCause.COMMUNICATION: "its input is being transferred",
    IdleCause.ENGINE: "overhead of the engine",
    IdleCause.OPTIMIZER: "other devices sum gradients or update weights",
}
_HATCH_ANGLES = {"/": (135,), "\\": (45,), "x": (45, 135), "-": (0,), "|": (90,)}


def charts_of(drawings: Sequence[Drawing], plan: Plan) -> Callable[..., str]:
    """A function from names of charts to the HTML of those that were drawn; small ones are side by side."""
    by_name = {drawing.name: drawing for drawing in drawings}
    more = "" if plan.frontier else _AFTER_A_SEARCH.format(plan.num_devices)
    captions = {**_CAPTIONS, "frontier": _CAPTIONS["frontier"] + more}

    def charts(*names: str) -> str:
        found = [by_name[name] for name in names if name in by_name]
        figures = ""
        for drawing in found:
            words = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(captions[drawing.name]))
            chart = f'<div class="chart">{inline_svg(drawing)}</div>'
            figures += f'<figure class="{drawing.name}">{chart}<figcaption>{words}</figcaption></figure>'
        return f'<div class="halves">{figures}</div>' if figures and names[0] in _HALVES else figures

    return charts


def inline_svg(drawing: Drawing) -> str:
    """An SVG file as an element of a page: no prologue, as wide as its place, neutral colours as CSS variables."""
    svg = drawing.svg.decode()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    for neutral in NEUTRALS:
        svg = svg.replace(neutral.light, f"var(--{neutral.name})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="chart: {escape(drawing.name)}" ', 1).strip()


def pipeline_figure(subject: Subject, drawings: Sequence[Drawing]) -> str:
    """The Gantt chart: as drawn, for printing and for readers without scripts, and the numbers from which a script draws one
    that can be zoomed."""
    picture = "".join(inline_svg(x) for x in drawings if x.name == "pipeline")
    tools = "".join(
        f'<button type="button" data-do="{do}" title="{title}">{text}</button>' for do, text, title in _TOOLS
    )
    label = "the pipeline: arrow keys move from box to box, plus and minus zoom"
    return (
        f'<figure class="pipeline"><div class="tools"><span class="hint">{_HINT}</span><span class="hint touch">{_TOUCH_HINT}</span>{tools}</div>'
        f'<div class="stage-area"><canvas tabindex="0" role="application" aria-label="{label}"></canvas></div>'
        f'<p class="unseen" aria-live="polite"></p><div class="chart">{picture}</div>'
        f'<ul class="legend">{"".join(_legend(list(timelines_of(subject).values())))}</ul>'
        f'<figcaption>{_PIPELINE_CAPTION}</figcaption><script type="application/json">{pipeline_json(subject)}</script></figure>'
    )


def _legend(timelines: Sequence[Timeline]) -> Iterator[str]:
    """What the timelines contain; kinds of action with the edges that tell them apart without colours."""
    shown, num_chunks = shown_looks(timelines), timelines[0].num_chunks
    edges = {ActionKind.BACKWARD: "b", ActionKind.INPUT_GRADIENT: "i", ActionKind.WEIGHT_GRADIENT: "w"}
    for kind, look in ACTIONS.items():
        if look in shown:
            letter = "" if kind is ActionKind.OPTIMIZER else f"{kind.value}: "
            colours = dict.fromkeys(x.colour for x in shades_of(look, num_chunks))
            swatches = "".join(f'<i class="{edges.get(kind, "")}" style="background:{x}"></i>' for x in colours)
            is_whole = kind is ActionKind.WEIGHT_GRADIENT and any(map(has_whole_backward, timelines))
            yield f"<li>{swatches}{letter}{look.name}{'<small>on stage 0 the whole backward</small>' * is_whole}</li>"
    if COMMUNICATION in shown:
        yield f'<li><i class="thin" style="background:{COMMUNICATION.colour}"></i>{COMMUNICATION.name}</li>'
    for cause, look in IDLE.items():
        if look in shown:
            yield f'<li><i style="{_hatched(cause)}"></i>{look.name}<small>{MEANINGS[cause]}</small></li>'


def _hatched(cause: IdleCause) -> str:
    """The background of a cause of waiting, with the lines that the charts give it."""
    hatch = IDLE[cause].hatch[:1]
    lines = [
        f"repeating-linear-gradient({angle}deg,transparent 0 3px,var(--hatch) 3px 4px)"
        for angle in _HATCH_ANGLES.get(hatch, ())
    ]
    if hatch == ".":
        lines = ["radial-gradient(var(--hatch) 1px,transparent 1.2px) 0 0/5px 5px"]
    return f"background:{','.join([*lines, f'var(--{cause_variable(cause)})'])}"


# The timelines for the script


def pipeline_json(subject: Subject) -> str:
    """The timelines of a plan or a run, for a script element; no name in them can close the element."""
    plan, timelines = plan_of(subject), timelines_of(subject)
    predicted = timelines[PREDICTED]
    usual_s = median([x.duration_s for x in predicted.loop_spans if x.duration_s > 0] or [predicted.step_s])
    tick_s = float(10.0 ** math.floor(math.log10((usual_s or 1.0) / _TICKS_OF_AN_ACTION)))
    num_chunks = predicted.num_chunks
    kinds = [
        {
            "name": look.name,
            "letter": kind.value,
            "looks": [[x.colour, x.text] for x in shades_of(look, num_chunks)],
        }
        for kind, look in ACTIONS.items()
    ]
    causes = [
        {"name": x.value, "means": MEANINGS[x], "colour": cause_variable(x), "hatch": look.hatch[:1]}
        for x, look in IDLE.items()
    ]
    data = {
        "tick": tick_s,
        "end": max(round(x.step_s / tick_s) for x in timelines.values()),
        "kinds": kinds,
        "causes": causes,
        "sending": COMMUNICATION.colour,
        "stages": [  # of each its device, its layers in words, and the bytes that it sends forward and back
            [
                plan.devices[x.index],
                f"layers: {x.layers_text}",
                bytes_text(x.cost.activation_bytes),
                bytes_text(plan.stages[x.index - 1].cost.gradient_bytes) if x.index else "",
            ]
            for x in plan.stages
        ],
        "sides": [
            {"name": side_text(subject, side), **_timeline_json(timeline, tick_s)}
            for side, timeline in timelines.items()
        ],
    }
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def cause_variable(cause: IdleCause) -> str:
    """The name of the CSS variable with the colour of a cause."""
    return next(x.name for x in NEUTRALS if x.light == IDLE[cause].colour)


def _timeline_json(timeline: Timeline, tick_s: float) -> dict[str, object]:
    """Of each device its actions, its idle time and its transfers; those of less than a tick are left out."""

    def ticks(piece: Span | Idle | Transfer) -> tuple[int, int]:
        return round(piece.start_s / tick_s), round(piece.end_s / tick_s)

    kinds, causes = list(ACTIONS), list(IDLE)
    boxes, waits, sends = ([list[tuple[int, ...]]() for _ in range(timeline.num_devices)] for _ in range(3))
    places, ends = {}, {}
    for x in timeline.spans:
        places[x.action], ends[x.action] = len(boxes[x.device]), ticks(x)[1]
        boxes[x.device].append(
            (kinds.index(x.action.kind), timeline.chunks[x.action.stage], x.action.microbatch, *ticks(x))
        )
    for piece in idle_pieces(timeline):
        waits[piece.device].append((causes.index(piece.cause), *ticks(piece)))
    for transfer in sorted(timeline.transfers, key=lambda x: places[x.action]):
        start, end = ticks(transfer)
        if end > start:
            before = sum(x[0] for x in sends[transfer.source])
            sends[transfer.source].append(
                (places[transfer.action] - before, start - ends[transfer.action], end - start)
            )
    return {
        "facts": f"step {seconds_text(timeline.step_s)}, bubble {percent_text(timeline.bubble)}",
        "end": round(timeline.step_s / tick_s),
        "boxes": [_flat(own) for own in boxes],
        "waits": [_flat(x for x in own if x[-1] > x[-2]) for own in waits],
        "sends": [[number for send in own for number in send] for own in sends],
    }


def _flat(pieces: Iterable[tuple[int, ...]]) -> list[int]:
    """Of each piece: its own numbers, the ticks since the previous one's end, its length."""
    flat, before = list[int](), 0
    for *own, start, end in pieces:
        flat += [*own, start - before, end - start]
        before = end
    return flat


# The partition as a strip: every layer as wide as its time, a block for each stage, a gap at each cut.


_FEW_STAGES, _MANY_LAYERS = 8, 40
_CHARACTERS = 140  # that fit side by side
_LONGEST_NAME = 14  # characters of a layer's
_LEAST_SHARE = 0.002  # of the strip, so that no layer is lost to sight


def strip(plan: Plan) -> str:
    """The HTML of the strip; its layers show their names and times to whoever points at them."""
    all_s = sum(map(_stage_s, plan.stages))
    names = short_names(plan.layer_names, _LONGEST_NAME)
    blocks = "".join(_block(plan, x, all_s, names[x.first_layer : x.end_layer]) for x in plan.stages)
    kinds = ["strip", *["few"] * (plan.num_stages <= _FEW_STAGES), *["dense"] * (len(plan.layer_names) > _MANY_LAYERS)]
    return f'<ol class="{" ".join(kinds)}">{blocks}</ol>'


def _block(plan: Plan, stage: Stage, all_s: float, names: list[str]) -> str:
    own_s, least_s = _stage_s(stage), _LEAST_SHARE * (all_s or 1.0)
    grow = sum(max(least_s, time_s) for _, time_s in _layers(stage)) / (all_s or 1.0)
    share = f" ({100 * own_s / all_s:.0f} %)" if all_s else ""
    layers = ""
    for name, (words, time_s) in zip(names, _layers(stage), strict=True):  # each with its name where there is room
        of_all = max(least_s, time_s) / (all_s or 1.0)
        shown = f"<span>{escape(name)}</span>" if of_all * _CHARACTERS > len(name) + 2 else ""
        layers += f'<i style="flex-grow:{1000 * of_all:.2f}" title="{escape(words)}">{shown}</i>'
    lines = [
        f"stage {stage.index} on device {plan.devices[stage.index]}",
        f"layers: {stage.layers_text}",
        f"{seconds_text(own_s)} per micro-batch{share}",
    ]
    if stage.index < plan.num_stages - 1:
        sent, back = bytes_text(stage.cost.activation_bytes), bytes_text(stage.cost.gradient_bytes)
        lines.append(f"cut after {stage.layer_names[-1]}: {sent} forward, {back} back")
    told = "\n".join(lines)
    return (
        f'<li style="flex-grow:{1000 * grow:.2f}"><div class="layers">{layers}</div>'
        f'<button type="button" class="stage" title="{escape(told)}"><b>{stage.index}</b>'
        f"<span>{escape(counted(stage.num_layers, 'layer'))}</span><span>{seconds_text(own_s)}</span></button></li>"
    )


def _layers(stage: Stage) -> Iterator[tuple[str, float]]:
    """Each layer in words, and the seconds that a micro-batch takes there."""
    for name, (forward_s, backward_s) in zip(stage.layer_names, stage.layer_times_s, strict=True):
        again = "\nrecomputed in the backward" if name in stage.recompute_layers else ""
        what = f"forward {seconds_text(forward_s)}, backward {seconds_text(backward_s)}"
        yield f"{name}\n{what}\nstage {stage.index}{again}", forward_s + backward_s


def _stage_s(stage: Stage) -> float:
    """Seconds of all layers of a stage for one micro-batch."""
    return sum(map(sum, stage.layer_times_s))
