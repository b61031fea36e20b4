"""Which layers go on which device: the provably best partition of a model for K devices.

A device has one stage, or as many as the schedule has chunks. `solver="auto"` chooses by the model's graph: dynamic
programs and branch and bound are exact for chains and for graphs with few down-sets, a mixed-integer program serves
where they are many (`solve.py`). Whatever found the partition, the plan is priced by the cost model and the simulator,
and says how well it is proven.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from gplan.core import (
    OBJECTIVES,
    RECOMPUTE_MODES,
    Alternative,
    Constraints,
    Machine,
    Objective,
    Plan,
    Profile,
    RecomputeMode,
)
from gplan.core.errors import UsageError
from gplan.corrections import planned
from gplan.cost.stage_table import StageTable
from gplan.partition.diagnosis import no_plan_error
from gplan.partition.placement import Placed, best_placement
from gplan.partition.plan_evaluation import price
from gplan.partition.problem import Problem
from gplan.partition.solve import SOLVERS, TooManyDownSets, solve, with_down_sets
from gplan.partition.validation import (
    check_choice,
    check_constraints,
    check_counts,
    check_limits,
    check_recompute,
    check_sharding,
    check_split_backward,
)
from gplan.schedules.custom import is_custom_order
from gplan.schedules.registry import canonical, custom_counts, make_schedule, num_stages_of, schedule_info
from gplan.schedules.request import PlanRequest


def balance_fixed(profile: Profile, request: PlanRequest) -> Plan:
    """The best partition for a request without open dials.

    There is one stage for each device and chunk of the schedule. The micro-batch size defaults to the largest profiled one,
    the memory of each device to that of the profiled device. A machine also gets its stages placed on its devices. If
    constraints are given, `Plan.rivals` holds the best plan without them.

    `max-stage` is exact, ties included. `step-time`, and `max-stage` if devices hold several stages, are exact unless the
    time runs out (10 s, or `time_limit_s`): then `Plan.proof` has the remaining gap, and a note says so.

    Raises UsageError for arguments that cannot be used, NoPlanError where no partition fits the memory.
    """
    check_choice("solver", request.solver, SOLVERS)
    check_limits(memory_bytes=request.memory_bytes, time_limit_s=request.time_limit_s)
    machine, constraints = request.machine, request.constraints
    if request.memory_bytes is None and machine is None:
        request = replace(request, memory_bytes=profile.device.memory_bytes)
    problem = problem_of(profile, request)
    if machine is not None and problem.has_chunks:
        raise UsageError(
            f"{schedule_info(problem.schedule).title} has several stages on each device, and which of a machine's devices should hold "
            "which is not looked for; plan without --machine, or with a schedule that has one stage on each"
        )
    limits: Any = {"solver": request.solver, "time_limit_s": request.time_limit_s}

    smaller = smaller_microbatches(profile, problem)
    plan = best_plan(
        problem, machine, smaller=lambda: [problem_of(profile, replace(request, **x)) for x in smaller], **limits
    )
    if not constraints:
        return plan
    free = best_plan(replace(problem, constraints=Constraints()), machine, **limits)
    return replace(plan, rivals=(alternative_of(free, label="without constraints"),))


def problem_of(profile: Profile, request: PlanRequest, costs: StageTable | None = None) -> Problem:
    """What is to be balanced for a request without open dials; `memory_bytes` of None is no limit here.

    `costs` are those of a request that differs in the number of stages and in recompute alone.
    Raises UsageError for arguments that cannot be used.
    """
    num_devices, num_microbatches, schedule = request.num_devices, request.num_microbatches, request.schedule
    assert isinstance(num_devices, int) and isinstance(num_microbatches, int), "no dial is open"
    check_choice("recompute", request.recompute, RECOMPUTE_MODES)
    check_choice("minimize", request.minimize, OBJECTIVES)
    custom_counts(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    counts = {"num_devices": num_devices, "num_microbatches": num_microbatches, "num_replicas": request.num_replicas}
    check_counts(profile, schedule, **counts)
    check_recompute(schedule, request.recompute)
    check_sharding(schedule, request.sharding)
    num_stages = num_stages_of(schedule, num_devices)
    check_constraints(request.constraints, profile, num_stages=num_stages)
    replicas: Any = {"num_replicas": request.num_replicas, "sharding": request.sharding}
    if costs is None:
        plain = planned(profile, microbatch_size=request.microbatch_size, num_devices=num_devices, **replicas)
        costs = StageTable(plain, num_microbatches, **replicas)
    check_split_backward(schedule, has_halves=costs.sums.has_halves)
    return Problem(
        costs=costs,
        num_stages=num_stages,
        schedule=canonical(schedule),
        recompute=cast(RecomputeMode, request.recompute),
        minimize=cast(Objective, request.minimize),
        memory_bytes=request.memory_bytes,
        constraints=request.constraints,
        options=request.options,
    )


def smaller_microbatches(profile: Profile, problem: Problem) -> Iterator[dict[str, Any]]:
    """The dials of the same batch in micro-batches of each smaller profiled size; none for a custom order."""
    size = problem.costs.profile.microbatch_sizes[0]
    for x in () if is_custom_order(problem.schedule) else profile.microbatch_sizes:
        if x < size and size % x == 0:
            number = problem.num_microbatches * size // x
            with suppress(UsageError):  # there may be too many
                make_schedule(problem.schedule, num_devices=problem.num_devices, num_microbatches=number)
                yield {"microbatch_size": x, "num_microbatches": number}


def best_plan(
    problem: Problem,
    machine: Machine | None = None,
    *,
    solver: str = "auto",
    time_limit_s: float | None = None,
    smaller: Callable[[], Sequence[Problem]] = tuple,
) -> Plan:
    """The plan for a problem, on the best devices of a machine where one is given; errors as in `balance`.

    `smaller` gives the problems that an error may offer instead (`no_plan_error`).
    """
    started_s = time.perf_counter()
    solve_here = partial(solve, solver=solver, time_limit_s=time_limit_s)
    if machine is None:
        solution = solve_here(problem)
        placed = None if solution is None else Placed(problem=problem, solution=solution)
    else:
        try:  # placing asks for the down-sets again and again
            listed = with_down_sets(problem)
        except TooManyDownSets as error:
            raise UsageError(
                f"{problem.num_layers} layers with this many branches cannot be placed on a machine whose devices differ; "
                "plan without --machine, or profile with --granularity layer"
            ) from error
        placed = best_placement(listed, machine, solve_here, time_limit_s=time_limit_s)
    if placed is None:
        with suppress(TooManyDownSets):
            problem = with_down_sets(problem)
        raise no_plan_error(problem, machine, smaller=smaller)
    return price(placed.problem, placed.solution, solve_s=time.perf_counter() - started_s)


def alternative_of(plan: Plan, *, label: str = "") -> Alternative:
    """A plan in one line, to be compared with others."""
    return Alternative(
        label=label,
        num_stages=plan.num_stages,
        num_replicas=plan.num_replicas,
        num_microbatches=plan.num_microbatches,
        microbatch_size=plan.microbatch_size,
        schedule=plan.schedule,
        recompute=plan.recompute,
        sharding=plan.sharding,
        cuts=plan.cuts,
        step_s=plan.prediction.step_s,
        peak_bytes=plan.peak_bytes,
        bubble=plan.prediction.bubble,
    )
