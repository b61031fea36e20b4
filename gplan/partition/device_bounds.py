"""The least step of devices that hold several stages each, where most layers of a chain are alike: bounds over counts.

Layers that are alike make partitions that differ only in how many of them each stage holds. What a device takes and
holds is then a sum over its stages of tables by that number, so all ways to fill one device can be listed, whatever the
others hold:
    memory    at each moment of its order (`device_memory.py`), the parts of its stages
    seconds   of each path that comes to one of its actions from before, goes along its order, and leaves from another
              one for what follows; on the way through other stages the fewest layers count that can be there
A device can hold so many of the layers within a step T and its memory; a T for which these do not add up to all of them
is too short. Of layers that differ a little the least figures count, so the bound holds for any chain; it is good where
most of the time is in layers that are alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import comb
from typing import TypeAlias

import numpy as np

from gplan.core import ActionKind, Profile, StageSeconds
from gplan.cost.part_table import PARTS, rows_of
from gplan.cost.stage_bytes import MicrobatchTerms, microbatch_bytes
from gplan.cost.stage_costs import Costs, DeviceBoundaries
from gplan.cost.stage_seconds import ActionKey, action_s
from gplan.graph.down_sets import Floats, Ints
from gplan.partition.bounds import least_hops_s
from gplan.partition.device_memory import fullest_counts
from gplan.partition.device_paths import DevicePaths, device_paths
from gplan.partition.dp import INFINITY
from gplan.partition.problem import Problem, recomputed_share
from gplan.schedules.in_flight import chunk_warmup

_MOST_WAYS = 40_000  # to fill a device that are listed
_LEAST_ALIKE = 8  # layers from which the bounds are worth their time
_SLACK = 1e-9

SecondsOf: TypeAlias = Callable[[Ints, Ints], Floats]
"""Seconds of stages, given where they begin and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """Whether a stage is the first, and whether it is the last."""

    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class AlikeLayers:
    """Layers of a chain that are alike, without the first and the last: those whose least compute makes up the most."""

    costs: Costs

    @cached_property
    def index(self) -> Ints:
        """[N]: which layers these are, rising."""
        compute = self.costs.layer_compute_s[1:-1]
        if not len(compute):
            return np.zeros(0, dtype=np.int64)
        order = np.argsort(-compute, kind="stable")
        worth = compute[order] * np.arange(1, len(order) + 1)
        return np.sort(order[: int(worth.argmax()) + 1]) + 1

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def cuts(self) -> Ints:
        """Where the chain can be cut."""
        return np.arange(1, self.costs.num_positions - 1)

    @cached_property
    def usual_cuts(self) -> Ints:
        """Those of them that are between two of the layers; all where none is."""
        found = self.cuts[np.isin(self.cuts - 1, self.index) & np.isin(self.cuts, self.index)]
        return found if len(found) else self.cuts

    @cached_property
    def pass_through(self) -> tuple[Ints, Ints]:
        """[P] each: the most of what crosses a cut that may have crossed the one before it too: stages of one layer's."""
        first, end, _ = self.costs.downsets.covers
        most = np.zeros((2, self.costs.num_positions), dtype=np.int64)
        for row, num_bytes in zip(most, self.costs.pass_through.activation_bytes(first, end), strict=True):
            np.maximum.at(row, end, num_bytes)
        return most[0], most[1]

    @cached_property
    def layer_parts(self) -> Floats:
        """[parts, L]: what single layers add to the memory of their stage."""
        costs, layers = self.costs, self.costs.profile.layers
        gradient = np.array([x.gradient_bytes for x in layers], dtype=np.float64)
        stash = np.array([x.stash_bytes for x in costs.layer_costs])
        known = {
            "weight": np.array([x.weight_bytes for x in layers]),
            "gradient": gradient,
            "optimizer": costs.profile.step.state_bytes * updated_shares(costs.profile),
            "stash": stash,
            "recomputed_stash": stash,
            "pending": np.array([x.pending_bytes for x in costs.layer_costs]),
        }
        return np.array([known.get(name, 0 * gradient) for name in PARTS])

    def least_workspaces(self, kind: StageKind, boundaries: DeviceBoundaries, *, fewest: int) -> Floats:
        """[parts]: the least of each workspace over all stages of a kind with at least `fewest` of the layers; O(P^2).

        0 for the other parts, and all 0 in a chain that is not short.
        """
        costs, place = self.costs, (kind, boundaries, fewest)
        if not costs.is_short_chain:
            return np.zeros(len(PARTS))
        if place not in self._known_workspaces:
            last = costs.num_positions - 1
            starts = np.arange(1) if kind.is_first else np.arange(1, last)
            ends = np.arange(last, last + 1) if kind.is_last else np.arange(1, last)
            first, end = (x.ravel() for x in np.meshgrid(starts, ends, indexing="ij"))
            before = np.searchsorted(self.index, np.arange(costs.num_positions))
            there = (first < end) & (before[end] - before[first] >= fewest)
            found = np.zeros(len(PARTS))
            if there.any():
                rows = rows_of(costs.computed_parts(first[there], end[there], boundaries), (int(there.sum()),))
                found[_WORKSPACES] = rows[_WORKSPACES].min(axis=1)
            self._known_workspaces[place] = found
        return self._known_workspaces[place]

    @cached_property
    def _known_workspaces(self) -> dict[tuple[StageKind, DeviceBoundaries, int], Floats]:
        return {}

    @cached_property
    def lasting_sums(self) -> Floats:
        """[P]: the bytes that the layers before each position hold to the end of a step, whatever stage they are in."""
        return np.concatenate([[0.0], np.cumsum(_lasting(0) @ self.layer_parts)])


def _lasting(num_sent: int) -> Floats:
    """[parts]: how often each counts when the last backward is done, with so many activations sent."""
    return np.array([{"sent": num_sent, **_LASTING}.get(name, 0) for name in PARTS], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWays:
    """Ways to fill a device: how many of the layers each of its stages has, and what the step takes at least."""

    counts: Ints  # [W, stages]
    seconds: Floats  # [W]; infinite where they do not fit

    def least_by_total(self, most: int) -> Floats:
        """[most + 1]: the least seconds with so many layers on the device, or more."""
        least = np.full(most + 1, INFINITY)
        np.minimum.at(least, self.counts.sum(axis=1), self.seconds)
        found: Floats = np.minimum.accumulate(least[::-1])[::-1]
        return found


@dataclass(frozen=True)
class DeviceBounds:
    """Bounds over the partitions of a chain on equal devices, each of which holds one stage or several.

    Layers are not selected for recompute: with mode "selected" only `holds_all` is meant.
    """

    problem: Problem
    given_alike: AlikeLayers | None = None  # of the problem's costs, where they are shared by several bounds

    @property
    def holds_all(self) -> bool:
        """Whether the devices can hold all layers when the last backward is done, whatever is recomputed; O(S).

        Little may cross a cut that is not between two of the alike layers. There are few of these, and each is a cut of
        two devices, so only so many devices can have one.
        """
        problem = self.problem
        lasting = _lasting(problem.num_microbatches)
        each, totals = float(lasting @ self._alike_parts), list[tuple[int, int]]()
        for stages in problem.stages_by_device:
            limit = problem.memory_of(stages[0])
            if limit is None or not each:
                return True
            free, usually_free = (
                limit - sum(float(lasting @ self._parts(stage, usual=usual)) for stage in stages)
                for usual in (False, True)
            )
            if free < 0:
                return False
            totals.append((max(0, int(usually_free // each)), int(free // each)))
        num_unusual = problem.costs.num_positions - 2 - len(self._alike.usual_cuts)
        gains = sorted((most - usually for usually, most in totals), reverse=True)
        most_held = sum(usually for usually, _ in totals) + sum(gains[: 2 * num_unusual])
        return most_held >= len(self._alike)

    @staticmethod
    def apply_to(problem: Problem) -> bool:
        """Whether there are bounds for such a problem."""
        costs = problem.costs
        is_chain = costs.given_downsets is None and not problem.machine_devices and not problem.links
        is_even = len({len(stages) for stages in problem.stages_by_device}) == 1
        return is_chain and is_even and len(AlikeLayers(costs)) >= _LEAST_ALIKE

    @cached_property
    def quick_s(self) -> float:
        """A weaker bound, by the loads of devices and two moments of each: when all is done, and before all backwards."""
        problem, numbers = self.problem, np.arange(len(self._alike) + 1)
        costs, num, split = problem.costs, problem.num_microbatches, problem.splits_backward
        if not len(self._alike):
            return 0.0
        compute = costs.layer_least_compute_s if split else costs.layer_compute_s
        compute = compute + recomputed_share(problem) * self._layer_seconds["recompute_s"]
        alike_s, last_s = float(compute[self._alike.index].min()), float(compute[-1])
        update_s = float(self._optimizer_s[self._alike.index].min())
        tables = []
        for device, stages in enumerate(problem.stages_by_device):
            ends_s = float(compute[0]) * (0 in stages) + last_s * (problem.num_stages - 1 in stages)
            load_s = alike_s * numbers + ends_s + 2 * len(stages) * costs.overhead_s
            back_s = 0.0 if split else self._back_before_s[problem.recompute == "always"][stages[0]]
            after_s = np.maximum(update_s * numbers, back_s)
            seconds = self._forward_before_s[stages[0]] + num * load_s + after_s
            limit = problem.memory_of(stages[0])
            if limit is not None:
                held = self._quick_moments(device)
                fixed, each = (np.einsum("mki,ki->km", held, x) for x in self._own_parts(device))
                least = (fixed.sum(axis=0)[:, None] + each.min(axis=0)[:, None] * numbers).max(axis=0)
                seconds = np.where(least <= limit, seconds, INFINITY)
            tables.append(seconds)
        return _least_covering(tables, len(self._alike)) * (1 - _SLACK)

    def _quick_moments(self, device: int) -> Ints:
        """[moments, stages, parts]: when all backwards are done; without recompute also before the first one."""
        problem, num = self.problem, self.problem.num_microbatches
        there = {**_LASTING, "gradient": 0}
        found = [[{**_LASTING, "sent": num}] * self._num_own]
        warmup = chunk_warmup(problem.schedule, num_devices=problem.num_devices, num_microbatches=num, device=device)
        if problem.recompute == "never" and warmup is not None:
            found.append([{**there, "stash": count} for count in warmup])
        return np.array([[[x.get(name, 0) for name in PARTS] for x in moment] for moment in found])

    @cached_property
    def step_s(self) -> float:
        """A lower bound of the step of every partition that fits the memory; infinite where none fits."""
        num_alike, num_devices = len(self._alike), self.problem.num_devices
        most = min(num_alike, -(-num_alike // num_devices) + 1)
        while num_alike and comb(most + self._num_own, self._num_own) <= _MOST_WAYS:
            tables = [ways.least_by_total(most) for ways in self.ways(most)]
            beyond_s = self._beyond_s(tables, most)
            found = min(_least_covering(tables, num_alike), beyond_s)
            if found < beyond_s or beyond_s == INFINITY:
                return found * (1 - _SLACK)
            most = min(num_alike, most + max(1, most // 4))
        return 0.0

    def best_counts(self) -> Ints | None:
        """[S]: how many of the layers each stage has where the bound is least, each at least one; None where none fits."""
        num_alike, num_devices = len(self._alike), self.problem.num_devices
        most = min(num_alike, -(-num_alike // num_devices) + 2)
        if comb(most, self._num_own) > _MOST_WAYS or num_alike < self.problem.num_stages:
            return None
        ways = self.ways(most, fewest=1)
        tables = [x.least_by_total(most) for x in ways]
        within_s = _least_covering(tables, num_alike)
        if within_s == INFINITY:
            return None
        totals = np.array([np.searchsorted(table, within_s, side="right") - 1 for table in tables])
        while totals.sum() > num_alike:
            longest_s = [table[n] if n > self._num_own else 0.0 for n, table in zip(totals, tables, strict=True)]
            totals[int(np.argmax(longest_s))] -= 1
        counts = np.zeros(self.problem.num_stages, dtype=np.int64)
        for total, own, stages in zip(totals, ways, self.problem.stages_by_device, strict=True):
            there = np.flatnonzero((own.counts.sum(axis=1) == total) & (own.seconds <= within_s))
            unevenness = (own.counts[there] ** 2).sum(axis=1)
            counts[list(stages)] = own.counts[there[np.lexsort((own.seconds[there], unevenness))[0]]]
        return counts

    def ends_of_counts(self, counts: Ints) -> Ints:
        """[S]: where stages end that have so many of the layers, the others beside those that come after them."""
        ends = self._alike.index[np.cumsum(counts) - 1] + 1
        ends[-1] = self.problem.costs.num_layers
        return ends

    def ways(self, most: int, *, fewest: int = 0) -> list[DeviceWays]:
        """For each device all ways to fill it with at most so many of the layers, each stage with at least `fewest`."""
        counts, found = _compositions(most, self._num_own, fewest), list[DeviceWays]()
        for device, stages in enumerate(self.problem.stages_by_device):
            is_enough = (counts >= self._fewest[list(stages)]).all(axis=1)
            found.append(self._ways(device, counts[is_enough], most))
        return found

    @cached_property
    def _fewest(self) -> Ints:
        """[S]: of the layers that a stage has at least: one, where no other layers can fill it."""
        index, num_stages = self._alike.index, self.problem.num_stages
        stages = np.arange(num_stages)
        num_before, num_after = index[0], self.problem.costs.num_layers - 1 - index[-1]
        is_between = (stages >= num_before) & (num_stages - stages > num_after)
        return np.where(is_between & (index[-1] - index[0] == len(index) - 1), 1, 0)

    def _ways(self, device: int, counts: Ints, most: int) -> DeviceWays:
        stages = self.problem.stages_by_device[device]
        seconds = _summed(self._path_tables(device, most), counts).max(axis=0)
        limit, numbers = self.problem.memory_of(stages[0]), np.arange(most + 1)
        if limit is not None:
            fixed, each = self._fullest[device]
            tables = [one[:, None] + other[:, None] * numbers for one, other in zip(fixed, each, strict=True)]
            seconds = np.where(_summed(tables, counts).max(axis=0) <= limit, seconds, INFINITY)
        return DeviceWays(counts=counts, seconds=seconds)

    @cached_property
    def _fullest(self) -> list[tuple[Floats, Floats]]:
        """For each device [stages, moments] twice: what its stages hold at least beside alike layers, and for each one.

        At some of these moments the device holds most, wherever more of its layers are.
        """
        share = len(self._alike) / self.problem.num_stages
        uneven = 1 + 2 * np.eye(self._num_own)
        counts = share * np.vstack([np.ones(self._num_own), self._num_own * uneven / uneven.sum(axis=1, keepdims=True)])
        found = list[tuple[Floats, Floats]]()
        for device in range(self.problem.num_devices):
            fixed, each = self._own_parts(device)
            fixed = fixed + np.array([self._workspaces(stage) for stage in self.problem.stages_by_device[device]])
            held = fullest_counts(self.problem, device, [fixed + x[:, None] * each for x in counts])
            found.append((np.einsum("mki,ki->km", held, fixed), np.einsum("mki,ki->km", held, each)))
        return found

    def _own_parts(self, device: int) -> tuple[Floats, Floats]:
        """[stages, parts] each: what the memory of a device's stages is made of without alike layers, and for each one."""
        stages = self.problem.stages_by_device[device]
        return np.array([self._parts(stage) for stage in stages]), np.tile(self._alike_parts, (len(stages), 1))

    def _beyond_s(self, tables: Sequence[Floats], most: int) -> float:
        """What the step takes at least where a device has more of the layers than that."""
        return INFINITY if most == len(self._alike) else min(float(table[-1]) for table in tables)

    @cached_property
    def _alike(self) -> AlikeLayers:
        return self.given_alike or AlikeLayers(self.problem.costs)

    @property
    def _num_own(self) -> int:
        return len(self.problem.stages_by_device[0])

    def _path_tables(self, device: int, most: int) -> list[Floats]:
        """For each stage of a device, [paths, most + 1]: what it adds to each path with so many of the layers."""
        paths, beside_s = self._paths[device]
        tables = []
        for stage in self.problem.stages_by_device[device]:
            times, own = self._times(stage, most), [i for i, x in enumerate(paths.keys) if x.stage == stage]
            seconds = np.array([action_s(paths.keys[i], times) for i in own])
            tables.append(paths.counts[:, own] @ seconds + paths.is_end[:, None] * times.optimizer_s)
        tables[0] = tables[0] + beside_s[:, None]
        return tables

    @cached_property
    def _paths(self) -> list[tuple[DevicePaths, Floats]]:
        """The paths of each device, and what each takes at least on the devices before and after it, [paths]."""
        problem = self.problem
        every = device_paths(
            problem.schedule,
            num_devices=problem.num_devices,
            num_microbatches=problem.num_microbatches,
            recompute=problem.recompute,
        )
        found = list[tuple[DevicePaths, Floats]]()
        for paths in every:
            heads, tails = paths.pairs.T
            before_s, after_s = map(self._before_s, paths.heads), map(self._after_s, paths.tails)
            found.append((paths, np.array([*before_s])[heads] + np.array([*after_s, 0.0])[tails]))
        return found

    def _before_s(self, key: ActionKey) -> float:
        """What comes before an action of a device at least, on other devices."""
        if key.kind is ActionKind.FORWARD:
            return float(self._forward_before_s[key.stage])
        return float(self._forward_all_s + self._back_after_s[key.recomputes][key.stage])

    def _after_s(self, key: ActionKey) -> float:
        """What comes after an action of a device at least, on other devices."""
        if key.kind is ActionKind.FORWARD:
            return float(self._forward_after_s[key.stage] + self._back_all_s[key.recomputes])
        return float(self._back_before_s[key.recomputes][key.stage])

    def _times(self, stage: int, most: int) -> StageSeconds[Floats]:
        """[most + 1]: the least seconds of a stage with so many of the layers."""
        kind = self._kind(stage)
        place = kind, most
        if place not in self._known_times:
            overhead_s, numbers, nothing = self.problem.costs.overhead_s, np.arange(most + 1), np.zeros(most + 1)
            found = {
                name: x[self._alike.index].min() * numbers
                + x[0] * kind.is_first
                + x[-1] * kind.is_last
                + overhead_s * (name not in _ONCE)
                for name, x in self._layer_seconds.items()
            }
            self._known_times[place] = StageSeconds(**found, activation_s=nothing, gradient_s=nothing)
        return self._known_times[place]

    @cached_property
    def _known_times(self) -> dict[tuple[StageKind, int], StageSeconds[Floats]]:
        return {}

    @cached_property
    def _layer_seconds(self) -> dict[str, Floats]:
        """[L] each: seconds of single layers, by the names of `StageSeconds`."""
        costs, every = self.problem.costs, np.arange(self.problem.costs.num_layers)
        found = {
            "forward_s": costs.forward_s(every, every + 1),
            "backward_s": costs.backward_s(every, every + 1),
            "recompute_s": costs.least_recompute_s(every, every + 1),
            "optimizer_s": self._optimizer_s,
        }
        if self.problem.splits_backward:
            found["input_gradient_s"] = costs.input_gradient_s(every, every + 1)
            found["weight_gradient_s"] = costs.weight_gradient_s(every, every + 1)
        return found

    @property
    def _optimizer_s(self) -> Floats:
        """[L]: seconds of the update of the weights that only one layer has, without its fixed part and contention."""
        profile = self.problem.costs.profile
        amounts = np.array([x.update_amount for x in profile.layers])
        return profile.step.spread_s / profile.whole_update_amount * amounts

    def _parts(self, stage: int, *, usual: bool = False) -> Floats:
        """[parts]: the least of what the memory of a stage is made of, without its alike layers; between usual cuts."""
        kind = self._kind(stage)
        place = kind, self.problem.boundaries(stage), usual
        if place not in self._known_parts:
            ends = self._alike.layer_parts[:, 0] * kind.is_first + self._alike.layer_parts[:, -1] * kind.is_last
            self._known_parts[place] = ends + self._edges(stage, self._alike.usual_cuts if usual else self._alike.cuts)
        return self._known_parts[place]

    @cached_property
    def _known_parts(self) -> dict[tuple[StageKind, DeviceBoundaries, bool], Floats]:
        return {}

    @cached_property
    def _alike_parts(self) -> Floats:
        """[parts]: the least that one of the alike layers adds to the memory of its stage."""
        parts = self._alike.layer_parts[:, self._alike.index]
        least: Floats = parts.min(axis=1)
        stash, pending = PARTS.index("stash"), PARTS.index("pending")
        least[pending] = (parts[stash] + parts[pending]).min() - least[stash]  # together they are 0 or more
        return least

    def _workspaces(self, stage: int) -> Floats:
        """[parts]: the least workspaces of a stage."""
        boundaries, fewest = self.problem.boundaries(stage), int(self._fewest[stage])
        return self._alike.least_workspaces(self._kind(stage), boundaries, fewest=fewest)

    def _kind(self, stage: int) -> StageKind:
        return StageKind(is_first=stage == 0, is_last=stage == self.problem.num_stages - 1)

    def _edges(self, stage: int, cuts: Ints) -> Floats:
        """[parts]: between some cuts, what a stage holds of what crosses its cuts, at least, and of the loss; less what is rounded."""
        problem, costs, kind = self.problem, self.problem.costs, self._kind(stage)
        boundaries, is_last = problem.boundaries(stage), kind.is_last
        after = np.array([costs.num_positions - 1]) if is_last else cuts
        before = boundaries.before and not kind.is_first
        crossing = costs.crossing
        activation, gradient = (x[cuts].min() * before for x in (crossing.activation_bytes, crossing.gradient_bytes))
        passed, passed_unsaved = (x[after] * boundaries.before for x in self._alike.pass_through)
        held = microbatch_bytes(
            MicrobatchTerms(
                loss_stash=costs.loss.stash_bytes if costs.loss and is_last else 0,
                received_activation=activation,
                sent_gradient=0 if boundaries.returns and costs.profile.values else gradient,
                sent_activation=crossing.activation_bytes[after] * boundaries.after,
                received_gradient=crossing.gradient_bytes[after] * boundaries.after,
                output=crossing.kept_bytes[after],
                output_before_loss=0 * crossing.kept_bytes[after] if is_last else crossing.kept_bytes[after],
                output_unsaved=crossing.unsaved_bytes[after] - passed_unsaved,
                output_saved_later=crossing.saved_later_bytes[after],
                pass_through=passed,
                passing_sent=passed * boundaries.after,
            ),
            costs.transfers,
        )
        found = {name: int(np.min(getattr(held, name))) for name in _BY_MICROBATCH}
        found["pending"] += costs.loss.pending_bytes if costs.loss and is_last else 0
        found |= {"buffer": costs.num_buffers * int(np.min(held.received)), "optimizer": -1}
        return np.array([found.get(name, 0) for name in PARTS], dtype=np.float64)

    @cached_property
    def _forward_before_s(self) -> Floats:
        """[S]: what a forward takes at least to come to each stage."""
        return self._of_first(self.problem.costs.forward_s) + least_hops_s(self.problem)[0]

    @cached_property
    def _back_before_s(self) -> tuple[Floats, Floats]:
        """[S] each: what gradients take at least from each stage to the end of the first; kept, and recomputed."""
        kept_s = self._of_first(self.problem.awaited_backward_s) + least_hops_s(self.problem)[1]
        return kept_s, kept_s + self._of_first(self.problem.costs.least_recompute_s, overhead=False)

    @cached_property
    def _forward_after_s(self) -> Floats:
        """[S]: what a forward takes at least from the end of each stage to that of the last."""
        hops_s = least_hops_s(self.problem)[0]
        seconds: Floats = self._of_last(self.problem.costs.forward_s) + hops_s[-1] - hops_s
        return seconds

    @cached_property
    def _back_after_s(self) -> tuple[Floats, Floats]:
        """[S] each: what gradients take at least from the end of the last forward to each stage; kept, and recomputed."""
        hops_s = least_hops_s(self.problem)[1]
        kept_s = self._of_last(self.problem.awaited_backward_s) + hops_s[-1] - hops_s
        return kept_s, kept_s + self._of_last(self.problem.costs.least_recompute_s, overhead=False)

    @cached_property
    def _forward_all_s(self) -> float:
        """The way of a forward through all stages."""
        costs = self.problem.costs
        overheads_s = self.problem.num_stages * costs.overhead_s
        return float(costs.forward_s(*costs.all_layers)[0] + least_hops_s(self.problem)[0][-1]) + overheads_s

    @cached_property
    def _back_all_s(self) -> tuple[float, float]:
        """The way of gradients through all stages, at least; kept, and recomputed."""
        problem, costs = self.problem, self.problem.costs
        num_overheads = problem.num_stages - problem.splits_backward
        hops_s = float(least_hops_s(problem)[1][-1])
        kept_s = float(problem.awaited_backward_s(*costs.all_layers)[0]) + num_overheads * costs.overhead_s + hops_s
        return kept_s, kept_s + float(costs.least_recompute_s(*costs.all_layers)[0])

    def _of_first(self, seconds_of: SecondsOf, *, overhead: bool = True) -> Floats:
        """[S]: of as many layers at the beginning as there are stages before, with their overheads."""
        fewest = np.arange(self.problem.num_stages)
        seconds = seconds_of(np.zeros_like(fewest), fewest)
        found: Floats = seconds + overhead * fewest * self.problem.costs.overhead_s
        return found

    def _of_last(self, seconds_of: SecondsOf, *, overhead: bool = True) -> Floats:
        """[S]: of as many layers at the end as there are stages after, with their overheads."""
        size, fewest = self.problem.costs.num_positions, np.arange(self.problem.num_stages)[::-1]
        seconds = seconds_of(size - 1 - fewest, np.full_like(fewest, size - 1))
        found: Floats = seconds + overhead * fewest * self.problem.costs.overhead_s
        return found


def updated_shares(profile: Profile) -> Floats:
    """[L]: the share of the model's trained bytes that are a layer's own and that a replica updates."""
    shares: Floats = np.array([x.updated_bytes for x in profile.layers]) / (profile.trained_bytes or 1)
    return shares


_WORKSPACES = [i for i, name in enumerate(PARTS) if name.endswith("workspace")]
_LASTING = dict.fromkeys(("weight", "gradient", "optimizer", "buffer"), 1)
_BY_MICROBATCH = ("stash", "checkpoint", "recomputed_stash", "pending", "sent")
_ONCE = ("recompute_s", "optimizer_s")  # of `StageSeconds`, without the overhead of an action


def _summed(tables: Sequence[Floats], counts: Ints) -> Floats:
    """[rows, W]: the sum over the stages of what each adds with its count."""
    total = np.zeros((len(tables[0]), len(counts)))
    for i, table in enumerate(tables):
        total += table[:, counts[:, i]]
    return total


@lru_cache(maxsize=16)
def _compositions(most: int, num_stages: int, fewest: int) -> Ints:
    """[W, stages]: all counts of stages of at least `fewest` each, at most `most` together."""
    found = np.arange(fewest, most + 1)[:, None]
    for _ in range(num_stages - 1):
        left = np.arange(fewest, most + 1)
        longer = np.column_stack([np.repeat(found, len(left), axis=0), np.tile(left, len(found))])
        found = longer[longer.sum(axis=1) <= most]
    return found


def _least_covering(tables: Sequence[Floats], num_layers: int) -> float:
    """The least T within which devices hold so many layers together, given the least seconds of each by its number."""
    values = np.unique(np.concatenate(tables))
    values = values[np.isfinite(values)]

    def enough(seconds: float) -> bool:
        return sum(int(np.searchsorted(table, seconds, side="right")) - 1 for table in tables) >= num_layers

    if not len(values) or min(int(np.isfinite(table).sum()) for table in tables) == 0 or not enough(values[-1]):
        return INFINITY
    return float(values[bisect_left(values, True, 0, len(values) - 1, key=enough)])
