"""Why there is no plan, and what would do: wishes that clash, the smallest memory, the smallest K, recomputing.

All are exact. The smallest memory minimises the largest peak over the stages, by the dynamic program that otherwise
minimises the largest load; where devices hold several stages, by branch and bound, as far as that comes in some seconds.
The smallest K is found by asking each K in turn whether any partition fits it. Of wishes that cannot be granted together
as few are named as clash by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from gplan.balancer.arcs import Cap, TooManyArcs, arcs_within, pairs_within
from gplan.balancer.granted import single_wishes, together
from gplan.balancer.largest import stages_between
from gplan.balancer.price import laid_out, stage_of, stages_of
from gplan.balancer.problem import Problem, compute_sums_s, demand_of, moments_of, without_memory
from gplan.balancer.sharing import smallest_peak
from gplan.balancer.tables import INFINITY, best_path, suffix_tables
from gplan.downsets import Bools, Ints
from gplan.errors import NoPlanError, UsageError
from gplan.memory import Moment, peak_of
from gplan.nouns import Stage, Wishes
from gplan.schedules import is_own_order
from gplan.units import bytes_text, counted

_SEARCH_S = 5.0  # for the smallest K; only chains of several hundred layers come near it
_MOST_PAIRS = 4_000_000  # whose memory is looked at at once for that


def no_plan_error(problem: Problem) -> NoPlanError | UsageError:
    """The error for a problem without a partition, naming the wishes that clash, or the memory and the K that would do."""
    clashing = clashing_wishes(problem)
    if clashing:
        return UsageError(_clash_text(problem, clashing))
    on_devices = f" on {counted(problem.num_devices, 'device')}" if problem.has_chunks else ""
    at_all = (
        f"no partition of {problem.num_layers} layers into {counted(problem.num_stages, 'stage')}{on_devices} fits "
        f"{_memory_text(problem)} per device"
    )
    if problem.wishes:
        at_all += " with these wishes"
    if problem.minimize == "max-device-load":  # that planner counts weights alone, and joins layers that take no time
        return NoPlanError(f"{at_all}; give each device more memory, or take more devices (--k)")
    try:
        tightest = tightest_device(problem)
        ways = _ways_out(problem)
    except TooManyArcs:
        more = "" if problem.recompute == "always" else ", or --recompute always"
        return NoPlanError(f"{at_all}; give each device more memory (--memory), take more stages (--k){more}")
    return NoPlanError(
        f"{at_all}; the smallest memory that {'does' if tightest.is_proven else 'was found to do'} is "
        f"{_size_text(tightest.peak_bytes)}, for {_device_text(tightest)}; {ways}"
    )


def clashing_wishes(problem: Problem) -> list[str]:
    """As few wishes as cannot be granted together, as options; empty where all can, or where that is not known."""
    asked = dict(single_wishes(problem.wishes))
    try:
        if not asked or _can_grant(problem, list(asked.values())):
            return []
        for name in list(asked):
            rest = {x: wish for x, wish in asked.items() if x != name}
            if not _can_grant(problem, list(rest.values())):
                asked = rest
    except TooManyArcs:  # without a limit of the memory only wishes rule out every plan
        return [] if problem.has_memory_limit else list(asked)
    return list(asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tightest:
    """The device with the largest peak in a partition whose largest peak is the smallest of all, if that is proven."""

    stages: tuple[Stage, ...]
    is_proven: bool

    @property
    def peak_bytes(self) -> int:
        """Of all its stages at once."""
        return sum(stage.memory.peak_bytes for stage in self.stages)


def tightest_device(problem: Problem) -> Tightest:
    """The device for which the smallest memory that does is needed."""
    if not problem.has_chunks:
        return Tightest(stages=(_tightest_stage(problem),), is_proven=True)
    known = smallest_peak(problem, deadline_s=time.perf_counter() + _SEARCH_S)
    assert known is not None, "without a limit there is a partition"
    stages = stages_of(*laid_out(without_memory(problem), stages_between(problem, known.ends.tolist())))
    devices = [tuple(stages[k] for k in own) for own in problem.stages_by_device]
    found = [Tightest(stages=own, is_proven=known.proven) for own in devices]
    return max(found, key=lambda device: device.peak_bytes)


def _tightest_stage(problem: Problem) -> Stage:
    """The stage with the largest peak in a partition whose largest peak is the smallest of all."""
    free = without_memory(problem)
    arcs = arcs_within(free, _every(free))
    assert arcs is not None, "without a limit there is a partition"
    peaks = [free.peak_bytes(stage, some.first, some.end).astype(np.float64) for stage, some in enumerate(arcs)]
    tables = suffix_tables(arcs, peaks, np.maximum, num_positions=problem.costs.num_positions)
    path = best_path(arcs, tables, peaks, np.maximum)
    ends = [int(some.end[i]) for some, i in zip(arcs, path, strict=True)]
    smallest = replace(free, memory_bytes=int(tables[0, 1, 0]))
    stages = stages_of(*laid_out(smallest, stages_between(free, ends)))
    return max(stages, key=lambda stage: stage.memory.peak_bytes)


def fits(problem: Problem) -> bool:
    """Whether any partition fits the memory; where devices hold several stages, whether one is found in some seconds."""
    limit = problem.memory_of(0)
    if not problem.has_chunks or limit is None:
        return arcs_within(problem, _every(problem)) is not None
    known = smallest_peak(problem, enough=limit, deadline_s=time.perf_counter() + _SEARCH_S)
    return known is not None and known.value <= limit


def numbers_of_devices_that_fit(problem: Problem) -> Iterator[bool]:
    """For K = 1, 2, ..., as many as there are layers for, whether any partition for K devices fits the memory.

    Without wishes, on devices all alike. Raises TooManyArcs for models with very many stages that are possible.
    """
    if not problem.has_chunks:
        yield from _numbers_of_stages_that_fit(problem)
        return
    num_chunks = problem.num_stages // problem.num_devices
    for num_devices in range(1, problem.num_layers // num_chunks + 1):
        yield fits(replace(problem, num_stages=num_chunks * num_devices))


def _numbers_of_stages_that_fit(problem: Problem) -> Iterator[bool]:
    """The same where each device has one stage; exact.

    Stages from the end of a pipeline are mostly alike for every K, so each K extends what was reached before.
    """
    pairs, size = _Pairs.of(problem), problem.costs.num_positions
    parts, last = problem.costs.parts(pairs.first, pairs.end), _Reached.nothing(size)
    fitting_as: dict[tuple[Moment, ...], Bools] = {}
    for num_stages in range(1, problem.num_layers + 1):
        reached, asked = last, replace(problem, num_stages=num_stages)
        for stage in reversed(range(num_stages)):
            moments = moments_of(asked, stage)
            demand = tuple(replace(x, action="") for x in moments)
            if demand not in fitting_as:
                peaks = peak_of(moments, parts)
                if problem.recompute == "selected":
                    peaks = problem.selector.least_peak_bytes(pairs.first, pairs.end, demand_of(asked, stage))
                fitting_as[demand] = peaks <= (problem.memory_bytes or 0)
            if demand not in reached.before:
                starts = pairs.starts_of(fitting_as[demand] & reached.starts[pairs.end])
                reached.before[demand] = _Reached(starts=starts)
            reached = reached.before[demand]
        yield bool(reached.starts[0])


@dataclass(frozen=True)
class _Pairs:
    """Every stage that is possible at all; making them raises TooManyArcs where they are too many to be held."""

    first: Ints
    end: Ints
    size: int

    @classmethod
    def of(cls, problem: Problem) -> _Pairs:
        costs = problem.costs
        every, sums = np.arange(costs.num_positions), compute_sums_s(problem)
        unlimited = np.full(len(every), INFINITY)
        found, count = [], 0
        for pair in pairs_within(costs.downsets, sums, every, every, most=unlimited, low=-INFINITY, high=INFINITY):
            found.append(pair)
            count += len(pair[0])
            if count > _MOST_PAIRS:
                raise TooManyArcs
        first, end = (np.concatenate(x) for x in zip(*found, strict=True))
        return cls(first=first, end=end, size=costs.num_positions)

    def starts_of(self, chosen: Bools) -> Bools:
        """[P]: where any of the chosen stages begins."""
        starts = np.zeros(self.size, dtype=np.bool_)
        starts[self.first[chosen]] = True
        return starts


@dataclass(frozen=True)
class _Reached:
    """From which positions some last stages can hold the rest of the model; with one more stage before them, too."""

    starts: Bools
    before: dict[tuple[Moment, ...], _Reached] = field(default_factory=dict)

    @classmethod
    def nothing(cls, size: int) -> _Reached:
        return cls(starts=np.arange(size) == size - 1)


def _can_grant(problem: Problem, wishes: list[Wishes]) -> bool:
    return fits(replace(without_memory(problem), wishes=together(wishes)))


def _every(problem: Problem) -> Cap:
    return Cap.of_load(INFINITY, num_stages=problem.num_stages)


def _clash_text(problem: Problem, clashing: list[str]) -> str:
    stages = f"{problem.num_layers} layers in {counted(problem.num_stages, 'stage')}"
    num_cuts = len(set(problem.wishes.cut_after))
    if num_cuts >= problem.num_stages:
        asked = f"--cut-after asks for {counted(num_cuts, 'cut')}, so {num_cuts + 1} stages"
        num_chunks = problem.num_stages // problem.num_devices
        return f"{asked}; expected fewer cuts, or --k {-(-(num_cuts + 1) // num_chunks)}"
    if len(clashing) == 1:
        return f"{clashing[0]} cannot be granted with {stages}; take it back or change --k"
    return f"{' and '.join(clashing)} cannot be granted together with {stages}; take one of them back"


def _memory_text(problem: Problem) -> str:
    limits = {problem.memory_of(stage) for stage in range(problem.num_stages)}
    if len(limits) > 1:
        return "the memory of the machine's devices"
    return _size_text(limits.pop() or 0)


def _ways_out(problem: Problem) -> str:
    ways = []
    if not (problem.places or problem.wishes or is_own_order(problem.schedule)):
        with suppress(TooManyArcs):
            ways.append(_stages_text(problem))
    if problem.recompute != "always" and fits(replace(problem, recompute="always")):
        ways.append("with --recompute always it would fit as it is")
    return "; ".join(ways) or "give the devices more memory, or take more of them"


def _stages_text(problem: Problem) -> str:
    what = "devices" if problem.has_chunks else "stages"
    lone = _largest_lone_layer(problem) if problem.costs.given_downsets is None and not problem.has_chunks else None
    if lone is not None and lone.memory.peak_bytes > (problem.memory_bytes or 0):
        return f"no number of stages fits this memory: {_layers_text(lone)} alone needs {_peak_text(lone)}"
    deadline_s = time.perf_counter() + _SEARCH_S
    for number, does_fit in enumerate(numbers_of_devices_that_fit(problem), start=1):
        if does_fit:
            return f"with this memory the smallest number of {what} that fits is {number} (try --k {number})"
        if time.perf_counter() > deadline_s:
            return f"no number of {what} up to {number} fits this memory (larger ones were not tried)"
    if problem.has_chunks:
        return "no number of devices fits this memory"
    stage = _tightest_stage(replace(problem, num_stages=problem.num_layers))
    return (
        "no number of stages fits this memory: with one layer per stage, "
        f"stage {stage.index} ({_layers_text(stage)}) needs {_peak_text(stage)}"
    )


def _largest_lone_layer(problem: Problem) -> Stage:
    """Of a chain, the layer that needs most by itself, in a pipeline of one stage: no stage keeps fewer micro-batches."""
    lenient = replace(problem, num_stages=1)
    layers = np.arange(problem.num_layers)
    worst = int(lenient.peak_bytes(0, layers, layers + 1).argmax())
    return stage_of(lenient, 0, worst, worst + 1)


def _device_text(tightest: Tightest) -> str:
    """The device, by its stages and the action at which it holds most."""
    stages, moment = tightest.stages, tightest.stages[0].memory.moment
    if len(stages) == 1:
        return f"stage {stages[0].index} ({_layers_text(stages[0])}, at {moment})"
    numbers = " and ".join(str(stage.index) for stage in stages)
    return f"device {stages[0].device}, which has stages {numbers} (at {moment})"


def _layers_text(stage: Stage) -> str:
    first, last = stage.layer_names[0], stage.layer_names[-1]
    return f"layer {first}" if stage.num_layers == 1 else f"layers {first} to {last}"


def _peak_text(stage: Stage) -> str:
    return _size_text(stage.memory.peak_bytes)


def _size_text(num_bytes: int) -> str:
    return f"{bytes_text(num_bytes)} ({num_bytes} bytes)" if num_bytes >= 1000 else bytes_text(num_bytes)
