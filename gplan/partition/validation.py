"""Checks before anything is planned: numbers, objectives, recompute, split backwards; and the user's constraints.

`cut_after`, `keep_together` and pins each rule out some candidate stages (`ConstraintCheck`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gplan.core import Constraints, Profile
from gplan.core.checks import SHARDINGS
from gplan.core.errors import UsageError
from gplan.core.units import counted
from gplan.graph.down_sets import Bools, Ints, position_of
from gplan.partition.problem import Problem
from gplan.schedules.dependencies import execution_order
from gplan.schedules.registry import make_schedule, num_stages_of, schedule_info


def check_choice(name: str, found: str, choices: tuple[str, ...]) -> None:
    """Raise UsageError if `found` is not one of the choices."""
    if found not in choices:
        raise UsageError(f"{name} {found!r} is not known; expected one of {', '.join(choices)}")


def check_limits(*, memory_bytes: int | None, time_limit_s: float | None) -> None:
    """Raise UsageError for a time limit, or a memory of each device, that is not positive; None sets no limit."""
    if time_limit_s is not None and not time_limit_s > 0:
        raise UsageError(f"the time limit is {time_limit_s:g} s; expected more than 0")
    if memory_bytes is not None and memory_bytes < 1:
        raise UsageError(f"the memory of each device is {memory_bytes} bytes; expected at least 1")


def check_counts(
    profile: Profile, schedule: str, *, num_devices: int, num_microbatches: int, num_replicas: int
) -> None:
    """Raise UsageError for numbers that the model or the schedule does not allow, or a schedule that deadlocks."""
    num_layers, info = len(profile.layers), schedule_info(schedule)
    most = num_layers // info.num_chunks
    if num_devices < 1:
        what = "stages" if info.num_chunks == 1 else f"devices of {info.num_chunks} stages each"
        raise UsageError(f"asked for {num_devices} {what}; expected 1 to {most}, as the model has {num_layers} layers")
    if num_microbatches < 1:
        raise UsageError(f"asked for {num_microbatches} micro-batches; expected at least 1")
    if num_replicas < 1:
        raise UsageError(f"asked for {num_replicas} replicas; expected at least 1")
    num_stages = num_stages_of(schedule, num_devices)
    if num_stages > num_layers == 1:
        remedy = "try --k 1" if profile.granularity == "op" else "profile it again with --granularity op, or try --k 1"
        raise UsageError(
            f"asked for {num_stages} stages, but the model is a single layer, {profile.layers[0].name}, which cannot be cut: a "
            f"layer is a child of the model, or a block of a list of blocks; {remedy}"
        )
    if num_stages > num_layers:
        raise UsageError(_too_many_stages_text(schedule, num_devices, num_stages, num_layers))
    try:
        execution_order(make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches))
    except ValueError as error:
        raise UsageError(f"{info.title}: {error}") from error


def _too_many_stages_text(schedule: str, num_devices: int, num_stages: int, num_layers: int) -> str:
    info, most = schedule_info(schedule), num_layers // schedule_info(schedule).num_chunks
    if info.num_devices is not None:
        return f"the custom order has {num_stages} stages, the model has {num_layers} layers; {_ONE_LAYER}"
    if info.num_chunks == 1:
        return f"asked for {num_stages} stages of a model with {num_layers} layers; {_ONE_LAYER}: try --k {num_layers} or fewer"
    chunks = f"{counted(num_devices, 'device')} x {info.num_chunks} chunks = {num_stages} stages"
    remedy = f"try --k {most} or fewer, or fewer chunks" if most else "try a schedule with fewer chunks"
    return f"{info.title}: {chunks}, the model has {num_layers} layers; {_ONE_LAYER}: {remedy}"


_ONE_LAYER = "each stage needs at least one layer"


def check_recompute(schedule: str, recompute: str) -> None:
    """Raise UsageError for a recompute mode that the schedule does not allow."""
    reason = why_not_selected(schedule)
    if recompute == "selected" and reason:
        title = schedule_info(schedule).title
        raise UsageError(f"{reason}; expected --recompute never, always or except-last with {title}")


def why_not_selected(schedule: str) -> str:
    """Why recompute "selected" does not work with a schedule; "" if it does."""
    info = schedule_info(schedule)
    if info.num_chunks > 1:
        return "with several stages on a device, the best layers to recompute on one depend on the others"
    if info.splits_backward:
        return (
            "the memory between the halves of a backward is known only for stages that recompute everything or nothing"
        )
    return ""


def can_shard(schedule: str, sharding: str) -> bool:
    """Whether replicas can divide this much of stages: the second half of a backward needs weights that are freed by then."""
    return sharding != "weights" or not schedule_info(schedule).splits_backward


def check_sharding(schedule: str, sharding: str) -> None:
    """Raise UsageError for a way of sharding that there is not, or that the schedule cannot run."""
    check_choice("sharding", sharding, SHARDINGS)
    if not can_shard(schedule, sharding):
        raise UsageError(
            f"{schedule_info(schedule).title} splits backwards, whose second half needs weights that sharded replicas have freed by then; use "
            "--shard optimizer, or a schedule of whole backwards, such as 1f1b"
        )


def check_split_backward(schedule: str, *, has_halves: bool) -> None:
    """Raise UsageError for a schedule that splits the backward if the profile has no times of the halves."""
    if schedule_info(schedule).splits_backward and not has_halves:
        raise UsageError(
            f"{schedule_info(schedule).title} splits backwards into two halves, and the profile has no times of the "
            "halves; profile again (a note in the profile names layers whose backward cannot be split)"
        )


class ConstraintCheck:
    """Decides which candidate stages, pairs of positions (first, end), satisfy the constraints of a problem."""

    def __init__(self, problem: Problem) -> None:
        constraints, self._downsets = problem.constraints, problem.costs.downsets
        index = {layer.name: i for i, layer in enumerate(problem.costs.profile.layers)} if constraints else {}
        self._cuts = [position_of(self._downsets, range(index[name] + 1)) for name in constraints.cut_after]
        self._kept_counts = []  # for each keep_together, [P]: how many of its layers lie before each position
        for first, last in constraints.keep_together:
            members = np.zeros(problem.num_layers, dtype=np.int64)
            members[index[first] : index[last] + 1] = 1
            self._kept_counts.append(self._downsets.sums(members))
        self._pins = [(self._downsets.is_before(index[pin.layer]), pin.stage) for pin in constraints.pins]

    def allows(self, stage: int, first: Ints, end: Ints) -> Bools:
        """[E]: whether each candidate can be the stage with this number."""
        allowed = np.ones(len(first), dtype=np.bool_)
        for cut in self._cuts:
            assert cut is not None, "a prefix of a topological order is a down-set"
            allowed &= self._contains(end, cut) | self._contains(cut, first)
        for counts in self._kept_counts:
            num_inside = counts[end] - counts[first]
            allowed &= (num_inside == 0) | (num_inside == counts[-1])
        for is_before, pinned_stage in self._pins:
            allowed &= (is_before[end] & ~is_before[first]) == (pinned_stage == stage)
        return allowed

    def _contains(self, inner: Ints | int, outer: Ints | int) -> Bools:
        """Whether the layers before one position are all before the other."""
        a, b = np.broadcast_arrays(np.asarray(inner), np.asarray(outer))
        inside: Bools = (a == b) | self._downsets.are_stages(a, b)
        return inside


def check_constraints(constraints: Constraints, profile: Profile, *, num_stages: int) -> None:
    """Raise UsageError for a constraint with an unknown layer or stage, or layers in the wrong order."""
    names = [layer.name for layer in profile.layers]
    pairs = [x for pair in constraints.keep_together for x in pair]
    for name in (*constraints.cut_after, *pairs, *(x.layer for x in constraints.pins)):
        if name not in names:
            raise UsageError(f"the profile has no layer {name!r}; expected one of {_similar_names_text(name, names)}")
    for first, last in constraints.keep_together:
        if names.index(first) > names.index(last):
            raise UsageError(
                f"{first} comes after {last}; expected the first layer first: --keep-together {last}..{first}"
            )
    for pin in constraints.pins:
        if not 0 <= pin.stage < num_stages:
            raise UsageError(f"{pin.layer} is pinned to stage {pin.stage}; expected 0 to {num_stages - 1}")
    if names[-1] in constraints.cut_after:
        raise UsageError(f"{names[-1]} is the last layer; there is nothing to cut off after it")


def _similar_names_text(name: str, names: Sequence[str]) -> str:
    """The layers to choose from: all of a few; else their number, with those most similar to `name` or the first five."""
    from difflib import get_close_matches

    like = get_close_matches(name, names, n=5, cutoff=0.6) or names[:5]
    if len(names) == len(like):
        return ", ".join(names)
    return f"its {len(names)} layers, such as {', '.join(like)} (`gplan show --all` lists them)"


def constraint_options(constraints: Constraints) -> Iterator[tuple[str, Constraints]]:
    """Each constraint by itself, with the option of the command line that makes it."""
    for name in constraints.cut_after:
        yield f"--cut-after {name}", Constraints(cut_after=(name,))
    for first, last in constraints.keep_together:
        yield f"--keep-together {first}..{last}", Constraints(keep_together=((first, last),))
    for pin in constraints.pins:
        yield f"--pin {pin.layer}={pin.stage}", Constraints(pins=(pin,))


def combined(constraints: Sequence[Constraints]) -> Constraints:
    """All of several constraints."""
    return Constraints(
        cut_after=tuple(x for each in constraints for x in each.cut_after),
        keep_together=tuple(x for each in constraints for x in each.keep_together),
        pins=tuple(x for each in constraints for x in each.pins),
        profile_order=any(each.profile_order for each in constraints),
    )
