"""The timelines of the Gantt chart as JSON in integer ticks, for the script that draws them.

A tick is a power of ten of a second, at most a thousandth of the median action. In the page the actions of a device are
one flat list of kind, chunk, micro-batch, gap since the previous action and length: 60 kB for 8 stages and 64
micro-batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from statistics import median

from gplan.core import Idle, IdleCause, Plan, Span, Timeline, Transfer
from gplan.core.units import bytes_text, percent_text, seconds_text
from gplan.reporting.looks import ACTIONS, COMMUNICATION, IDLE, NEUTRALS, shades_of
from gplan.reporting.subject import PREDICTED, Subject, plan_of, side_text, timelines_of
from gplan.simulation.bubble import idle_pieces

_TICKS_OF_AN_ACTION = 1000
MEANINGS = {
    IdleCause.WARM_UP: "the pipeline fills",
    IdleCause.DRAIN: "the pipeline drains",
    IdleCause.IMBALANCE: "other stages take longer",
    IdleCause.COMMUNICATION: "its input is being transferred",
    IdleCause.ENGINE: "overhead of the engine",
    IdleCause.OPTIMIZER: "other devices sum gradients or update weights",
}


def pipeline_json(subject: Subject) -> str:
    """The timelines of a plan or a run, for a script element; no name in them can close the element."""
    plan, timelines = plan_of(subject), timelines_of(subject)
    tick_s = _tick_s(next(iter(timelines.values())))
    num_chunks = timelines[PREDICTED].num_chunks
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
        "stages": list(_stages(plan)),
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


def _tick_s(timeline: Timeline) -> float:
    durations = [x.duration_s for x in timeline.loop_spans if x.duration_s > 0]
    usual_s = median(durations) if durations else timeline.step_s
    return float(10.0 ** math.floor(math.log10((usual_s or 1.0) / _TICKS_OF_AN_ACTION)))


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


def _stages(plan: Plan) -> Iterator[list[object]]:
    """Of each stage: its device, its layers in words, and the bytes that it sends forward and back."""
    for stage in plan.stages:
        sent = bytes_text(stage.cost.activation_bytes)
        back = bytes_text(plan.stages[stage.index - 1].cost.gradient_bytes) if stage.index else ""
        yield [plan.devices[stage.index], f"layers: {stage.layers_text}", sent, back]
