"""The longest path through a step: the chain of actions and transfers that the step waits for, as a sum of times.

An action comes after the one before it on its device, and after the arrival of what it needs. A path's length is linear
in the times of the stages: so many forwards of each, so many transfers over each cut, and so on. These counts are what
is found here, for times that need not be those of any partition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gplan.core import Action, ActionKind, is_recomputed
from gplan.graph.down_sets import Floats, Ints
from gplan.partition.problem import Problem
from gplan.schedules.dependencies import INPUT_GRADIENT_KINDS, execution_order

TIMES = (
    "forward_s", "backward_s", "recompute_s", "input_gradient_s", "weight_gradient_s", "activation_s", "gradient_s",
    "optimizer_s",
)  # fmt: skip
"""The times of a stage, in the order in which arrays hold them."""

_NONE = -1


@dataclass(frozen=True)
class Paths:
    """The paths through the step of a problem's schedule; their counts are [S, times]."""

    problem: Problem

    def longest(self, times: Floats) -> Floats:
        """The counts of the longest path with these times of the stages, [S, times]; O(S M)."""
        flat, links = times.ravel(), self._links
        lasting = (links.of_actions @ flat)[links.actions].tolist()
        under_way = (links.of_transfers @ flat)[links.transfers].tolist()
        ends, comes_from = [0.0] * len(lasting), [_NONE] * len(lasting)
        for i, (before, need) in enumerate(zip(links.before, links.needs, strict=True)):
            start_s, place = (ends[before] if before >= 0 else 0.0), before
            if need >= 0 and ends[need] + under_way[need] > start_s:
                start_s, place = ends[need] + under_way[need], need
            ends[i], comes_from[i] = start_s + lasting[i], place
        done_s = [ends[last] + float(update @ flat) for last, update in zip(links.last, links.updates, strict=True)]
        return self._counts(int(np.argmax(done_s)), comes_from.__getitem__)

    def by_device(self) -> Floats:
        """[K, S, times]: for each device a path through all of its actions, and on to its optimizers."""
        links, devices = self._links, range(self.problem.num_devices)
        return np.array([self._counts(x, lambda i: _first(links.before[i], links.needs[i])) for x in devices])

    def by_device_and_back(self) -> Floats:
        """[K, S, times]: for each device a path through all of its actions, and on to the end of the first device."""
        links, found = self._links, []
        for device in range(self.problem.num_devices):
            on_device = {links.last[device]}

            def comes_from(i: int, on_device: set[int] = on_device) -> int:
                before, need = links.before[i], links.needs[i]
                if i not in on_device:
                    return _first(need, before)
                on_device.add(before)
                return _first(before, need)

            found.append(self._counts(0, comes_from))
        return np.array(found)

    def _counts(self, device: int, comes_from: Callable[[int], int]) -> Floats:
        """Of the path that ends with the optimizers of a device; `comes_from` goes back from one action to another."""
        links, actions, transfers = self._links, list[int](), list[int]()
        i = links.last[device]
        while i != _NONE:
            actions.append(links.actions[i])
            before, i = links.before[i], comes_from(i)
            if i not in (before, _NONE):
                transfers.append(links.transfers[i])
        counts = links.updates[device].copy()
        for passed, each in ((actions, links.of_actions), (transfers, links.of_transfers)):
            counts += np.bincount(np.array(passed, dtype=np.int64), minlength=len(each)) @ each
        return counts.reshape(self.problem.num_stages, len(TIMES))

    @cached_property
    def _links(self) -> _Links:
        problem, schedule = self.problem, self.problem.made_schedule
        num_microbatches, flow = problem.num_microbatches, execution_order(schedule)
        before, last = list[int](), [_NONE] * schedule.num_devices
        actions, transfers = _Kinds(problem.num_stages), _Kinds(problem.num_stages)
        for i, (action, device) in enumerate(zip(flow.actions, flow.devices, strict=True)):
            before.append(last[device])
            last[device] = i
            again = is_recomputed(action.microbatch, num_microbatches=num_microbatches, recompute=problem.recompute)
            actions.add((action.stage, action.kind, again), _lasting(action, again))
            transfers.add((action.stage, action.kind), _under_way(action))
        devices = flow.devices
        updates = [[(stage, "optimizer_s") for stage in stages] for stages in problem.stages_by_device]
        return _Links(
            before=before,
            needs=[x if x >= 0 and devices[x] != devices[i] else _NONE for i, x in enumerate(flow.dependencies)],
            last=last,
            actions=np.array(actions.found),
            transfers=np.array(transfers.found),
            of_actions=np.array(actions.counts),
            of_transfers=np.array(transfers.counts),
            updates=[_count(problem.num_stages, update) for update in updates],
        )


class _Links(NamedTuple):
    """The actions of a schedule by place in dependency order; places below 0: none."""

    before: list[int]  # on the same device
    needs: list[int]  # on another device
    last: list[int]  # of each device
    actions: Ints  # the kind of each action
    transfers: Ints  # the kind of what it sends
    of_actions: Floats  # [kinds, S times]: what an action of each kind takes
    of_transfers: Floats
    updates: list[Floats]  # [S times] of each device


class _Kinds:
    """Kinds as they are met, each with the times that it takes."""

    def __init__(self, num_stages: int) -> None:
        self.found, self.counts = list[int](), list[Floats]()
        self._num_stages, self._places = num_stages, dict[object, int]()

    def add(self, kind: object, times: Sequence[tuple[int, str]]) -> None:
        """One more."""
        if kind not in self._places:
            self._places[kind] = len(self.counts)
            self.counts.append(_count(self._num_stages, times))
        self.found.append(self._places[kind])


def _count(num_stages: int, times: Sequence[tuple[int, str]]) -> Floats:
    """[S times]: one of each of these."""
    counts = np.zeros((num_stages, len(TIMES)))
    for stage, name in times:
        counts[stage, TIMES.index(name)] = 1.0
    return counts.ravel()


def _lasting(action: Action, again: bool) -> list[tuple[int, str]]:
    """The times that an action takes, as in the simulator; `again` where the micro-batch is recomputed."""
    stage, kind = action.stage, action.kind
    if kind is ActionKind.FORWARD:
        return [(stage, "forward_s")]
    if kind is ActionKind.INPUT_GRADIENT and stage == 0:
        return []
    if kind is ActionKind.WEIGHT_GRADIENT and stage > 0:
        return [(stage, "weight_gradient_s")]
    name = "input_gradient_s" if kind is ActionKind.INPUT_GRADIENT else "backward_s"
    return [(stage, name), (stage, "recompute_s")] if again else [(stage, name)]


def _under_way(action: Action) -> list[tuple[int, str]]:
    """The time that its output takes to the stage that waits for it."""
    if action.kind is ActionKind.FORWARD:
        return [(action.stage, "activation_s")]
    return [(action.stage - 1, "gradient_s")] if action.kind in INPUT_GRADIENT_KINDS and action.stage > 0 else []


def _first(one: int, other: int) -> int:
    return one if one != _NONE else other
