"""Why there is no plan, and what would do: constraints that clash, the smallest memory, the smallest K, recomputing.

All are exact (`peaks.py`), but where devices hold several stages: there the smallest memory, and whether any partition
fits, are found by branch and bound, as far as that comes in some seconds; of what is not settled by then only what was
found is said. The smallest K is found by asking each K in turn whether any partition fits it. Of constraints that cannot be
granted together as few are named as clash by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from gplan.core import Constraints, Machine, Plan, Profile, Stage
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.schedule import Action
from gplan.core.units import bytes_text, counted, seconds_text
from gplan.cost.stage_costs import Costs
from gplan.partition.candidates import Cap, TooManyCandidates, candidates_within
from gplan.partition.constraints import single_constraints, together
from gplan.partition.dp import INFINITY
from gplan.partition.memory_feasibility import (
    any_fits,
    lasting_bytes,
    least_peak,
    numbers_of_stages_that_fit,
)
from gplan.partition.minimax import stages_between
from gplan.partition.placement import fits_machine
from gplan.partition.plan_evaluation import laid_out, stages_of
from gplan.partition.problem import Problem, without_memory
from gplan.partition.shared_device_search import smallest_peak
from gplan.schedules.custom import is_custom_order
from gplan.simulation.simulator import step_and_bubble

_SEARCH_S = 5.0  # for the smallest memory, and for the smallest K, where devices hold several stages


def no_plan_error(problem: Problem, machine: Machine | None = None) -> NoPlanError | UsageError:
    """The error for a problem without a partition, naming the constraints that clash,
    or the memory and the K that would do.

    `machine` is the one whose devices were tried; then the smallest memory is that of equal devices.
    """
    clashing = clashing_constraints(problem)
    if clashing:
        return UsageError(_clash_text(problem, clashing))
    on_devices = f" on {counted(problem.num_devices, 'device')}" if problem.has_chunks else ""
    at_all = (
        f"no partition of {problem.num_layers} layers into {counted(problem.num_stages, 'stage')}{on_devices} fits "
        f"{_memory_text(problem, machine)}"
    )
    if problem.constraints:
        at_all += " with these constraints"
    try:
        tightest = tightest_device(problem)
        ways = _ways_out(problem, machine)
    except TooManyCandidates:
        more = "" if problem.recompute == "always" else ", or --recompute always"
        return NoPlanError(f"{at_all}; give each device more memory (--memory), take more stages (--k){more}")
    return NoPlanError(
        f"{at_all}; the smallest memory {'per device ' if machine else ''}that "
        f"{'does' if tightest.is_proven else 'was found to do'} is "
        f"{_size_text(tightest.peak_bytes)}, for {_device_text(tightest)}; {ways}"
    )


def clashing_constraints(problem: Problem) -> list[str]:
    """As few constraints as cannot be granted together, as options; empty where all can, or where that is not known."""
    asked = dict(single_constraints(problem.constraints))
    try:
        if not asked or _can_grant(problem, list(asked.values())):
            return []
        for name in list(asked):
            rest = {x: constraint for x, constraint in asked.items() if x != name}
            if not _can_grant(problem, list(rest.values())):
                asked = rest
    except TooManyCandidates:  # without a limit of the memory only constraints rule out every plan
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
    peak_bytes, ends = least_peak(free)
    smallest = replace(free, memory_bytes=peak_bytes)
    stages = stages_of(*laid_out(smallest, stages_between(free, ends)))
    return max(stages, key=lambda stage: stage.memory.peak_bytes)


def fits(problem: Problem) -> bool | None:
    """Whether any partition fits the memory; None where devices hold several stages and seconds do not settle it."""
    limit = problem.memory_of(0)
    if not problem.has_memory_limit:
        return candidates_within(problem, Cap.of_load(INFINITY, num_stages=problem.num_stages)) is not None
    if not problem.has_chunks or limit is None:
        return any_fits(problem)
    known = smallest_peak(problem, enough=limit, deadline_s=time.perf_counter() + _SEARCH_S)
    if known is None or known.value <= limit:
        return known is not None
    return False if known.lower_bound > limit else None


def numbers_of_devices_that_fit(problem: Problem) -> Iterator[bool | None]:
    """For K = 1, 2, ..., as many as there are layers for, whether any partition for K devices fits the memory (`fits`).

    Without constraints, on devices all alike. Raises TooManyCandidates for models with very many stages that are possible.
    """
    if not problem.has_chunks:
        yield from numbers_of_stages_that_fit(problem)
        return
    num_chunks = problem.num_stages // problem.num_devices
    limit, lasting = problem.memory_of(0) or 0, lasting_bytes(problem)
    for num_devices in range(1, problem.num_layers // num_chunks + 1):
        yield lasting <= num_devices * limit and fits(replace(problem, num_stages=num_chunks * num_devices))


def _can_grant(problem: Problem, constraints: list[Constraints]) -> bool:
    return fits(replace(without_memory(problem), constraints=together(constraints))) is not False


def _clash_text(problem: Problem, clashing: list[str]) -> str:
    stages = f"{problem.num_layers} layers in {counted(problem.num_stages, 'stage')}"
    num_cuts = len(set(problem.constraints.cut_after))
    if num_cuts >= problem.num_stages:
        asked = f"--cut-after asks for {counted(num_cuts, 'cut')}, so {num_cuts + 1} stages"
        num_chunks = problem.num_stages // problem.num_devices
        return f"{asked}; expected fewer cuts, or --k {-(-(num_cuts + 1) // num_chunks)}"
    if len(clashing) == 1:
        return f"{clashing[0]} is impossible with {stages}; drop it or change --k"
    return f"{' and '.join(clashing)} cannot be satisfied together with {stages}; drop one of them"


def _memory_text(problem: Problem, machine: Machine | None) -> str:
    if machine is None:
        return f"{_size_text(problem.memory_of(0) or 0)} per device"
    if not problem.has_memory_limit and all(device.memory_bytes is None for device in machine.devices):
        return "the machine's devices"
    given = [x for x in (problem.memory_bytes, *(device.memory_bytes for device in machine.devices)) if x is not None]
    smallest, largest = _size_text(min(given)), _size_text(min(problem.memory_bytes or max(given), max(given)))
    each = smallest if smallest == largest else f"{smallest} to {largest}"
    return f"the machine's devices ({each} per device)"


def _ways_out(problem: Problem, machine: Machine | None) -> str:
    ways = []
    if not (problem.constraints or is_custom_order(problem.schedule)):
        with suppress(TooManyCandidates):
            ways.append(_stages_text(problem) if machine is None else _machine_stages_text(problem, machine))
    again = replace(problem, recompute="always")
    if problem.recompute != "always":
        if machine is None:
            does_fit = fits(again)
        else:
            does_fit = fits_machine(again, machine, deadline_s=time.perf_counter() + _SEARCH_S)
        if does_fit:
            ways.append("with --recompute always it would fit as it is")
    return "; ".join(ways) or "give the devices more memory, or take more of them"


def _machine_stages_text(problem: Problem, machine: Machine) -> str:
    """The smallest number of stages for which devices of the machine have the memory."""
    most, deadline_s = min(len(machine.devices), problem.num_layers), time.perf_counter() + _SEARCH_S
    for number in range(1, most + 1):
        does_fit = fits_machine(replace(problem, num_stages=number), machine, deadline_s=deadline_s)
        if does_fit is None:
            return f"no number of stages below {number} fits the machine (others were not tried)"
        if does_fit:
            return f"on this machine the smallest number of stages that fits is {number} (try --k {number})"
    return f"no number of stages up to {most} fits the machine"


def _stages_text(problem: Problem) -> str:
    what = "devices" if problem.has_chunks else "stages"
    deadline_s, word = time.perf_counter() + _SEARCH_S, "fits"
    for number, does_fit in enumerate(numbers_of_devices_that_fit(problem), start=1):
        if does_fit is None:
            word = "was found to fit"
        if does_fit:
            return f"with this memory the smallest number of {what} that {word} is {number} (try --k {number})"
        if time.perf_counter() > deadline_s:
            return f"no number of {what} up to {number} {word} this memory (larger ones were not tried)"
    if problem.has_chunks:
        return f"no number of devices {word} this memory{'' if word == 'fits' else ' in time'}"
    stage = _tightest_stage(replace(problem, num_stages=problem.num_layers))
    return (
        "no number of stages fits this memory: with one layer per stage, "
        f"stage {stage.index} ({_layers_text(stage)}) needs {_peak_text(stage)}"
    )


def _device_text(tightest: Tightest) -> str:
    """The device, by its stages and the action at which it holds most."""
    stages = tightest.stages
    moment = _moment_text(stages[0].memory.moment, has_chunks=len(stages) > 1)
    if len(stages) == 1:
        return f"stage {stages[0].index} ({_layers_text(stages[0])}; peak in {moment})"
    numbers = " and ".join(str(stage.index) for stage in stages)
    return f"device {stages[0].device}, which has stages {numbers} (peak in {moment})"


def _moment_text(moment: str, *, has_chunks: bool) -> str:
    """The action of a peak in words, such as "the backward of micro-batch 3"."""
    try:
        action = Action.parse(moment)
    except ValueError:  # the optimizer has no micro-batch
        return f"the {moment}"
    where = f" in stage {action.stage}" if has_chunks else ""
    return f"the {action.kind.words} of micro-batch {action.microbatch}{where}"


def _layers_text(stage: Stage) -> str:
    first, last = stage.layer_names[0], stage.layer_names[-1]
    return f"layer {first}" if stage.num_layers == 1 else f"layers {first} to {last}"


def _peak_text(stage: Stage) -> str:
    return _size_text(stage.memory.peak_bytes)


def _size_text(num_bytes: int) -> str:
    return f"{bytes_text(num_bytes)} ({num_bytes} bytes)" if num_bytes >= 1000 else bytes_text(num_bytes)


# Whether one device alone would do a plan's work in less time: then the pipeline costs more than it saves.
#
# So it is where layers are short and what goes between devices takes long, or where processes that share a host slow each
# other down. One device has the whole batch, a backward after each forward, and the plan's memory limit and recompute.


_LEANEST = "1f1b"  # of the schedules, which all take as long on one device, the one that holds least


def one_device_notes(plan: Plan, profile: Profile) -> tuple[str, ...]:
    """A note that one device would be faster; none where it is not, cannot hold the model, or devices differ; O(M)."""
    num_devices = plan.num_devices * plan.num_replicas
    if num_devices == 1 or any(stage.machine_device for stage in plan.stages):
        return ()
    alone = Problem(
        costs=Costs(profile, plan.microbatch_size, plan.num_microbatches * plan.num_replicas),
        num_stages=1,
        schedule=_LEANEST,
        recompute=plan.recompute,
        minimize="step-time",
        memory_bytes=plan.memory_limit_bytes,
    )
    (stage,) = stages_of(alone, ())
    if plan.memory_limit_bytes is not None and stage.memory.peak_bytes > plan.memory_limit_bytes:
        return ()
    step_s, _ = step_and_bubble(alone.made_schedule, [stage.cost], recompute=plan.recompute)
    if step_s >= plan.prediction.step_s:
        return ()
    return (
        f"one device alone (--k 1 --schedule {_LEANEST}) would be faster: {seconds_text(step_s)} for the same batch, where "
        f"these {counted(num_devices, 'device')} take {seconds_text(plan.prediction.step_s)}",
    )
