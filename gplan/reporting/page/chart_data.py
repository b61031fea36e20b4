"""The timelines of the Gantt chart in integer ticks, for the static picture and for the script that draws it.

A tick is a power of ten of a second, at most a thousandth of the median action. In the page the actions of a device are
one flat list of kind, chunk, micro-batch, gap since the previous action and length: 60 kB for 8 stages and 64
micro-batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from gplan.core import Action, ActionKind, IdleCause, Plan, Timeline
from gplan.core.units import bytes_text, percent_text, seconds_text
from gplan.reporting.charts.canvas import ACTIONS, COMMUNICATION, IDLE, NEUTRALS, Look, layers_text, of_chunk
from gplan.reporting.subject import Subject, plan_of, side_text, timelines_of
from gplan.simulation.bubble import idle_pieces

KINDS = tuple(ACTIONS)
CAUSES = tuple(IDLE)
_TICKS_OF_AN_ACTION = 1000
MEANINGS = {
    IdleCause.WARM_UP: "the pipeline fills",
    IdleCause.DRAIN: "the pipeline drains",
    IdleCause.IMBALANCE: "other stages take longer",
    IdleCause.COMMUNICATION: "its input is being transferred",
    IdleCause.ENGINE: "overhead of the engine",
    IdleCause.OPTIMIZER: "other devices sum gradients or update weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """An action of a device, from start to end in ticks."""

    kind: int  # place in KINDS
    chunk: int  # which of its device's stages it belongs to
    microbatch: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A piece of idle time of a device, in ticks."""

    cause: int  # place in CAUSES
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """The transfer of an action's output, in ticks."""

    box: int  # place of the action among the device's boxes
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All that one device does, sorted by start."""

    boxes: tuple[Box, ...]
    waits: tuple[Wait, ...]
    sends: tuple[Send, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One timeline: the predicted or the measured one."""

    name: str
    facts: str
    end: int  # of the step, in ticks
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartData:
    """What the Gantt chart shows."""

    plan: Plan
    tick_s: float
    num_chunks: int  # most on a device
    sides: tuple[Side, ...]

    @property
    def end(self) -> int:
        """When the longest side ends, in ticks."""
        return max(side.end for side in self.sides)

    @property
    def has_sends(self) -> bool:
        """Whether any transfer takes time."""
        return any(row.sends for side in self.sides for row in side.rows)


def chart_data(subject: Subject) -> ChartData:
    """The timelines of a plan or a run, in ticks."""
    plan, timelines = plan_of(subject), timelines_of(subject)
    tick_s = _tick_s(next(iter(timelines.values())))
    chunks = {x.index: i for device in range(plan.num_devices) for i, x in enumerate(plan.stages_of(device))}
    sides = (
        Side(
            name=side_text(subject, side),
            facts=f"step {seconds_text(timeline.step_s)}, bubble {percent_text(timeline.bubble)}",
            end=_ticks(timeline.step_s, tick_s),
            rows=tuple(_rows(timeline, chunks, tick_s)),
        )
        for side, timeline in timelines.items()
    )
    return ChartData(plan=plan, tick_s=tick_s, num_chunks=1 + max(chunks.values()), sides=tuple(sides))


def kind_look(chart: ChartData, kind: int, chunk: int) -> Look:
    """The look of an action of a chunk."""
    return of_chunk(ACTIONS[KINDS[kind]], chunk, num_chunks=chart.num_chunks)


def cause_variable(cause: IdleCause) -> str:
    """The name of the CSS variable with the colour of a cause."""
    return next(x.name for x in NEUTRALS if x.light == IDLE[cause].colour)


def embedded(chart: ChartData) -> str:
    """The chart as JSON for a script element; no name in it can close the element."""
    kinds = [
        {
            "name": ACTIONS[kind].name,
            "letter": kind.value,
            "looks": [[x.colour, x.text] for x in (kind_look(chart, i, j) for j in range(chart.num_chunks))],
        }
        for i, kind in enumerate(KINDS)
    ]
    causes = [
        {"name": x.value, "means": MEANINGS[x], "colour": cause_variable(x), "hatch": IDLE[x].hatch[:1]} for x in CAUSES
    ]
    data = {
        "tick": chart.tick_s,
        "end": chart.end,
        "kinds": kinds,
        "causes": causes,
        "sending": COMMUNICATION.colour,
        "stages": list(_stages(chart.plan)),
        "sides": [_side_json(side) for side in chart.sides],
    }
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _tick_s(timeline: Timeline) -> float:
    durations = [x.duration_s for x in timeline.loop_spans if x.duration_s > 0]
    usual_s = median(durations) if durations else timeline.step_s
    return float(10.0 ** math.floor(math.log10((usual_s or 1.0) / _TICKS_OF_AN_ACTION)))


def _ticks(seconds: float, tick_s: float) -> int:
    return round(seconds / tick_s)


def _rows(timeline: Timeline, chunks: dict[int, int], tick_s: float) -> Iterator[Row]:
    places = {kind: i for i, kind in enumerate(KINDS)}
    causes = {cause: i for i, cause in enumerate(CAUSES)}
    boxes: list[list[Box]] = [[] for _ in range(timeline.num_devices)]
    waits: list[list[Wait]] = [[] for _ in boxes]
    sends: list[list[Send]] = [[] for _ in boxes]
    found: dict[Action, int] = {}
    for x in timeline.spans:
        found[x.action] = len(boxes[x.device])
        kind, chunk = places[x.action.kind], chunks[x.action.stage]
        start, end = _ticks(x.start_s, tick_s), _ticks(x.end_s, tick_s)
        box = Box(kind=kind, chunk=chunk, microbatch=x.action.microbatch, start=start, end=end)
        boxes[x.device].append(box)
    for piece in idle_pieces(timeline):
        start, end = _ticks(piece.start_s, tick_s), _ticks(piece.end_s, tick_s)
        if end > start:
            waits[piece.device].append(Wait(cause=causes[piece.cause], start=start, end=end))
    for y in timeline.transfers:
        start, end = _ticks(y.start_s, tick_s), _ticks(y.end_s, tick_s)
        if end > start:
            sends[y.source].append(Send(box=found[y.action], start=start, end=end))
    for own in zip(boxes, waits, sends, strict=True):
        yield Row(boxes=tuple(own[0]), waits=tuple(own[1]), sends=tuple(sorted(own[2], key=lambda x: x.box)))


def _stages(plan: Plan) -> Iterator[list[object]]:
    """Of each stage: its device, its layers in words, and the bytes that it sends forward and back."""
    for stage in plan.stages:
        names = " … ".join(dict.fromkeys((stage.layer_names[0], stage.layer_names[-1])))
        sent = bytes_text(stage.cost.activation_bytes)
        back = bytes_text(plan.stages[stage.index - 1].cost.gradient_bytes) if stage.index else ""
        words = f"{layers_text(stage.first_layer, stage.end_layer)}: {names}"
        yield [plan.devices[stage.index], words, sent, back]


def _side_json(side: Side) -> dict[str, object]:
    return {
        "name": side.name,
        "facts": side.facts,
        "end": side.end,
        "boxes": [_flat(((x.kind, x.chunk, x.microbatch), x.start, x.end) for x in row.boxes) for row in side.rows],
        "waits": [_flat(((x.cause,), x.start, x.end) for x in row.waits) for row in side.rows],
        "sends": [list(_sends(row)) for row in side.rows],
    }


def _flat(things: Iterable[tuple[Sequence[int], int, int]]) -> list[int]:
    """Of each thing: its own numbers, the ticks since the previous one, its length."""
    flat, before = list[int](), 0
    for own, start, end in things:
        flat += [*own, start - before, end - start]
        before = end
    return flat


def _sends(row: Row) -> Iterator[int]:
    """Of each transfer: its box relative to the previous one's, the ticks since that box's end, its length."""
    before = 0
    for send in row.sends:
        yield from (send.box - before, send.start - row.boxes[send.box].end, send.end - send.start)
        before = send.box


def has_kind(chart: ChartData, kind: ActionKind) -> bool:
    """Whether any action of that kind takes time."""
    place = KINDS.index(kind)
    return any(x.kind == place and x.end > x.start for side in chart.sides for row in side.rows for x in row.boxes)
