"""Which solver is used, what is said where one is missing, and that a start is used and Ctrl-C stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import highspy
import pytest

from gplan.core.errors import UsageError
from gplan.partition import milp
from gplan.partition.batch_simulation import goal_s
from gplan.partition.milp import available_solver, smallest_by_milp
from gplan.partition.problem import Solution
from tests.partition.problems import make_problem

MANY = [1 + 7 * i % 13 for i in range(40)]


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    monkeypatch.setattr(milp, "is_available", lambda name: name not in missing)


def test_cbc_takes_over_where_highs_cannot_be_imported_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "HiGHS")
    solution = smallest_by_milp(make_problem([3, 1, 2, 2], num_stages=2))
    assert solution is not None
    assert (solution.cuts, solution.lower_bound_s) == ((2,), 12)
    assert solution.solver == "milp/CBC"
    assert solution.notes == ("highspy cannot be imported: the MILP was solved by CBC",)


def test_without_any_solver_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "HiGHS", "CBC")
    with pytest.raises(UsageError, match="pip install highspy"):
        smallest_by_milp(make_problem([1, 1], num_stages=2))


@pytest.mark.parametrize(("name", "words"), [("HiGHS", "pip install highspy"), ("CBC", r"pip install 'pulp\[cbc\]'")])
def test_a_solver_that_was_asked_for_is_not_replaced(monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    without(monkeypatch, name)
    with pytest.raises(UsageError, match=words):
        smallest_by_milp(make_problem([1, 1], num_stages=2), solver=name)


def test_a_solver_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no MILP solver 'luck'; expected one of HiGHS, CBC"):
        available_solver("luck")


def test_highs_is_taken_where_it_can_be_imported() -> None:
    assert available_solver(None) == "HiGHS"


def test_highs_begins_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(MANY[:16], num_stages=4, schedule="1f1b", minimize="step-time")
    stages = tuple(tuple(range(4 * k, 4 * k + 4)) for k in range(4))
    found: list[float] = []

    def run(highs: Any) -> None:
        highs.cbMipImprovingSolution += lambda event: found.append(event.data_out.objective_function_value)
        highs.run()

    monkeypatch.setattr(milp, "_run_until_interrupted", run)
    best = smallest_by_milp(problem, start=Solution(stages=stages, lower_bound_s=0.0, solver="by hand"))
    assert best is not None
    assert found[0] / found[-1] == pytest.approx(goal_s(problem, stages) / best.lower_bound_s)
    assert found[-1] < found[0]


STUBBORN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
from gplan.partition.milp import smallest_by_milp
from tests.partition.problems import make_problem
problem = make_problem([1 + 7 * i % 13 for i in range(60)], num_stages=12, num_microbatches=32, schedule="1f1b",
                       minimize="step-time")
print("ready", flush=True)
try:
    smallest_by_milp(problem)
except KeyboardInterrupt:
    print("stopped")
"""


def test_ctrl_c_stops_highs() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        later = threading.Timer(2.0, os.kill, [process.pid, signal.SIGINT])
        later.start()
        rest, _ = process.communicate(timeout=40)
    assert rest == "stopped\n"


def test_highs_has_what_ctrl_c_needs() -> None:
    assert all(hasattr(highspy.Highs, name) for name in ("startSolve", "wait", "cancelSolve", "HandleUserInterrupt"))
