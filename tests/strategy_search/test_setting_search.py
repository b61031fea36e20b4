"""How a search shares its time and reports unsolved settings, with a fake solver and a fake clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from gplan.core import Plan, Profile
from gplan.core.errors import NoPlanError
from gplan.partition.problem import Problem, Solution
from gplan.partition.solve import solve
from gplan.strategy_search import setting_search
from gplan.strategy_search.planner import balance
from tests.made import make_profile
from tests.searching import search


@pytest.fixture(scope="module")
def chain() -> Profile:
    """Twelve different layers, with more stash than weights."""
    return make_profile([1.0 + i % 5 for i in range(12)], weight_bytes=10, stash_bytes=40, output_bytes=1)


@dataclass
class FakeSolver:
    """Records the problems it gets and answers with `answer`, using the whole time limit."""

    answer: Callable[[Problem, Solution | None], Solution | None]
    problems: list[Problem] = field(default_factory=list)
    starts: list[Solution | None] = field(default_factory=list)
    limits_s: list[float] = field(default_factory=list)
    clock_s: float = 0.0

    def solve(
        self, problem: Problem, *, start: Solution | None, time_limit_s: float, cutoff_s: float
    ) -> Solution | None:
        """As `gplan.partition.solve.solve`; a cutoff is not used."""
        self.problems.append(problem)
        self.starts.append(start)
        self.limits_s.append(time_limit_s)
        self.clock_s += time_limit_s
        return self.answer(problem, start)


def fake_solver(
    patched: pytest.MonkeyPatch, answer: Callable[[Problem, Solution | None], Solution | None]
) -> FakeSolver:
    """Replace the real solver and the clock, which only this solver advances."""
    solver = FakeSolver(answer)
    patched.setattr(setting_search, "solve", solver.solve)
    patched.setattr(time, "perf_counter", lambda: solver.clock_s)
    return solver


def searched(profile: Profile, *, memory_bytes: int | None = None, num_microbatches: int = 4) -> Plan:
    """The best plan of one setting, in 100 s."""
    return search(
        profile, num_devices=2, num_microbatches=num_microbatches, schedule="interleaved-1f1b:2",
        batch_size=num_microbatches, memory_bytes=memory_bytes, time_limit_s=100.0,
    )  # fmt: skip


def poor(problem: Problem, _start: Solution | None = None) -> Solution:
    """A bad partition without a useful bound."""
    last = problem.num_layers - 1
    stages = (tuple(range(last - 2)), (last - 2,), (last - 1,), (last,))
    return Solution(stages=stages, lower_bound_s=0.0, solver="poor")


@pytest.mark.slow
def test_single_problem_gets_all_the_time(monkeypatch: pytest.MonkeyPatch, chain: Profile) -> None:
    with monkeypatch.context() as patched:
        solver = fake_solver(patched, poor)
        searched(chain)
    without_limit = [x for x, problem in zip(solver.limits_s, solver.problems, strict=True) if not problem.memory_bytes]
    assert without_limit[:2] == pytest.approx([45.0, 22.5])  # of the 90 s for the best plan
    assert sum(without_limit) == pytest.approx(90.0, abs=1.0)


@pytest.mark.slow
def test_unproven_settings_are_continued(monkeypatch: pytest.MonkeyPatch, chain: Profile) -> None:
    best = balance(
        chain, num_devices=2, num_microbatches=4, microbatch_size=1, schedule="interleaved-1f1b:2", time_limit_s=60.0
    )
    with monkeypatch.context() as patched:
        solver = fake_solver(patched, lambda problem, start: poor(problem) if start is None else solve(problem))
        plan = searched(chain)
    assert solver.starts[1] == poor(solver.problems[1])
    assert plan.prediction.step_s == pytest.approx(best.prediction.step_s)


@pytest.mark.slow
def test_partitions_start_the_next_recompute_mode(monkeypatch: pytest.MonkeyPatch, chain: Profile) -> None:
    even = Solution(stages=((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)), lower_bound_s=0.0, solver="even")
    with monkeypatch.context() as patched:
        solver = fake_solver(patched, lambda problem, _: poor(problem) if problem.memory_bytes is None else even)
        plan = searched(
            chain, memory_bytes=500, num_microbatches=1
        )  # then except-last recomputes nothing, and is not ruled out
    limited = [x for x, problem in zip(solver.starts, solver.problems, strict=True) if problem.memory_bytes == 500]
    assert plan.recompute == "never"
    assert limited[0] is not None and limited[0].solver == "poor"  # which does not fit
    assert limited[1:] and all(start == even for start in limited[1:])


def test_one_setting_that_is_left_open_is_said_so(chain: Profile) -> None:
    with pytest.raises(NoPlanError, match=r"no plan was found in 1.00 µs; the one setting is still open; allow more"):
        search(chain, num_devices=2, num_microbatches=4, schedule="1f1b", batch_size=4, time_limit_s=1e-6)


def undecided(problem: Problem, _start: Solution | None) -> Solution:
    """No answer for problems with a memory limit."""
    if problem.memory_bytes is not None:
        raise NoPlanError("no time")
    return poor(problem)


def test_timeout_is_not_infeasibility(monkeypatch: pytest.MonkeyPatch, chain: Profile) -> None:
    with monkeypatch.context() as patched:
        fake_solver(patched, undecided)
        with pytest.raises(NoPlanError, match="the one setting is still open"):
            searched(chain, memory_bytes=700)


def test_unlimited_search_is_decided(monkeypatch: pytest.MonkeyPatch, chain: Profile) -> None:
    with monkeypatch.context() as patched:
        solver = fake_solver(patched, undecided)
        plan = searched(chain)
    assert any(problem.memory_bytes for problem in solver.problems)  # of the frontier
    assert not any("whether" in note for note in plan.notes)
