"""The best setting for a memory: the most promising first, until the bounds of all others rule them out.

A setting is first solved as if memory had no limit; a plan that fits all the same is the best of that setting, whatever
may be recomputed. Otherwise each way to recompute is solved under the limit. Every second time the setting with the
smallest bound is looked at instead of the one with the smallest guess, so that the proof grows with the plan. What is
known serves other limits too: less memory makes no plan better.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from gplan.balancer import solve
from gplan.balancer.largest import fits_memory
from gplan.balancer.price import Problem, Solution, laid_out, nothing_recomputed, price, stages_of, without_memory
from gplan.costs import Costs
from gplan.downsets import DownSets
from gplan.nouns import Plan, Profile, RecomputeMode, Wishes
from gplan.searcher.least import Least
from gplan.searcher.space import Setting, Space
from gplan.units import bytes_text, seconds_text

Progress = Callable[[str, float], None]

_ONE_SOLVE_S = 1.0
_ROUNDING = 1e-12
_FIRST_GUESS_S = 1e-4  # to solve one stage and micro-batch of a setting, until others have been timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A setting with what is recomputed; None: not settled yet, and solved without a limit."""

    setting: Setting
    recompute: RecomputeMode | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search within a memory came to; the costs are steps, or device seconds where that is sought."""

    plan: Plan | None
    lower_bound: float
    num_left: int  # ways that were neither solved nor ruled out
    interrupted: bool


@dataclass(slots=True, kw_only=True)
class _Open:
    """A way that may still lead to the best plan."""

    way: Way
    bound: float
    guess: float


@dataclass
class Engine:
    """Searches one space under one memory after the other, and keeps what it learns."""

    profile: Profile
    space: Space
    wishes: Wishes
    downsets: DownSets | None
    progress: Progress
    plans: list[Plan] = field(default_factory=list)  # every plan that was found to fit
    num_solved: int = 0
    _solved: dict[Way, dict[int | None, Plan | Solution | None]] = field(default_factory=dict)
    _cost_s: float = _FIRST_GUESS_S

    def best(self, memory_bytes: int | None, *, deadline_s: float, share: tuple[float, float]) -> Found:
        """The best plan within the memory, as far as the time allows; `share` is where progress begins and ends."""
        started_s = time.perf_counter()
        fitting = [x for x in self.plans if memory_bytes is None or x.peak_bytes <= memory_bytes]
        best = min(fitting, key=self.cost_of, default=None)
        left, skipped, num_steps, interrupted = self._all_open(memory_bytes), list[_Open](), 0, False
        lower = float("inf")
        try:
            while left and time.perf_counter() < deadline_s:
                worth = float("inf") if best is None else self.cost_of(best) * (1 - _ROUNDING)
                ruled_out = [x for x in left if x.bound >= worth]
                lower = min([lower, *(x.bound for x in ruled_out)])
                left = [x for x in left if x.bound < worth]
                if not left:
                    break
                one = min(left, key=lambda x: (x.bound, x.guess) if num_steps % 2 else (x.guess, x.bound))
                num_steps += 1
                self._report(one, best, started_s, deadline_s, share)
                if best is not None and self._seconds(one.way) > deadline_s - time.perf_counter():
                    left.remove(one)
                    skipped.append(one)
                    continue
                more, plan, proven = self._looked_at(one, memory_bytes, deadline_s)
                left.remove(one)
                left += more
                lower = min(lower, proven)
                if plan is not None and (best is None or self.cost_of(plan) < self.cost_of(best)):
                    best = plan
        except KeyboardInterrupt:
            if best is None:
                raise
            interrupted = True
        left += skipped
        lower = min([lower, *(x.bound for x in left)])
        worth = float("inf") if best is None else self.cost_of(best)
        num_left = sum(x.bound < worth for x in left)
        return Found(plan=best, lower_bound=min(lower, worth), num_left=num_left, interrupted=interrupted)
