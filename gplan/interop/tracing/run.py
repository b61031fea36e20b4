"""A traced step beside the plan that was run: a Run like any other, for `gplan report`, `gplan show` and comparing.

What a trace does not hold is said in the notes: it has no losses, and no memory, for which a Run then has 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

from msgspec import structs

from gplan.compare import departure_of
from gplan.errors import FileError
from gplan.exposed import exposed_in
from gplan.interop.tracing.traced import Traced
from gplan.nouns import BACKWARD_KINDS, Action, ActionKind, Plan, Run, Timeline
from gplan.schedules import named
from gplan.simulator import schedule_of, simulate
from gplan.units import seconds_text

_MOST_FACTOR = 4.0  # by which a stage's time may differ from the plan's before the plan is doubted


def traced_run(traced: Traced, plan: Plan) -> Run:
    """The traced step as a run of `plan`; raises FileError where another plan was run."""
    timeline = _on_devices_of(plan, traced)
    return Run(
        plan=plan,
        engine="torch",
        losses=(),
        step_s=traced.step_s,
        num_warmup_steps=traced.num_warmup_steps,
        num_disturbed=0,
        num_counted=traced.num_counted,
        timeline=timeline,
        peak_bytes=(0,) * plan.num_devices,
        check=None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=(),
        notes=tuple(_notes(traced, timeline, plan)),
    )


def _check_stages(traced: Traced, plan: Plan) -> None:
    """Raise FileError where the traced devices do not hold the plan's stages, or do other micro-batches or actions."""
    found = sorted(traced.stages_of_devices)
    expected = sorted(tuple(x.index for x in plan.stages_of(i)) for i in range(plan.num_devices))
    if found != expected:
        raise FileError(
            f"the traces have {_places_text(found)}; the plan has {_places_text(expected)}; give the plan that was run, "
            "or none"
        )
    if traced.timeline.num_microbatches != plan.num_microbatches:
        raise FileError(
            f"the traces have {traced.timeline.num_microbatches} micro-batches a step; the plan has "
            f"{plan.num_microbatches}; give the plan that was run, or none"
        )
    _check_kinds(traced, plan)


def _check_kinds(traced: Traced, plan: Plan) -> None:
    """Raise FileError where a backward of the traces is split and the plan's is whole, or the other way round."""
    found = {x.action for x in traced.timeline.loop_spans}
    expected = {x for order in schedule_of(plan).orders for x in order}
    if found != expected:
        strange = min(found ^ expected)
        raise FileError(
            f"a backward that is {_backward_text(found, strange)} in the traces is {_backward_text(expected, strange)} in the "
            f"plan's {named(plan.schedule).title}; give the plan that was run, or none"
        )


def _backward_text(actions: set[Action], like: Action) -> str:
    """What of them is the backward of the same stage and micro-batch."""
    parts = (Action(like.stage, kind, like.microbatch) for kind in BACKWARD_KINDS)
    return " ".join(str(x) for x in parts if x in actions)


def _places_text(places: list[tuple[int, ...]]) -> str:
    stages = " and ".join("/".join(map(str, x)) for x in places)
    return f"{sum(map(len, places))} stages on {len(places)} devices ({stages})"


def _on_devices_of(plan: Plan, traced: Traced) -> Timeline:
    """The timeline with the plan's devices in place of the ranks, and the plan's bytes."""
    _check_stages(traced, plan)
    spans = sorted(
        (structs.replace(x, device=plan.devices[x.action.stage]) for x in traced.timeline.spans),
        key=lambda x: (x.device, x.start_s, x.end_s),
    )
    return replace(traced.timeline, spans=tuple(spans), transfers=exposed_in(plan, spans))


def _notes(traced: Traced, timeline: Timeline, plan: Plan) -> Iterator[str]:
    yield f"imported from torch.profiler traces of {plan.num_devices} ranks: the times are those of {traced.basis}; {traced.clock}"
    yield "traces hold neither losses nor memory: the measured peaks of 0 were not measured"
    yield from traced.notes
    yield from _doubts(timeline, plan)
    if not any(x.action.kind is ActionKind.OPTIMIZER for x in timeline.spans):
        yield "no optimizer is in the traces; the step ends with the last backward"
    other = departure_of(plan, timeline)
    if other is not None:
        yield (
            f"the order differs from {named(plan.schedule).title}: device {other.device} ran {other.ran} as action "
            f"{other.place}, where the plan has {other.planned}{_order_text(timeline, other.device, plan)}"
        )


def _doubts(timeline: Timeline, plan: Plan) -> Iterator[str]:
    """What speaks against these traces being those of the plan, on its machine: a stage's time, which is far off."""
    ran, planned = (_computing_s(x, plan.num_stages) for x in (timeline, simulate(plan)))
    factors = [max(a / b, b / a) if a and b else 1.0 for a, b in zip(ran, planned, strict=True)]
    stage = max(range(plan.num_stages), key=factors.__getitem__)
    if factors[stage] > _MOST_FACTOR:
        yield (
            f"stage {stage} computed for {seconds_text(ran[stage])} of a step, the plan has {seconds_text(planned[stage])}: "
            "it may be the plan of another model, of another micro-batch size or for another machine"
        )


def _computing_s(timeline: Timeline, num_stages: int) -> list[float]:
    """Seconds of a step that each stage's forwards and backwards take."""
    computing_s = [0.0] * num_stages
    for span in timeline.loop_spans:
        computing_s[span.action.stage] += span.duration_s
    return computing_s


def _order_text(timeline: Timeline, device: int, plan: Plan) -> str:
    spans = (x for x in timeline.loop_spans if x.device == device)
    backwards = [x.action.microbatch for x in spans if x.action.kind is ActionKind.BACKWARD]
    is_gpipe = plan.schedule == "gpipe" and backwards == sorted(backwards)
    return " (ScheduleGPipe's backwards begin with the first micro-batch, the plan's with the last)" if is_gpipe else ""
