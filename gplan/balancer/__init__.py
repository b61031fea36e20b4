"""Which layers go on which device: the provably best partition of a chain into K stages.

`solver="dp"` is exact: dynamic programs for `max-stage`, branch and bound with the simulator's own times for
`step-time`. `solver="milp"` solves the same problem as a mixed-integer program, as an independent check. Whatever
found the cuts, the plan is priced by the cost model and the simulator, and says how well it is proven.
"""

from __future__ import annotations

import time
from typing import cast

from gplan.balancer.branch import smallest_step
from gplan.balancer.largest import smallest_largest
from gplan.balancer.limits import no_plan_error
from gplan.balancer.price import Problem, Solution, price
from gplan.costs import Costs
from gplan.errors import UsageError
from gplan.nouns import OBJECTIVES, RECOMPUTE_MODES, Objective, Plan, Profile, RecomputeMode
from gplan.schedules import SCHEDULES

SOLVERS = ("dp", "milp")


def balance(
    profile: Profile,
    *,
    num_stages: int,
    num_microbatches: int,
    microbatch_size: int | None = None,
    schedule: str = "gpipe",
    recompute: str = "never",
    memory_bytes: int | None = None,
    minimize: str = "step-time",
    solver: str = "dp",
) -> Plan:
    """The best partition of the profile's layers into `num_stages` stages.

    The micro-batch size defaults to the largest that was profiled, the memory of each device to what the profile
    knows of it. `max-stage` is exact in O(K L W), ties included; `step-time` is exact too unless its time runs out
    (10 s), when `Plan.proof` has the gap that is left and a note says so.

    Raises UsageError for arguments that cannot be used, NoPlanError where no partition fits the memory.
    """
    _check_choice("schedule", schedule, tuple(SCHEDULES))
    _check_choice("recompute", recompute, RECOMPUTE_MODES)
    _check_choice("minimize", minimize, OBJECTIVES)
    _check_choice("solver", solver, SOLVERS)
    _check_counts(profile, num_stages=num_stages, num_microbatches=num_microbatches)
    size = profile.microbatch_sizes[-1] if microbatch_size is None else microbatch_size
    problem = Problem(
        costs=Costs(profile, size, num_microbatches, num_stages),
        num_stages=num_stages,
        schedule=schedule,
        recompute=cast(RecomputeMode, recompute),
        minimize=cast(Objective, minimize),
        memory_bytes=profile.device.memory_bytes if memory_bytes is None else memory_bytes,
    )
    if problem.memory_bytes is not None and problem.memory_bytes < 1:
        raise UsageError(f"the memory of each device is {problem.memory_bytes} bytes; expected at least 1")
    started_s = time.perf_counter()
    solution = solve(problem, solver=solver)
    if solution is None:
        raise no_plan_error(problem)
    return price(problem, solution, solve_s=time.perf_counter() - started_s)


def solve(problem: Problem, *, solver: str) -> Solution | None:
    """The best cuts by one of `SOLVERS`; None where no partition fits the memory."""
    if solver == "milp":
        from gplan.balancer.milp import smallest_by_milp  # PuLP takes longer to import than a plan to find

        return smallest_by_milp(problem)
    return smallest_largest(problem) if problem.minimize == "max-stage" else smallest_step(problem)


def _check_choice(name: str, found: str, choices: tuple[str, ...]) -> None:
    if found not in choices:
        raise UsageError(f"{name} {found!r} is not known; expected one of {', '.join(choices)}")


def _check_counts(profile: Profile, *, num_stages: int, num_microbatches: int) -> None:
    num_layers = len(profile.layers)
    if num_stages < 1:
        raise UsageError(f"asked for {num_stages} stages; expected 1 to {num_layers}, the number of layers")
    if num_stages > num_layers:
        raise UsageError(
            f"asked for {num_stages} stages of a model with {num_layers} layers; a stage holds at least one layer, so "
            f"try --k {num_layers} or fewer"
        )
    if num_microbatches < 1:
        raise UsageError(f"asked for {num_microbatches} micro-batches; expected at least 1")


__all__ = ["SOLVERS", "Problem", "balance", "solve"]
