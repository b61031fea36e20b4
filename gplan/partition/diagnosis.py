"""Why no plan exists, and what would help: conflicting constraints, the least memory, the least K, recompute.

With one stage on each device all answers are exact (`memory_feasibility.py`). With several, a branch and bound looks for
the least memory for a few seconds; where it does not finish, only what it found is reported. Of constraints that cannot
be satisfied together, a minimal conflicting set is named.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from gplan.core import Constraints, Machine, Plan, Profile, Stage
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.schedule import moment_text
from gplan.core.units import bytes_text, counted, seconds_text
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
from gplan.simulation.simulator import step_and_bubble

_SEARCH_S = 5.0  # for the least memory, and for the least K, with several stages on a device


def no_plan_error(problem: Problem, machine: Machine | None = None) -> NoPlanError | UsageError:
    """The error for a problem without a partition: the conflicting constraints, or the memory and K that are enough.

    With a `machine`, whose devices were all tried, the smallest memory is for as many equal devices.
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
        ways = _ways_out(problem, machine, least_bytes=tightest.peak_bytes)
    except TooManyCandidates:
        more = "" if problem.recompute == "always" else ", or --recompute always"
        return NoPlanError(f"{text}; give each device more memory (--memory), use more stages (--k){more}")
    return NoPlanError(
        f"{text}; the smallest memory {'per device ' if machine else ''}that "
        f"{'fits' if tightest.is_proven else 'was found to fit'} is "
        f"{_size_text(tightest.peak_bytes)}, for {_device_text(tightest)}; {ways}"
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
        return f"{_size_text(problem.memory_of(0) or 0)} per device"
    if not problem.has_memory_limit and all(device.memory_bytes is None for device in machine.devices):
        return "the machine's devices"
    given = [x for x in (problem.memory_bytes, *(device.memory_bytes for device in machine.devices)) if x is not None]
    smallest, largest = _size_text(min(given)), _size_text(min(problem.memory_bytes or max(given), max(given)))
    each = smallest if smallest == largest else f"{smallest} to {largest}"
    return f"the machine's devices ({each} per device)"


def _ways_out(problem: Problem, machine: Machine | None, *, least_bytes: int) -> str:
    ways = []
    if not (problem.constraints or is_custom_order(problem.schedule)):
        with suppress(TooManyCandidates):
            ways.append(stages_that_fit_text(problem) if machine is None else _machine_stages_text(problem, machine))
    changed: dict[str, Problem] = {}
    if not (problem.has_chunks or is_custom_order(problem.schedule) or problem.schedule == LEAST_MEMORY_SCHEDULE):
        changed[f"--schedule {LEAST_MEMORY_SCHEDULE}"] = replace(problem, schedule=LEAST_MEMORY_SCHEDULE)
    if problem.recompute != "always":
        changed["--recompute always"] = replace(problem, recompute="always")
    for option, other in changed.items():
        if machine is None:
            does_fit = is_feasible(other)
        else:
            does_fit = fits_machine(other, machine, deadline_s=time.perf_counter() + _SEARCH_S)
        if does_fit:
            ways.append(f"with {option} it would fit")
        elif machine is None and not other.has_chunks:
            least, _ = least_peak(without_memory(other))
            if least < least_bytes:
                ways.append(f"with {option} the smallest memory would be {_size_text(least)}")
    return "; ".join(ways) or "give the devices more memory, or use more devices"


def _machine_stages_text(problem: Problem, machine: Machine) -> str:
    """The smallest number of stages for which devices of the machine have the memory."""
    most, deadline_s = min(len(machine.devices), problem.num_layers), time.perf_counter() + _SEARCH_S
    for number in range(1, most + 1):
        does_fit = fits_machine(replace(problem, num_stages=number), machine, deadline_s=deadline_s)
        if does_fit is None:
            return f"no number of stages below {number} fits the machine (others were not tried)"
        if does_fit:
            return f"on this machine the smallest number of stages that fits is {number} ({_remedy(problem, number)})"
    return f"no number of stages up to {most} fits the machine"


def stages_that_fit_text(problem: Problem) -> str:
    """The smallest number of stages, or of devices, for which the problem has a plan; as a remedy."""
    what = "devices" if problem.has_chunks else "stages"
    deadline_s, word, memory = time.perf_counter() + _SEARCH_S, "fits", _memory_text(problem)
    for number, does_fit in enumerate(feasibility_by_num_devices(problem), start=1):
        if does_fit is None:
            word = "was found to fit"
        if does_fit:
            remedy = _remedy(problem, number)
            return f"with {memory} the smallest number of {what} that {word} is {number} ({remedy})"
        if time.perf_counter() > deadline_s:
            return f"no number of {what} up to {number} {word} {memory} (larger ones were not tried)"
    if problem.has_chunks:
        return f"no number of devices {word} {memory}{'' if word == 'fits' else ' in time'}"
    stage, peak_bytes = _tightest_stage(replace(problem, num_stages=problem.num_layers))
    return (
        f"no number of stages fits {memory}: with one layer per stage, "
        f"stage {stage.index} (layers: {stage.layers_text}) needs {_size_text(peak_bytes)}"
    )


def _remedy(problem: Problem, number: int) -> str:
    """What to change; without the number of micro-batches it would be another one by default."""
    return f"run the same command with --k {number} --microbatches {problem.num_microbatches}"


def _device_text(tightest: TightestDevice) -> str:
    """The device, by its stages and the action at which it has its peak."""
    stages = tightest.stages
    moment = moment_text(stages[0].memory.moment, with_stage=len(stages) > 1)
    if len(stages) == 1:
        return f"stage {stages[0].index} (layers: {stages[0].layers_text}; peak in the {moment})"
    numbers = " and ".join(str(stage.index) for stage in stages)
    return f"device {stages[0].device}, which has stages {numbers} (peak in the {moment})"


def _size_text(num_bytes: int) -> str:
    return f"{bytes_text(num_bytes)} ({num_bytes} bytes)" if num_bytes >= 1000 else bytes_text(num_bytes)


LEAST_MEMORY_SCHEDULE = "1f1b"  # of those with one stage on each device; on one device all take equally long


def one_device_notes(plan: Plan, profile: Profile) -> tuple[str, ...]:
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
    setting = f"--k 1 --schedule {LEAST_MEMORY_SCHEDULE} --microbatch-size {plan.microbatch_size}"
    setting += f" --microbatches {single.num_microbatches}"
    if plan.recompute != "never":
        setting += f" --recompute {plan.recompute}"
    if plan.memory_limit_bytes not in (None, profile.device.memory_bytes):
        setting += f" --memory {plan.memory_limit_bytes}"
    return (
        f"one device alone ({setting}) would be faster: {seconds_text(step_s)} for the same batch, "
        f"where these {counted(num_devices, 'device')} take {seconds_text(plan.prediction.step_s)}",
    )
