"""Why no plan exists, and what would help: conflicting constraints, the least memory, the least K, recompute.

With one stage on each device all answers are exact (`memory_feasibility.py`). With several, a branch and bound looks for
the least memory for a few seconds; where it does not finish, only what it found is reported. Of constraints that cannot
be satisfied together, a minimal conflicting set is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from gplan.core import Constraints, Machine, Plan, Profile, Stage
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.units import bytes_text, counted, memory_text, seconds_text
from gplan.corrections import planned
from gplan.cost.stage_table import StageTable
from gplan.partition.candidates import INFINITY, CandidateLimit, TooManyCandidates, candidates_within
from gplan.partition.memory_feasibility import (
    any_fits,
    lasting_bytes,
    least_peak,
    numbers_of_stages_that_fit,
)
from gplan.partition.minimax import stages_between
from gplan.partition.placement import fits_machine
from gplan.partition.plan_evaluation import in_stage_order, stages_of
from gplan.partition.problem import Problem, without_memory
from gplan.partition.solve import smallest_peak
from gplan.partition.validation import combined, constraint_options
from gplan.schedules.custom import is_custom_order
from gplan.schedules.request import OptionNames
from gplan.simulation.simulator import step_and_bubble

_SEARCH_S = 5.0  # for the least memory, and for the least K, with several stages on a device


def no_plan_error(
    problem: Problem, machine: Machine | None = None, *, smaller: Callable[[], Sequence[Problem]] = tuple
) -> NoPlanError | UsageError:
    """The error for a problem without a partition: the conflicting constraints, or what it needs and what would fit.

    With a `machine`, whose devices were all tried, the smallest memory is for as many equal devices. `smaller`
    gives the same batch in smaller micro-batches.
    """
    conflicting = conflicting_constraints(problem)
    if conflicting:
        return UsageError(_conflict_text(problem, conflicting))
    on_devices = f" on {counted(problem.num_devices, 'device')}" if problem.has_chunks else ""
    text = (
        f"no partition of {problem.num_layers} layers into {counted(problem.num_stages, 'stage')}{on_devices} fits "
        f"{_memory_text(problem, machine)}"
    )
    if problem.constraints:
        text += " with these constraints"
    try:
        tightest = tightest_device(problem)
        remedies = _remedies_text(problem, machine, smaller(), least_bytes=tightest.peak_bytes)
    except TooManyCandidates:
        more = "" if problem.recompute == "always" else ", or --recompute always"
        return NoPlanError(
            f"{text}; give each device more memory (--memory), use more stages ({problem.options.num_devices}){more}"
        )
    return NoPlanError(
        f"{text}; the smallest memory {'per device ' if machine else ''}that "
        f"{'fits' if tightest.is_proven else 'was found to fit'} is "
        f"{memory_text(tightest.peak_bytes)}, for {_device_text(tightest)}; {remedies}"
    )


def conflicting_constraints(problem: Problem) -> list[str]:
    """A minimal set of constraints that no partition satisfies, as options; empty if there is none or it is unknown."""
    remaining = dict(constraint_options(problem.constraints))
    try:
        if not remaining or _can_satisfy(problem, remaining.values()):
            return []
        for name in list(remaining):
            others = {x: constraint for x, constraint in remaining.items() if x != name}
            if not _can_satisfy(problem, others.values()):
                remaining = others
    except TooManyCandidates:  # without a memory limit only constraints can rule out every partition
        return [] if problem.has_memory_limit else list(remaining)
    return list(remaining)


def _can_satisfy(problem: Problem, constraints: Iterable[Constraints]) -> bool:
    return is_feasible(replace(without_memory(problem), constraints=combined(list(constraints)))) is not False


@dataclass(frozen=True, slots=True, kw_only=True)
class TightestDevice:
    """The device with the largest peak, in the partition whose largest peak is smallest."""

    stages: tuple[Stage, ...]
    peak_bytes: int  # of all its stages together, as the search counts it
    is_proven: bool  # else a smaller peak may exist


def tightest_device(problem: Problem) -> TightestDevice:
    """The device that determines the least memory limit with which any partition fits."""
    if not problem.has_chunks:
        stage, peak_bytes = _tightest_stage(problem)
        return TightestDevice(stages=(stage,), peak_bytes=peak_bytes, is_proven=True)
    found = smallest_peak(problem, deadline_s=time.perf_counter() + _SEARCH_S)
    assert found is not None, "without a limit there is a partition"
    stages = stages_of(*in_stage_order(without_memory(problem), stages_between(problem, found.ends.tolist())))
    devices = [tuple(stages[k] for k in numbers) for numbers in problem.stages_by_device]
    peaks = [sum(stage.memory.peak_bytes for stage in x) for x in devices]
    largest = max(range(len(devices)), key=peaks.__getitem__)
    return TightestDevice(stages=devices[largest], peak_bytes=peaks[largest], is_proven=found.proven)


def _tightest_stage(problem: Problem) -> tuple[Stage, int]:
    """As `tightest_device`, with one stage on each device; and its peak."""
    unlimited = without_memory(problem)
    peak_bytes, ends = least_peak(unlimited)
    laid, cuts = in_stage_order(replace(unlimited, memory_bytes=peak_bytes), stages_between(unlimited, ends))

    def least_peak_bytes(stage: Stage) -> int:
        return int(laid.peak_bytes(stage.index, np.array([stage.first_layer]), np.array([stage.end_layer]))[0])

    return max(stages_of(laid, cuts), key=least_peak_bytes), peak_bytes


def is_feasible(problem: Problem) -> bool | None:
    """Whether any partition fits the memory and the constraints.

    None if devices have several stages and the search does not settle it within seconds.
    """
    limit = problem.memory_of(0)
    if not problem.has_memory_limit:
        return candidates_within(problem, CandidateLimit.of_load(INFINITY, num_stages=problem.num_stages)) is not None
    if not problem.has_chunks or limit is None:
        return any_fits(problem)
    found = smallest_peak(problem, enough=limit, deadline_s=time.perf_counter() + _SEARCH_S)
    if found is None or found.value <= limit:
        return found is not None
    return False if found.lower_bound > limit else None


def feasibility_by_num_devices(problem: Problem) -> Iterator[bool | None]:
    """For K = 1, 2, ... up to the number of layers, whether a partition for K devices fits (`is_feasible`).

    Without constraints, on identical devices. Raises TooManyCandidates for models with too many possible stages.
    """
    if not problem.has_chunks:
        yield from numbers_of_stages_that_fit(problem)
        return
    num_chunks = problem.num_stages // problem.num_devices
    limit, lasting = problem.memory_of(0) or 0, lasting_bytes(problem)
    for num_devices in range(1, problem.num_layers // num_chunks + 1):
        yield lasting <= num_devices * limit and is_feasible(replace(problem, num_stages=num_chunks * num_devices))


def _conflict_text(problem: Problem, conflicting: list[str]) -> str:
    num_cuts = len(set(problem.constraints.cut_after))
    if num_cuts >= problem.num_stages:
        num_chunks = problem.num_stages // problem.num_devices
        return (
            f"--cut-after asks for {counted(num_cuts, 'cut')}, so {num_cuts + 1} stages; expected fewer cuts, or "
            f"--k {-(-(num_cuts + 1) // num_chunks)}"
        )
    stages = f"{problem.num_layers} layers in {counted(problem.num_stages, 'stage')}"
    if len(conflicting) == 1:
        return f"{conflicting[0]} cannot be satisfied with {stages}; remove it or change --k"
    return f"{' and '.join(conflicting)} cannot be satisfied together with {stages}; remove one of them"


def _memory_text(problem: Problem, machine: Machine | None = None) -> str:
    if machine is None:
        return f"{bytes_text(problem.memory_of(0) or 0)} per device"
    if not problem.has_memory_limit and all(device.memory_bytes is None for device in machine.devices):
        return "the machine's devices"
    given = [x for x in (problem.memory_bytes, *(device.memory_bytes for device in machine.devices)) if x is not None]
    smallest, largest = bytes_text(min(given)), bytes_text(min(problem.memory_bytes or max(given), max(given)))
    each = smallest if smallest == largest else f"{smallest} to {largest}"
    return f"the machine's devices ({each} per device)"


def _remedies_text(problem: Problem, machine: Machine | None, smaller: Sequence[Problem], *, least_bytes: int) -> str:
    """What fits, by as few options as possible, and by another number of stages; else what comes closest."""
    deadline_s = time.perf_counter() + _SEARCH_S
    fitting, number, closest = list[str](), 0, (least_bytes, "", problem)
    for changed, options, other in sorted(_changed(problem, smaller), key=lambda x: x[0]):
        if (changed > number and fitting) or time.perf_counter() > deadline_s:
            break
        number = changed
        does_fit, need_bytes = _need(other, machine)
        if does_fit:
            fitting.append(_needs_text(options, need_bytes))
        elif need_bytes is not None and need_bytes < closest[0]:
            closest = need_bytes, options, other
    need_bytes, options, other = closest
    nothing = [f"the closest that was found: {_needs_text(options, need_bytes)}"] if options else []
    least_size = min(x.costs.profile.microbatch_sizes[0] for x in (problem, *smaller))
    finer = "" if fitting else size_to_profile_text(problem, least_size)
    if not (problem.constraints or is_custom_order(problem.schedule)):
        with suppress(TooManyCandidates):
            does_fit, stages = stages_that_fit(problem, machine)
            if not does_fit and options and not fitting:
                does_fit, stages = stages_that_fit(other, machine, options)
            (fitting if does_fit else nothing).append(stages)
    if fitting:
        return f"what fits: {', '.join(fitting)}{finer}"
    return ("; ".join(nothing) or "give the devices more memory, or use more devices") + finer


def size_to_profile_text(problem: Problem, least_size: int) -> str:
    """What to profile for plans with micro-batches below the smallest size, where the weights alone would fit; else ""."""
    is_profiled = problem.options.granularity and not is_custom_order(
        problem.schedule
    )  # else sizes are chosen elsewhere
    if least_size == 1 or not is_profiled or lasting_bytes(problem) > problem.num_devices * (problem.memory_of(0) or 0):
        return ""
    return f"; smaller micro-batches may fit: gplan profile --microbatch-size {least_size // 2},{least_size}"


def _changed(problem: Problem, smaller: Sequence[Problem]) -> Iterator[tuple[int, str, Problem]]:
    """The problem with options that save memory: how many, which, and what it becomes."""
    schedules: dict[str, Any] = {"": {}}
    if not (problem.has_chunks or is_custom_order(problem.schedule) or problem.schedule == LEAST_MEMORY_SCHEDULE):
        schedules[f"{problem.options.schedule} {LEAST_MEMORY_SCHEDULE}"] = {"schedule": LEAST_MEMORY_SCHEDULE}
    modes: dict[str, Any] = (
        {"": {}} if problem.recompute == "always" else {"": {}, "--recompute always": {"recompute": "always"}}
    )
    sizes = {"": problem}
    for x in smaller:
        sizes[f"--microbatch-size {x.costs.profile.microbatch_sizes[0]} --microbatches {x.num_microbatches}"] = x
    for (size, base), (schedule, by), (mode, how) in product(sizes.items(), schedules.items(), modes.items()):
        if given := [x for x in (size, schedule, mode) if x]:
            yield len(given), " ".join(given), replace(base, **by, **how)


def _need(problem: Problem, machine: Machine | None) -> tuple[bool | None, int | None]:
    """Whether a problem fits, and the bytes that it needs per device; None: not known."""
    if machine is not None:
        return fits_machine(problem, machine, deadline_s=time.perf_counter() + _SEARCH_S), None
    if problem.has_chunks:
        return is_feasible(problem), None
    need_bytes, _ = least_peak(without_memory(problem))
    return need_bytes <= (problem.memory_of(0) or 0), need_bytes


def _needs_text(options: str, need_bytes: int | None) -> str:
    return f"{options} fits" if need_bytes is None else f"{options} needs {memory_text(need_bytes)}"


def stages_that_fit(problem: Problem, machine: Machine | None = None, given: str = "") -> tuple[bool, str]:
    """Whether some number of stages, or of devices, fits, and the smallest one as options, or that there is none.

    `given` are options that the problem has already.
    """
    before = f"with {given} " if given else ""
    what, on = "devices" if problem.has_chunks else "stages", "" if machine is None else " the machine"
    deadline_s, word = time.perf_counter() + _SEARCH_S, "fits"
    if machine is None:
        feasible = feasibility_by_num_devices(problem)
    else:
        numbers = range(1, min(len(machine.devices), problem.num_layers) + 1)
        feasible = (fits_machine(replace(problem, num_stages=x), machine, deadline_s=deadline_s) for x in numbers)
    for number, does_fit in enumerate(feasible, start=1):
        if does_fit:
            options = f"{given} {problem.options.num_devices} {number}".strip()
            if "--microbatches" not in given:  # by default others
                options += f" --microbatches {problem.num_microbatches}"
            is_counted = machine is None and not problem.has_chunks
            need_bytes = _need(replace(problem, num_stages=number), machine)[1] if is_counted else None
            return True, _needs_text(options, need_bytes)
        word = "was found to fit" if does_fit is None else word
        if time.perf_counter() > deadline_s:
            return False, f"{before}no number of {what} up to {number} {word}{on} (larger ones were not tried)"
    if problem.has_chunks or machine is not None:
        return False, f"{before}no number of {what} {word}{on}"
    stage, peak_bytes = _tightest_stage(replace(problem, num_stages=problem.num_layers))
    return False, (
        f"{before}no number of stages fits: with one layer per stage, stage {stage.index} (layers: {stage.layers_text}) needs "
        f"{bytes_text(peak_bytes)}"
    )


def _device_text(tightest: TightestDevice) -> str:
    """The device, by its stages."""
    stages = tightest.stages
    if len(stages) == 1:
        return f"stage {stages[0].index} (layers: {stages[0].layers_text})"
    numbers = " and ".join(str(stage.index) for stage in stages)
    return f"device {stages[0].device}, which has stages {numbers}"


LEAST_MEMORY_SCHEDULE = "1f1b"  # of those with one stage on each device; on one device all take equally long


def one_device_notes(plan: Plan, profile: Profile, options: OptionNames) -> tuple[str, ...]:
    """A note if one device would finish the plan's batch in less time; nothing otherwise. O(M).

    That happens with short layers and slow links, or with processes that slow each other down on one host. The one
    device has the plan's memory limit and recompute mode. On a machine of unequal devices no note is made.
    """
    num_devices = plan.num_ranks
    if num_devices == 1 or plan.is_for_machine:
        return ()
    single = Problem(
        costs=StageTable(
            planned(profile, microbatch_size=plan.microbatch_size), plan.num_microbatches * plan.num_replicas
        ),
        num_stages=1,
        schedule=LEAST_MEMORY_SCHEDULE,
        recompute=plan.recompute,
        minimize="step-time",
        memory_bytes=plan.memory_limit_bytes,
    )
    (stage,) = stages_of(single, ())
    if plan.memory_limit_bytes is not None and stage.memory.peak_bytes > plan.memory_limit_bytes:
        return ()
    step_s, _ = step_and_bubble(single.made_schedule, [stage.cost], recompute=plan.recompute)
    if step_s >= plan.prediction.step_s:
        return ()
    setting = f"{options.num_devices} 1" + f" {options.schedule} {LEAST_MEMORY_SCHEDULE}" * bool(options.schedule)
    setting += f" --microbatch-size {plan.microbatch_size} --microbatches {single.num_microbatches}"
    if plan.recompute != "never":
        setting += f" --recompute {plan.recompute}"
    if plan.memory_limit_bytes not in (None, profile.device.memory_bytes):
        setting += f" --memory {plan.memory_limit_bytes}"
    return (
        f"one device alone ({setting}) would be faster than these {num_devices}: {seconds_text(step_s)} for the same batch",
    )
