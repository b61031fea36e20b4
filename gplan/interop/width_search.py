"""Which widths of a machine's devices train a language model fastest: tensor, context, expert, pipeline, chunks and data.

Every setting of `width_choices` is bounded from below by its seconds alone: with W of a micro-batch on all layers together,
K devices and M micro-batches, a step takes at least M W / K, and M times the smallest possible load of the device with the
largest, as blocks are whole; on one stage a device, with M >= 2 K, at least (M + K - 1) W / K, as a device that waits for
those before it at the start and the end waits as long for those behind it in between. Devices hold as many blocks as fit beside what these keep of micro-batches in flight, so that some may have to hold more. In the order of what an even pipeline would take, settings whose bound is below the best step so far get
the best of some even partitions (`even_cuts`). Then the settings with the lowest bounds are taken, and their bounds raised
or their partitions bettered, until no bound is much below the best step or the time is out: by a program over the blocks
where these are equal but for a few at the ends (`block_program`), else by the search of any partition. The smallest bound
left proves the gap.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gplan.core import Plan, Profile
from gplan.core.errors import NoPlanError, UsageError
from gplan.cost.reserved_bytes import CONTEXT_BYTES, RESERVED_SHARE, with_reserved
from gplan.graph.down_sets import Floats, Ints
from gplan.interop.planning import ForReceiver
from gplan.interop.receivers import RECEIVERS, decoder_of
from gplan.interop.width_choices import Choice, WidthSpace
from gplan.partition.balance import problem_of
from gplan.partition.block_program import BlockProgram, Counted, equal_blocks
from gplan.partition.even_cuts import EvenCut, best_even_cut, priced_cut
from gplan.partition.plan_evaluation import price
from gplan.partition.problem import Problem, Solution
from gplan.partition.solve import solve
from gplan.schedules.request import PlanRequest
from gplan.strategy_search.bounds import SettingBounds, least_in_flight
from gplan_profiler.analytic.decoder_config import Decoder, Widths
from gplan_profiler.analytic.decoder_profile import DecoderProfile
from gplan_profiler.analytic.hardware import Hardware

INFINITY = float("inf")
_GAPS = (0.02, 0.01, 0.005)  # to which all bounds are raised, one after the other
_EACH_S = 5.0  # of the search of any partition
_MOST_ACTIONS = 120_000  # of a step, up to which partitions are searched
_WORSE = 1.05  # times the best step: even pipelines that would take longer are not tried
_NUM_SHOWN = 10
_LARGER = (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256, 384, 512, 1024, 2048)  # times a node
_NUM_TRIED = 16  # settings of a larger machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A setting with a partition: its step, and the most that a device holds."""

    choice: Choice
    cut: EvenCut

    @property
    def step_s(self) -> float:
        """Predicted."""
        return self.cut.step_s

    @property
    def peak_bytes(self) -> int:
        """Of tensors on one device."""
        return self.cut.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Widest:
    """What a search found, fastest first, and the plan of the fastest."""

    plan: Plan
    profile: Profile
    receiver: str
    found: tuple[Found, ...]
    others: tuple[tuple[Choice, float], ...] = ()  # without a partition, with their bounds in seconds
    lower_bound_s: float
    ruled_out: Counter[str] = field(default_factory=Counter)
    num_choices: int = 1

    @property
    def exported(self) -> Plan:
        """The plan as a trainer counts it: replicas that have batches of their own, whose sharding is the trainer's."""
        replicas = self.found[0].choice.widths.data if RECEIVERS[self.receiver].replicas else 1
        return replace(self.plan, num_replicas=replicas, sharding="none")

    @property
    def gap(self) -> float:
        """By how much the fastest may be improved at most, as a share of its step."""
        return max(0.0, 1 - self.lower_bound_s / self.found[0].step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthSearch:
    """A model on a machine, for one trainer."""

    name: str
    decoder: Decoder
    hardware: Hardware
    num_devices: int
    batch_size: int
    sequence_length: int
    receiver: str
    memory_bytes: int | None = None
    time_limit_s: float | None = None  # None: by the number of devices
    fixed: dict[str, int | str | None] = field(default_factory=dict)  # dials that are given, by their names
    _profiles: dict[tuple[Widths, int], Profile] = field(default_factory=dict, repr=False, compare=False)

    @property
    def space(self) -> WidthSpace:
        """The settings."""
        return WidthSpace(
            decoder=self.decoder, hardware=self.hardware, num_devices=self.num_devices, batch_size=self.batch_size,
            sequence_length=self.sequence_length, fixed=self.fixed,
        )  # fmt: skip

    @property
    def usable_bytes(self) -> int:
        """For tensors on a device."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return int(RESERVED_SHARE * ((self.hardware.memory_bytes or 10**15) - CONTEXT_BYTES))

    @property
    def _limit_s(self) -> float:
        if self.time_limit_s is not None:
            return self.time_limit_s
        return 20.0 if self.num_devices <= 64 else 60.0 if self.num_devices <= 1024 else 120.0

    def profile_of(self, widths: Widths, size: int) -> Profile:
        """The computed profile of some widths."""
        if (widths, size) not in self._profiles:
            made = DecoderProfile(
                name=self.name, decoder=self.decoder, widths=widths, hardware=self.hardware, fuses_cross_entropy=True,
                divides_state=widths.replicas == 1,
            )  # fmt: skip
            self._profiles[widths, size] = made.profile((size,))
        return self._profiles[widths, size]

    def counts_of(self, choice: Choice) -> dict[str, Any]:
        """A setting as arguments of the planner."""
        replicas = choice.widths.replicas
        return {
            "num_devices": choice.widths.pipeline, "num_microbatches": choice.num_microbatches,
            "microbatch_size": choice.microbatch_size, "recompute": choice.recompute,
            "num_replicas": replicas, "sharding": "optimizer" if replicas > 1 else "none",
        }  # fmt: skip

    def problem(self, choice: Choice) -> Problem:
        """The partition of a setting; raises UsageError for one that the trainer cannot run."""
        profile = self.profile_of(choice.widths, choice.microbatch_size)
        rules, counts = ForReceiver.of(self.receiver, profile), self.counts_of(choice)
        schedule = rules.default_schedule if choice.num_chunks == 1 else f"interleaved-1f1b:{choice.num_chunks}"
        rules.check(schedule, **{x: counts[x] for x in ("num_devices", "num_microbatches", "recompute")})
        return problem_of(
            profile,
            PlanRequest(schedule=schedule, constraints=rules.constraints, memory_bytes=self.usable_bytes, **counts),
        )

    def bound_s(self, choice: Choice) -> float:
        """No plan of a setting is faster; infinite where its state alone needs too much memory."""
        devices, num = choice.widths.pipeline, choice.num_microbatches
        if self._least_bytes(choice) > devices * self.usable_bytes:
            return INFINITY
        seconds, num_blocks = self._seconds(choice), self.decoder.num_hidden_layers
        most = self._most_blocks(choice)
        if most.sum() < num_blocks:
            return INFINITY
        fullest = next(x for x in range(num_blocks + 1) if np.minimum(most, x).sum() >= num_blocks)
        load_s = max(_least_load_s(seconds, devices), fullest * min(seconds[1 : 1 + num_blocks]))
        waits = devices - 1 if choice.num_chunks == 1 and num >= 2 * devices else 0
        return max(sum(seconds) / devices * (num + waits), num * load_s)

    def even_s(self, choice: Choice) -> float:
        """What an even pipeline of a setting would take; an estimate, that proves nothing."""
        seconds, devices, num = self._seconds(choice), choice.widths.pipeline, choice.num_microbatches
        loop_s = max(sum(seconds) / devices, _least_load_s(seconds, devices))
        return loop_s * (num + (devices - 1) / choice.num_chunks)

    def _most_blocks(self, choice: Choice) -> Ints:
        """[K]: the most blocks for which each device has the memory, by their state and what they keep."""
        profile = self.profile_of(choice.widths, choice.microbatch_size)
        blocks = profile.layers[1 : 1 + self.decoder.num_hidden_layers]
        per_byte = profile.step.state_bytes / choice.widths.replicas / sum(x.gradient_bytes for x in profile.layers)
        state = min(x.weight_bytes + x.gradient_bytes * (1 + per_byte) for x in blocks)
        kept = self._times_kept(choice) * min(x.costs[0].stash_bytes - x.costs[0].output_bytes for x in blocks)
        return np.floor(self.usable_bytes / (state + kept)).astype(np.int64)

    def _least_bytes(self, choice: Choice) -> float:
        """What all devices hold together at least: the state, and the stash where the fewest copies of it are kept."""
        profile = self.profile_of(choice.widths, choice.microbatch_size)
        held = self._state_bytes(choice)
        left = float(sum(x.costs[0].stash_bytes - x.costs[0].output_bytes for x in profile.layers))
        for times in sorted(self._times_kept(choice)):
            kept = min(left, self.usable_bytes / times)
            held, left = held + kept * times, left - kept
        return held + left * float(max(self._times_kept(choice)))

    def _times_kept(self, choice: Choice) -> Floats:
        """[K]: of how many micro-batches each device keeps the stash of all its blocks at once, at least."""
        devices = choice.widths.pipeline
        if choice.recompute == "always":  # while a stage is recomputed, it keeps all of one micro-batch
            return np.full(devices, 1 / choice.num_chunks)
        schedule = "1f1b" if choice.num_chunks == 1 else "interleaved-1f1b"
        found = least_in_flight(schedule, devices, choice.num_microbatches)
        return np.ones(devices) if found is None else found

    def may_fit(self, choice: Choice) -> bool:
        """Whether an even pipeline fits, by a rough count of what its first device keeps; proves nothing."""
        profile = self.profile_of(choice.widths, choice.microbatch_size)
        devices, chunks = choice.widths.pipeline, choice.num_chunks
        times = float(self._times_kept(choice)[-1])
        if choice.recompute == "never" and chunks > 1:  # its forwards before the first backward
            times = min((chunks + 1) * devices - 1, choice.num_microbatches * chunks) / chunks
        held = self._state_bytes(choice) + times * sum(x.costs[0].stash_bytes for x in profile.layers)
        return held <= devices * self.usable_bytes

    def _state_bytes(self, choice: Choice) -> float:
        """Of the weights, gradients and optimizer of all stages, on one rank of each."""
        profile = self.profile_of(choice.widths, choice.microbatch_size)
        held = sum(x.weight_bytes + x.gradient_bytes for x in profile.layers)
        return held + profile.step.state_bytes / choice.widths.replicas

    def _seconds(self, choice: Choice) -> list[float]:
        """Of a micro-batch on each layer."""
        costs = [x.costs[0] for x in self.profile_of(choice.widths, choice.microbatch_size).layers]
        passes = 1 + (choice.recompute == "always")
        return [passes * x.forward.median_s + x.backward.median_s for x in costs]

    def run(self) -> Widest:
        """The fastest settings; raises UsageError where no counts fit, NoPlanError where no setting fits the memory."""
        deadline_s = time.perf_counter() + self._limit_s
        self.space.check()
        choices = list(self.space.choices())
        if not choices:
            raise UsageError(self.space.no_choice_text())
        state = _State.of(self, choices)
        state.cut_evenly(deadline_s=time.perf_counter() + 0.6 * self._limit_s)
        for gap in _GAPS:
            state.prove(gap, deadline_s=deadline_s)
        if not state.found:
            raise NoPlanError(self._nothing_text(choices))
        return state.result()

    def fits(self) -> bool:
        """Whether some of the settings that need least memory fit."""
        choices = [x for x in self.space.choices() if x.recompute == "always" and x.num_chunks == 1]
        choices = sorted(choices, key=lambda x: self._state_bytes(x) / x.widths.pipeline)[:_NUM_TRIED]
        problems = (self.problem(x) for x in choices if self.bound_s(x) < INFINITY)
        return any(self.even_cut(x) is not None for x in problems)

    def even_cut(self, problem: Problem) -> EvenCut | None:
        """The best of some even partitions of a setting; None where none of them fits the memory."""
        parts = decoder_of([x.name for x in problem.costs.profile.layers], self.name)
        return best_even_cut(problem, parts.blocks, head=parts.head.start)

    def _nothing_text(self, choices: Sequence[Choice]) -> str:
        """What the model needs at least, where nothing fits, and the smallest machine of that kind that has it."""
        fullest = min(choices, key=lambda x: self._state_bytes(x) / x.widths.pipeline)
        least = self._state_bytes(fullest) / fullest.widths.pipeline
        text = (
            f"{self.name} fits on no split of {self.num_devices} devices with {self.usable_bytes / 2**30:.0f} GiB for tensors; weights, "
            f"gradients and optimizer alone take {least / 2**30:.0f} GiB a device"
        )
        for nodes in _LARGER:
            count = nodes * self.hardware.devices_per_node
            if count > self.num_devices:
                larger = replace(
                    self, num_devices=count, batch_size=max(self.batch_size, count), fixed=self._fixed_widths
                )
                if larger.fits():
                    return f"{text}; the smallest machine of that kind that fits has {count} devices"
        return f"{text}; take devices with more memory, or a smaller --sequence-length"

    @property
    def _fixed_widths(self) -> dict[str, int | str | None]:
        """The dials that are given and can stay on a larger machine."""
        return {name: x for name, x in self.fixed.items() if name in ("tensor", "context", "expert")}


@dataclass(slots=True, kw_only=True)
class _State:
    """What is known of the settings so far."""

    search: WidthSearch
    choices: Sequence[Choice]
    bounds_s: list[float]
    found: dict[int, Found] = field(default_factory=dict)
    programs: dict[int, BlockProgram] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)  # no more time raises their bounds
    ruled_out: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, search: WidthSearch, choices: Sequence[Choice]) -> _State:
        """With the bounds in closed form."""
        bounds_s = [search.bound_s(x) for x in choices]
        state = cls(search=search, choices=choices, bounds_s=bounds_s)
        state.ruled_out["too large for the memory by what their blocks keep at least"] = bounds_s.count(INFINITY)
        return state

    @property
    def best_s(self) -> float:
        """The fastest step so far."""
        return min((x.step_s for x in self.found.values()), default=INFINITY)

    def cut_evenly(self, *, deadline_s: float) -> None:
        """Even partitions of the settings that may be the best, the most promising first."""
        order = sorted(
            (i for i, x in enumerate(self.bounds_s) if x < INFINITY),
            key=lambda i: (not self.search.may_fit(self.choices[i]), self.search.even_s(self.choices[i])),
        )
        for i in order:
            is_late = time.perf_counter() > deadline_s or self.search.even_s(self.choices[i]) > self.best_s * _WORSE
            if self.found and is_late:
                break
            if self.bounds_s[i] >= self.best_s:
                continue
            try:
                problem = self.search.problem(self.choices[i])
            except UsageError as error:
                self.bounds_s[i] = INFINITY
                self.ruled_out[str(error)[:80]] += 1
                continue
            self.bounds_s[i] = max(self.bounds_s[i], SettingBounds(problem).within_s(self.search.usable_bytes))
            if self.bounds_s[i] < self.best_s and (cut := self.search.even_cut(problem)) is not None:
                self.found[i] = Found(choice=self.choices[i], cut=cut)

    def prove(self, gap: float, *, deadline_s: float) -> None:
        """Raise the lowest bounds, or better the best step, until they are within this share of each other."""
        while time.perf_counter() < deadline_s:
            worth_s = self.best_s * (1 - gap) if self.found else INFINITY
            still_open = [i for i, x in enumerate(self.bounds_s) if x < worth_s and i not in self.finished]
            if not still_open:
                return
            self._look_at(min(still_open, key=self.bounds_s.__getitem__), gap, deadline_s)

    def _look_at(self, i: int, gap: float, deadline_s: float) -> None:
        """Better the partition of a setting, or raise its bound."""
        choice = self.choices[i]
        try:
            problem = self.search.problem(choice)
        except UsageError:
            self.bounds_s[i] = INFINITY
            return
        num_actions = 2 * problem.num_stages * problem.num_microbatches
        if num_actions > _MOST_ACTIONS:
            self.finished.add(i)
        elif blocks := equal_blocks(problem):
            program = self.programs.setdefault(i, BlockProgram(problem, blocks))
            known = Counted(ends=None, step_s=self.best_s, lower_bound_s=self.bounds_s[i])
            counted = program.solve(known, enough=gap, deadline_s=deadline_s)
            self._learn(i, problem, counted.lower_bound_s, counted.ends)
            if counted.lower_bound_s < min(self.best_s, counted.step_s) * (1 - gap):
                self.finished.add(i)
        else:
            self.finished.add(i)
            start = (
                Solution(stages=self.found[i].cut.stages(), lower_bound_s=0.0, solver="") if i in self.found else None
            )
            try:
                left_s = min(_EACH_S, deadline_s - time.perf_counter())
                solution = solve(problem, start=start, time_limit_s=left_s, cutoff_s=self.best_s)
            except NoPlanError:
                return
            ends = None if solution is None else np.array([*solution.cuts, problem.num_layers])
            self._learn(i, problem, INFINITY if solution is None else solution.lower_bound_s, ends)

    def _learn(self, i: int, problem: Problem, bound_s: float, ends: Any) -> None:
        """Keep a bound, and a partition where it is better."""
        self.bounds_s[i] = max(self.bounds_s[i], bound_s)
        if bound_s == INFINITY:
            self.ruled_out["no partition fits the memory"] += 1
        if ends is None:
            return
        cut = priced_cut(problem, ends)
        if i not in self.found or cut.step_s < self.found[i].step_s:
            self.found[i] = Found(choice=self.choices[i], cut=cut)

    def result(self) -> Widest:
        """The fastest settings with the plan of the first, the bound of all, and how the others were ruled out."""
        found = sorted(self.found.values(), key=lambda x: x.step_s)
        problem = self.search.problem(found[0].choice)
        bound_s = min(found[0].step_s, *self.bounds_s)
        own_bound_s = min(found[0].step_s, self.bounds_s[self.choices.index(found[0].choice)])
        solution = Solution(stages=found[0].cut.stages(), lower_bound_s=own_bound_s, solver="branch-and-bound")
        profile = self.search.profile_of(found[0].choice.widths, found[0].choice.microbatch_size)
        plan = with_reserved(price(problem, solution, solve_s=0.0), profile)
        others = [
            (self.choices[i], x)
            for i, x in sorted(enumerate(self.bounds_s), key=lambda pair: pair[1])
            if i not in self.found and x < INFINITY
        ]
        slower = [x for _, x in others if x >= found[0].step_s]
        self.ruled_out["slower than the best by their bounds"] = len(slower)
        self.ruled_out["not settled within the time, with the bounds above"] = len(others) - len(slower)
        return Widest(
            plan=plan, profile=profile, receiver=self.search.receiver, found=tuple(found),
            others=tuple(others[:_NUM_SHOWN]), lower_bound_s=bound_s, ruled_out=+self.ruled_out,
            num_choices=len(self.choices),
        )  # fmt: skip


def _least_load_s(seconds: Sequence[float], num_devices: int) -> float:
    """The smallest possible largest sum of a device, if its layers could be any ones: blocks are whole, and the ends are
    on two devices."""
    first, last, block = seconds[0], seconds[-1], min(seconds[1:-1])
    if num_devices == 1 or not block:
        return sum(seconds) / num_devices
    count = len(seconds) - 2
    loads = sorted({extra + i * block for extra in (first, last, 0.0) for i in range(count + 1)})

    def fits(load: float) -> bool:
        ends = [load - first, load - last, *[load] * (num_devices - 2)]
        return min(ends) >= 0 and sum(int(x / block + 1e-9) for x in ends) >= count

    return loads[bisect_left(loads, True, key=fits)]
