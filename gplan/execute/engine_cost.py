"""What the engine takes of a device beside the layers, measured: a pipeline of made-up stages on two processes.

The stages (`gplan/execute/relay.py`) compute for about a millisecond, so that the engine finds the caches as in real
steps, and send tensors of many sizes over every second cut. They run in a looped order (`looped-bfs`), in which the
first device is ahead of the other on the way forward, and behind it on the way back. Who is ahead waits for nothing:
what goes by between two of its actions is what the engine takes after the first of them, and what sending adds to that. What it
takes of a step before the first action and after the last is that of the first device, which begins and ends the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from gplan.balancer import balance
from gplan.execute import relay
from gplan.execute.launch import run_processes_here
from gplan.execute.train import RunOptions
from gplan.nouns import Action, ActionKind, EngineCost, Link, Plan, Span, Timeline
from gplan.schedules import needs_of
from profiler.host.links import fit_link
from profiler.measure import ProfileOptions, measure_profile
from profiler.model.load import load_model_file

_NUM_MICROBATCHES = 4
_TIMEOUT_S = 60.0
_QUICK_BYTES = 2**15  # of an input that is there an action after it was made
_LEAST_S = 1e-9  # that sending takes, whatever the clocks say
_NO_LINK = Link(latency_s=0.0, bytes_per_s=1e12)  # the plan of the relay leaves nothing to choose


def measure_engine(*, num_threads: int = 1, num_steps: int = 24) -> EngineCost:
    """The torch engine's cost between two processes of this host with that many cores each.

    Raises RunError if the processes cannot talk.
    """
    plan = _relay_plan(num_threads)
    options = RunOptions(num_steps=num_steps, timeout_s=_TIMEOUT_S)
    run = run_processes_here(plan.model.name, {}, plan, options, report=lambda _step, _loss: None)
    return engine_cost_of(plan, run.timeline)


def engine_cost_of(plan: Plan, timeline: Timeline) -> EngineCost:
    """What the engine took in a measured step: medians over the gaps in which no input was waited for."""
    gaps: dict[int, list[float]] = {}
    for num_bytes, gap_s in _gaps(plan, timeline):
        gaps.setdefault(num_bytes, []).append(gap_s)
    action_s = median(gaps.pop(0))
    sizes = sorted(gaps)
    seconds = [max(_LEAST_S, median(gaps[num_bytes]) - action_s) for num_bytes in sizes]
    return EngineCost(action_s=action_s, sending=fit_link(sizes, seconds), step_s=_around_s(timeline, action_s))


def _around_s(timeline: Timeline, action_s: float) -> float:
    """Seconds until the first device's first action, and from its last one, and the gap after that, to its update."""
    updates = [x.start_s for x in timeline.spans if x.device == 0 and x.action.kind is ActionKind.OPTIMIZER]
    ended_s = max(x.end_s for x in timeline.loop_spans if x.device == 0)
    return timeline.loop_start_s + max(0.0, min(updates) - ended_s - action_s)


def _relay_plan(num_threads: int) -> Plan:
    options = ProfileOptions(microbatch_sizes=(1,), num_threads=num_threads, contention=0, link=_NO_LINK, budget_s=0.01)
    profile = measure_profile(load_model_file(relay.__file__), options)
    schedule = f"looped-bfs:{relay.NUM_STAGES // 2}"
    return balance(profile, num_devices=2, num_microbatches=_NUM_MICROBATCHES, schedule=schedule)


def _gaps(plan: Plan, timeline: Timeline) -> Iterator[tuple[int, float]]:
    """The bytes that an action sent and the seconds until the next began, where the next had its input long before.

    Of actions that send nothing the forwards alone: between backwards of the first stage gradients are received.
    """
    spans = {span.action: span for span in timeline.loop_spans}
    needs = needs_of(list(spans), plan.num_stages)
    for one, other in pairwise(timeline.loop_spans):
        if one.device != other.device or (one.action.stage == 0 and one.action.kind is not ActionKind.FORWARD):
            continue
        need = needs.get(other.action)
        awaited = None if need is None else spans[need]
        if awaited is None or awaited.device == other.device or _has_come(plan, awaited, by_s=one.start_s):
            yield _sent_bytes(plan, one.action), other.start_s - one.end_s


def _has_come(plan: Plan, awaited: Span, *, by_s: float) -> bool:
    """Whether an input was made by then, and is not one that is long under way."""
    return awaited.end_s <= by_s and _sent_bytes(plan, awaited.action) <= _QUICK_BYTES


def _sent_bytes(plan: Plan, action: Action) -> int:
    if action.kind is ActionKind.FORWARD:
        return plan.stages[action.stage].cost.activation_bytes
    return plan.stages[action.stage - 1].cost.gradient_bytes if action.stage else 0
