"""Which widths of a machine's devices train a language model fastest: tensor, context, expert, pipeline, chunks and data.

The search is a branch and bound over the settings of `width_choices`:

1. Each setting gets a lower bound of its step in closed form (`width_bounds`).
2. In the order of what an even pipeline would take, settings whose bound is below the best step so far get the best of
   some even partitions (`even_cuts`), and then of moves of single layers.
3. The setting with the lowest bound is taken again and again, and its bound raised or its partition bettered: by a program
   over the blocks where these are equal, or of few kinds in turns, but for a few at the ends (`block_program`), else by the search of any partition (`solve`).

It ends when no bound is much below the best step, or the time is up. The smallest bound left proves the gap.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from gplan.core import Constraints, Plan, Profile
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.units import bytes_text, counted, percent_text
from gplan.cost.reserved_bytes import CONTEXT_BYTES, RESERVED_SHARE
from gplan.cost.stage_table import StageTable
from gplan.graph.down_sets import Ints
from gplan.interop.planning import ForReceiver
from gplan.interop.receivers import decoder_of, receiver_named
from gplan.interop.width_bounds import ChoiceBounds
from gplan.interop.width_choices import OPTIONS, Choice, WidthSpace
from gplan.partition.balance import problem_of
from gplan.partition.block_program import BlockProgram, Counted, equal_blocks
from gplan.partition.candidates import INFINITY
from gplan.partition.even_cuts import EvenCut, best_even_cut, bettered_cut, least_even_peak, priced_cut
from gplan.partition.plan_evaluation import price, with_reserved_memory
from gplan.partition.problem import Problem, Solution
from gplan.partition.solve import solve
from gplan.schedules.request import OptionNames, PipelineSetting, PlanRequest
from gplan.strategy_search.bounds import SettingBounds
from gplan_profiler.analytic.decoder_config import Widths
from gplan_profiler.analytic.decoder_profile import DecoderProfile
from gplan_profiler.analytic.trainers import MEGATRON, NANOTRON, layers_by_cost

T = TypeVar("T")
_GAPS = (0.02, 0.01, 0.005)  # all bounds are raised to within the first of the best step, then the second, the third
_EVEN_CUTS_SHARE = 0.6  # of the time, for even partitions
_BETTERED_SHARE = 0.7  # of the time, for even partitions and moves
_NUM_BETTERED = 40  # settings whose partitions are bettered by moves
_NUM_REPLAYED = 40  # settings at most that are replayed until one fits with what its allocators reserve
_REPLAYED_SHARE = 0.1  # of the time, after the search, for that
_MAX_ACTIONS = 120_000  # of a step: where there are more, partitions of unequal blocks are not searched
_TURNS_S = (0.3, 1.0, 3.0, 10.0, INFINITY)  # of a setting's program, which others have before it goes on
_TURN = 1.003  # times the next lowest bound: so far a program raises its own before another setting has its turn
_EVEN_MARGIN = 1.05  # times the best step: settings whose even pipeline would take longer get no even partition
_NUM_UNPLANNED = 10  # sets of widths without a partition that are named
_LARGER_NODES = (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""Numbers of nodes that are tried where a model does not fit, after 1, 2, 4, ... devices of one."""
_AS_FAST = 1.01
"""Times the fastest step: of settings up to this, the one with the fewest stages a device is chosen."""
_LAYOUT_OPTIONS = OptionNames(num_devices=OPTIONS["pipeline"], schedule="", granularity="")
_TRAINERS = {"nanotron": NANOTRON}  # whose kernels are not Megatron-LM's; others are priced as that
_NUM_TRIED = 16  # settings of each of these machines


def default_time_limit_s(num_devices: int) -> float:
    """How long a machine's widths are searched."""
    return 20.0 if num_devices <= 64 else 60.0 if num_devices <= 1024 else 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChoice:
    """A setting with its best known partition."""

    choice: Choice
    cut: EvenCut
    solver: str = "even-cuts"  # what found the partition

    @property
    def step_s(self) -> float:
        """Predicted."""
        return self.cut.step_s

    @property
    def peak_bytes(self) -> int:
        """The most that tensors take on one device."""
        return self.cut.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenWidths:
    """The fastest setting with its plan, and what is known of the others."""

    plan: Plan
    profile: Profile
    search: WidthSpace  # model, machine and trainer
    planned: tuple[PlannedChoice, ...]  # the chosen one, then the others, fastest first
    unplanned: tuple[tuple[Choice, float], ...] = ()  # widths without a partition: bounds in seconds, lowest first
    lower_bound_s: float  # of all settings
    ruled_out: Counter[str] = field(default_factory=Counter)  # how many settings, by the reason
    num_choices: int = 1
    is_cut_short: bool = False  # by the time limit, before the gap was small

    @property
    def best(self) -> PlannedChoice:
        """The chosen setting: the fastest, or one nearly as fast with fewer stages a device."""
        return self.planned[0]

    @property
    def gap(self) -> float:
        """The share of its step by which the chosen setting may be improved at most."""
        return max(0.0, 1 - self.lower_bound_s / self.best.step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthSearch(WidthSpace):
    """The search over these settings for one trainer."""

    name: str
    memory_bytes: int | None = None
    time_limit_s: float | None = None  # None: `default_time_limit_s`
    _profiles: dict[tuple[Widths, int], Profile] = field(default_factory=dict, repr=False, compare=False)
    _rules: list[ForReceiver] = field(default_factory=list, repr=False, compare=False)
    _tables: dict[tuple[Widths, int, int], StageTable] = field(default_factory=dict, repr=False, compare=False)

    @property
    def usable_bytes(self) -> int:
        """For tensors on a device."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return int(RESERVED_SHARE * ((self.hardware.memory_bytes or 10**15) - CONTEXT_BYTES))

    def profile_of(self, widths: Widths, size: int) -> Profile:
        """The computed profile of some widths, with micro-batches of `size` samples."""
        if (widths, size) not in self._profiles:
            trainer = _TRAINERS.get(self.receiver, MEGATRON)
            made = DecoderProfile(
                name=self.name, decoder=self.decoder, widths=widths, hardware=self.hardware, trainer=trainer,
                divides_state=widths.replicas == 1, receiver=receiver_named(self.receiver).title,
            )  # fmt: skip
            self._profiles[widths, size] = made.profile((size,))
        return self._profiles[widths, size]

    def request(self, choice: Choice) -> PlanRequest:
        """A setting as it is asked of the planner; raises UsageError for one that the trainer cannot run."""
        profile, replicas = self.profile_of(choice.widths, choice.microbatch_size), choice.widths.replicas
        if not self._rules:  # the same for all widths
            self._rules.append(ForReceiver.of(self.receiver, profile))
        (rules,) = self._rules
        counts: dict[str, Any] = {
            "schedule": rules.default_schedule(choice.num_chunks), "recompute": choice.recompute,
            "num_devices": choice.widths.pipeline, "num_microbatches": choice.num_microbatches,
        }  # fmt: skip
        rules.check(PipelineSetting(**counts))
        return PlanRequest(
            **counts, microbatch_size=choice.microbatch_size, num_replicas=replicas,
            sharding="optimizer" if replicas > 1 else "none", memory_bytes=self.usable_bytes, options=_LAYOUT_OPTIONS,
            constraints=self.own_cut(profile, choice.widths.pipeline) or rules.constraints_on(choice.widths.pipeline),
        )  # fmt: skip

    def problem(self, choice: Choice) -> Problem:
        """The partition of a setting; raises UsageError for one that the trainer cannot run."""
        key = choice.widths, choice.microbatch_size, choice.num_microbatches
        problem = problem_of(self.profile_of(*key[:2]), self.request(choice), self._tables.get(key))
        self._tables[key] = problem.costs  # the same for all numbers of stages, with and without recompute
        return problem

    def own_cut(self, profile: Profile, num_stages: int) -> Constraints | None:
        """The stages of a trainer that cuts layers itself; None for others; raises UsageError where a stage is empty."""
        if not _TRAINERS.get(self.receiver, MEGATRON).counts_blocks:
            return None
        counts = layers_by_cost(self.decoder, num_stages)
        if not all(counts):
            raise UsageError(f"{self.receiver} leaves a stage of {num_stages} without layers; take fewer (--pp)")
        ends = np.cumsum(counts)[:-1]
        return Constraints(cut_after=tuple(profile.layers[x].name for x in ends))

    def bounds_of(self, choice: Choice) -> ChoiceBounds:
        """The bounds of a setting in closed form; larger micro-batches are of no use where the state of weights does not fit."""
        bounds = ChoiceBounds(choice, self.profile_of(choice.widths, 1), self.usable_bytes)
        if choice.microbatch_size == 1 or bounds.device_state_bytes > self.usable_bytes:
            return bounds
        return replace(bounds, profile=self.profile_of(choice.widths, choice.microbatch_size))

    def even_cut(self, problem: Problem) -> EvenCut | None:
        """The best of some even partitions of a setting; None where none of them fits the memory."""
        if (given := self._own_ends(problem)) is not None:
            cut = priced_cut(problem, given)
            return cut if cut.peak_bytes <= self.usable_bytes else None
        parts = decoder_of([x.name for x in problem.costs.profile.layers], self.name)
        return best_even_cut(problem, parts.blocks, head=parts.head.start)

    def _own_ends(self, problem: Problem) -> Ints | None:
        """Where the stages end that the trainer cuts itself; None where it takes a cut."""
        names = [x.name for x in problem.costs.profile.layers]
        given = problem.constraints.cut_after
        return np.array([*(names.index(x) + 1 for x in given), len(names)]) if given else None

    def bettered_cut(self, problem: Problem, start: EvenCut | None, deadline_s: float) -> EvenCut | None:
        """A partition of a setting, or else an even one, bettered move by move; None where none was found to fit."""
        parts = decoder_of([x.name for x in problem.costs.profile.layers], self.name)
        return bettered_cut(problem, parts.blocks, head=parts.head.start, start=start, deadline_s=deadline_s)

    def run(self) -> ChosenWidths:
        """The fastest settings; raises UsageError where no counts fit, NoPlanError where no setting fits the memory."""
        limit_s = default_time_limit_s(self.num_devices) if self.time_limit_s is None else self.time_limit_s
        started_s = time.perf_counter()
        self.check()
        choices = list(self.choices())
        if not choices:
            raise UsageError(self.no_choice_text())
        state = _SearchState.of(self, choices, started_s)
        state.try_even_cuts(deadline_s=started_s + _EVEN_CUTS_SHARE * limit_s)
        state.better_cuts(deadline_s=started_s + _BETTERED_SHARE * limit_s)
        for gap in _GAPS:
            state.close_gap(gap, deadline_s=started_s + limit_s)
        if state.refused and not state.planned:
            raise UsageError(next(iter(state.refused)))
        if not state.planned:
            raise NoPlanError(self._nothing_fits_text(choices, deadline_s=time.perf_counter() + limit_s))
        state.try_fewer_chunks()
        return state.result(deadline_s=time.perf_counter() + _REPLAYED_SHARE * limit_s)

    def _least_peaks(self) -> Iterator[tuple[float, Choice]]:
        """What the fullest device holds at least with even partitions, for some settings that need least memory."""
        every = [x for x in self.choices() if x.num_chunks == 1 or self.fixed.get("num_chunks")]
        least = min(((x.recompute != "always", x.microbatch_size) for x in every), default=None)
        fewest = [x for x in every if (x.recompute != "always", x.microbatch_size) == least]
        for one in sorted(map(self.bounds_of, fewest), key=lambda x: x.device_state_bytes)[:_NUM_TRIED]:
            problem = self.problem(one.choice)
            parts = decoder_of([x.name for x in problem.costs.profile.layers], self.name)
            if (given := self._own_ends(problem)) is None:
                yield least_even_peak(problem, parts.blocks, head=parts.head.start), one.choice
            else:
                yield priced_cut(problem, given).peak_bytes, one.choice

    def _any_fits(self) -> bool:
        return any(peak <= self.usable_bytes for peak, _ in self._least_peaks())

    def _nothing_fits_text(self, choices: Sequence[Choice], *, deadline_s: float) -> str:
        """What the model needs at least, where nothing fits, and what has it: other dials, or a larger machine of that kind."""
        least_bytes = min(self.bounds_of(x).device_state_bytes for x in choices)
        peak, smallest = min(self._least_peaks(), key=lambda x: x[0], default=(INFINITY, ""))
        found = ""
        if peak < INFINITY:
            more = bytes_text(peak - self.usable_bytes)
            found = f"; the least found is {bytes_text(peak)} on the fullest device, {more} too much ({smallest})"
        memory = f", of its {bytes_text(self.hardware.memory_bytes)}" if self.hardware.memory_bytes else ""
        text = (
            f"{self.name} fits on no split of {counted(self.num_devices, 'device')} with {bytes_text(self.usable_bytes)} for tensors on "
            f"each{memory}{found}; weights, gradients and optimizer alone take {bytes_text(least_bytes)} a device"
        )
        given = [x for x, value in self.fixed.items() if value is not None]
        if given and replace(self, batch_size=self.num_devices, fixed={})._any_fits():
            return f"{text}; some split fits if {' and '.join(OPTIONS[x] for x in given)} {'are' if given[1:] else 'is'} left out"
        kept = {name: x for name, x in self.fixed.items() if name in ("tensor", "context", "expert")}
        whole = self.bounds_of(
            replace(choices[0], widths=Widths(sequence_length=self.sequence_length))
        ).device_state_bytes
        tried, per_node = 0, self.hardware.devices_per_node
        in_a_node = [1 << x for x in range(per_node.bit_length()) if 1 << x < per_node]
        for count in (*in_a_node, *(per_node * x for x in _LARGER_NODES)):
            if count > self.num_devices and count * self.usable_bytes >= whole:
                tried = count
                if replace(self, num_devices=count, batch_size=count, fixed=kept)._any_fits():
                    return f"{text}; the smallest machine of that kind that was found to fit has {counted(count, 'device')}"
                if time.perf_counter() > deadline_s:
                    break
        larger = f"; up to {tried} devices were tried" if tried else ""
        return f"{text}{larger}: take devices with more memory, or a smaller --sequence-length"


@dataclass(slots=True, kw_only=True)
class _SearchState:
    """What is known of each setting so far, by its index: a bound, a partition, a program that can go on."""

    search: WidthSearch
    bounds: Sequence[ChoiceBounds]
    bounds_s: list[float]  # no plan of the setting is faster
    started_s: float
    planned: dict[int, PlannedChoice] = field(default_factory=dict)
    blocks: dict[tuple[Widths, int], range | None] = field(default_factory=dict)  # that programs count
    programs: dict[int, BlockProgram] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)  # settings whose bounds no more time raises
    ruled_out: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # settings that the trainer cannot run, by the reason

    @classmethod
    def of(cls, search: WidthSearch, choices: Sequence[Choice], started_s: float) -> _SearchState:
        """With the bounds in closed form."""
        bounds = [search.bounds_of(x) for x in choices]
        state = cls(search=search, bounds=bounds, bounds_s=[x.step_s for x in bounds], started_s=started_s)
        num_large = state.bounds_s.count(INFINITY)
        state.ruled_out["too large for the memory, by a lower bound of what devices hold"] = num_large
        for i, x in enumerate(bounds):
            if x.step_s < INFINITY:
                state.possible(i, search.request)
        return state

    def possible(self, i: int, make: Callable[[Choice], T]) -> T | None:
        """What is made of a setting; None, and the reason kept, where the trainer cannot run it."""
        try:
            return make(self.bounds[i].choice)
        except UsageError as error:
            self.bounds_s[i] = INFINITY
            self.refused[str(error)] += 1
            return None

    @property
    def best_s(self) -> float:
        """The fastest step so far."""
        return min((x.step_s for x in self.planned.values()), default=INFINITY)

    def try_even_cuts(self, *, deadline_s: float) -> None:
        """Even partitions of the settings that may be the best, the most promising first."""
        even_s = [x.even_step_s for x in self.bounds]
        order = sorted(
            (i for i, x in enumerate(self.bounds_s) if x < INFINITY),
            key=lambda i: (not self.bounds[i].may_fit, even_s[i]),
        )
        for i in order:
            if self.planned and (time.perf_counter() > deadline_s or even_s[i] > self.best_s * _EVEN_MARGIN):
                break
            self._try_even_cut(i, below_s=self.best_s)

    def try_fewer_chunks(self) -> None:
        """Even partitions of the fastest setting with fewer stages a device, where those may be nearly as fast."""
        fastest = min(self.planned.values(), key=lambda x: x.step_s)
        for i, one in enumerate(self.bounds):
            has_fewer = one.choice.num_chunks < fastest.choice.num_chunks and i not in self.planned
            if has_fewer and replace(one.choice, num_chunks=fastest.choice.num_chunks) == fastest.choice:
                self._try_even_cut(i, below_s=_AS_FAST * fastest.step_s)

    def _try_even_cut(self, i: int, *, below_s: float) -> None:
        """An even partition of a setting, unless its bound is not below some step."""
        if self.bounds_s[i] >= below_s or (problem := self.possible(i, self.search.problem)) is None:
            return
        self.bounds_s[i] = max(self.bounds_s[i], SettingBounds(problem).within_s(self.search.usable_bytes))
        if self.bounds_s[i] < below_s and (cut := self.search.even_cut(problem)) is not None:
            self.planned[i] = PlannedChoice(choice=self.bounds[i].choice, cut=cut)

    def better_cuts(self, *, deadline_s: float) -> None:
        """Moves of single layers, for settings whose even pipelines promise more than the best step, best first."""
        even_s = [x.even_step_s for x in self.bounds]
        order = [i for i in sorted(range(len(even_s)), key=even_s.__getitem__) if self.bounds_s[i] < self.best_s]
        for i in order[:_NUM_BETTERED]:
            if time.perf_counter() > deadline_s or even_s[i] >= self.best_s:
                break
            if (problem := self.possible(i, self.search.problem)) is not None and not problem.constraints.cut_after:
                start = self.planned[i].cut if i in self.planned else None
                self._record(i, 0.0, self.search.bettered_cut(problem, start, deadline_s), "even-cuts/moves")

    def close_gap(self, gap: float, *, deadline_s: float) -> None:
        """Raise the lowest bounds, or better the best step, until they are within this share of each other.

        The bound of all is the lowest, but one setting whose program is hard must not take the time of all others.
        """
        spent_s = defaultdict[int, float](float)
        for turn_s in _TURNS_S:
            while (now_s := time.perf_counter()) < deadline_s:
                enough_s = self.best_s * (1 - gap) if self.planned else INFINITY
                lowest = sorted(
                    (x, i) for i, x in enumerate(self.bounds_s)
                    if x < enough_s and i not in self.finished and spent_s[i] < turn_s
                )[:2]  # fmt: skip
                if not lowest:
                    break
                i, until_s = lowest[0][1], _TURN * (lowest[1][0] if lowest[1:] else INFINITY)
                self._improve(i, gap, until_s=until_s, deadline_s=deadline_s, turn_s=turn_s)
                spent_s[i] += time.perf_counter() - now_s

    def _improve(self, i: int, gap: float, *, until_s: float, deadline_s: float, turn_s: float) -> None:
        """Better the partition of a setting, or raise its bound to `until_s`, in a turn that begins with its first rows."""
        if (problem := self.possible(i, self.search.problem)) is None:
            return
        key = self.bounds[i].choice.widths, self.bounds[i].choice.microbatch_size
        if key not in self.blocks:
            self.blocks[key] = equal_blocks(problem)
        if blocks := self.blocks[key]:
            program = self.programs.setdefault(i, BlockProgram(problem, blocks))
            program.begin(min(deadline_s, time.perf_counter() + turn_s))
            known = Counted(cut=None, step_s=self.best_s, lower_bound_s=self.bounds_s[i])
            end_s = min(deadline_s, time.perf_counter() + turn_s)
            counted_blocks = program.solve(known, enough=gap, deadline_s=end_s, until_s=until_s)
            self._record(i, counted_blocks.lower_bound_s, counted_blocks.cut, "block-program/HiGHS")
            if counted_blocks.is_final:
                self.finished.add(i)
        elif 2 * problem.num_stages * problem.num_microbatches > _MAX_ACTIONS:
            self.finished.add(i)
        else:
            start = None
            if i in self.planned:
                start = Solution(stages=self.planned[i].cut.stages(), lower_bound_s=0.0, solver="even cuts")
            begin_s = time.perf_counter()
            left_s = min(turn_s, deadline_s - begin_s)
            try:
                solution = solve(problem, start=start, time_limit_s=left_s, cutoff_s=self.best_s)
            except NoPlanError:  # not known in that time
                return
            finally:
                if time.perf_counter() < begin_s + left_s:
                    self.finished.add(i)
            if solution is None:
                self._record(i, INFINITY, None, "")
            else:
                ends = np.array([*solution.cuts, problem.num_layers])
                self._record(i, solution.lower_bound_s, priced_cut(problem, ends), solution.solver)

    def _record(self, i: int, bound_s: float, cut: EvenCut | None, solver: str) -> None:
        """Keep a bound, and a partition where it is better than the one that is known."""
        self.bounds_s[i] = max(self.bounds_s[i], bound_s)
        if bound_s == INFINITY:
            self.ruled_out["no partition fits the memory"] += 1
        if cut is not None and (i not in self.planned or cut.step_s < self.planned[i].step_s):
            self.planned[i] = PlannedChoice(choice=self.bounds[i].choice, cut=cut, solver=solver)

    def _ranked(self, deadline_s: float) -> tuple[list[int], Plan]:
        """The settings with a partition, the chosen one and then the fastest first, and the plan of the first one.

        Those are out whose devices need more than they have, with what their allocators reserve. If no other is found in
        time, the fastest stays, with a note. Where one with fewer stages a device is nearly as fast, it is chosen.
        """
        every = sorted(self.planned, key=lambda i: self.planned[i].step_s)
        limit = self.search.hardware.memory_bytes if self.search.memory_bytes is None else None
        fastest = self._plan_of(every[0], limit)
        for place, i in enumerate(every[:_NUM_REPLAYED]):
            plan = self._plan_of(i, limit) if place else fastest
            if limit is None or plan.device_total_bytes <= limit:
                self.ruled_out["its allocators reserve more than the memory"] += place
                return self._with_few_chunks(every[place:], plan, limit, deadline_s)
            if time.perf_counter() > deadline_s:
                break
        return every, fastest

    def _with_few_chunks(
        self, order: list[int], fastest: Plan, limit: int | None, deadline_s: float
    ) -> tuple[list[int], Plan]:
        """The settings with the one first that has the fewest stages a device of those nearly as fast, and its plan."""
        chunks = {i: self.planned[i].choice.num_chunks for i in order}
        longest_s = _AS_FAST * fastest.prediction.step_s
        near = [i for i in order if chunks[i] < chunks[order[0]] and self.planned[i].step_s <= longest_s]
        for i in sorted(near, key=chunks.__getitem__):
            if time.perf_counter() > deadline_s:
                break
            plan = self._plan_of(i, limit)
            if plan.prediction.step_s <= longest_s and (limit is None or plan.device_total_bytes <= limit):
                return [i, *(x for x in order if x != i)], plan
        return order, fastest

    def _plan_of(self, i: int, limit: int | None) -> Plan:
        """The plan of a setting that has a partition."""
        one = self.planned[i]
        own_bound_s, solver = min(one.step_s, self.bounds_s[i]), f"widths/{one.solver}"
        solution = Solution(stages=one.cut.stages(), lower_bound_s=own_bound_s, solver=solver)
        priced = price(self.search.problem(one.choice), solution, solve_s=time.perf_counter() - self.started_s)
        return with_reserved_memory(priced, self.bounds[i].profile, limit)

    def result(self, *, deadline_s: float) -> ChosenWidths:
        """The fastest settings with the plan of the first, the bound of all, and how the others were ruled out."""
        order, plan = self._ranked(deadline_s)
        best, profile = self.planned[order[0]], self.bounds[order[0]].profile
        best = replace(best, cut=replace(best.cut, step_s=plan.prediction.step_s))  # simulated with all micro-batches
        rest = sorted((x, i) for i, x in enumerate(self.bounds_s) if i not in self.planned and x < INFINITY)
        of_widths = {self.bounds[i].choice.widths: (self.bounds[i].choice, x) for x, i in reversed(rest)}
        with_cut = {self.bounds[i].choice.widths for i in order}
        unplanned = sorted((x for x in of_widths.values() if x[0].widths not in with_cut), key=lambda x: x[1])
        num_open = sum(x < best.step_s for x, _ in rest)
        self.ruled_out["slower than the first, by a lower bound of their step"] = len(rest) - num_open
        if self.refused:
            more = f"; and for {counted(len(self.refused) - 1, 'reason')} more" if len(self.refused) > 1 else ""
            self.ruled_out[f"not possible: {next(iter(self.refused))}{more}"] = self.refused.total()
        lower_bound_s = min(best.step_s, *self.bounds_s)
        gap = percent_text(1 - lower_bound_s / best.step_s)
        self.ruled_out[f"not planned: at most {gap} faster than the first, by a lower bound of their step"] = num_open
        return ChosenWidths(
            plan=plan, profile=profile, search=self.search, planned=(best, *(self.planned[i] for i in order[1:])),
            unplanned=tuple(unplanned[:_NUM_UNPLANNED]), lower_bound_s=lower_bound_s,
            ruled_out=+self.ruled_out, num_choices=len(self.bounds), is_cut_short=any(
                x < self.best_s * (1 - _GAPS[-1]) and i not in self.finished for i, x in enumerate(self.bounds_s)
            ),
        )  # fmt: skip
