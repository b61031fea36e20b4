"""The same problem as a mixed-integer linear program: an independent check of the other solvers, and for large graphs.

The binary y[v, k] says whether layer v is on a stage up to k. Where the candidate stages can be listed, a plan is a path of
K rows of the stage table. With r[k, i] whether candidate i is stage k, and z[k, p] whether it ends at position p,
    sum of the r[k, i] that end at p = z[k, p] = sum of the r[k+1, i] that begin at p;    y[v, k] = sum of z[k, p], v before p
Seconds and bytes are sums over the rows: exact. Stages that exceed the memory of their device have no row.

For larger graphs y[u, k] >= y[v, k] where layer u comes before v, and the program has the part of the costs that is linear
in y: without workspaces, the latency of links, outputs kept because they were sent, and what replicas and tied weights add.

Every plan found is priced by the cost model. One that does not fit, or costs more than the program says, is excluded
and the program solved again, until no better one is left or the time is over. So the bound is always valid.

HiGHS runs in process, CBC as a program of its own. After a time limit PuLP calls any answer optimal; only `sol_status`
shows whether it is. PuLP's HiGHS ignores a warm start, so the start is set on the solver itself, which runs in a thread
that Ctrl-C can stop. HiGHS runs without its presolve: that takes up to twice the time, but 1.14.0 (HiGHS issues 3043,
3073, 3094) and 1.15.1 (a test has it) call plans optimal that are not.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pulp

from gplan.core import Constraints, StageSeconds, ValueCost
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.units import seconds_text
from gplan.cost.layer_sums import SecondsOf
from gplan.cost.part_table import PARTS
from gplan.graph.boundary import values_of
from gplan.graph.layer_graph import LayerGraph
from gplan.partition.batch_simulation import goal_s, window_program
from gplan.partition.candidates import CandidateLimit, Candidates, TooManyCandidates, candidates_within
from gplan.partition.minimax import least_load_s
from gplan.partition.plan_evaluation import fits_memory, load_s
from gplan.partition.problem import Problem, Solution, moments_of

Expression: TypeAlias = Any  # a number, variable or linear expression of PuLP, which has no types
SolverName = Literal["HiGHS", "CBC"]
Start = Mapping[Expression, int]  # values of the binaries of a known plan; empty: none

_ROUNDING = 1e-9  # by which a row of numbers alone may be missed
_POLL_S = 0.2  # how often Ctrl-C is looked for; the end of a solve is noticed at once
_MISSING = {
    "HiGHS": "the MILP was to be solved by HiGHS, but highspy cannot be imported; pip install highspy, or take CBC",
    "CBC": "the MILP was to be solved by CBC, but PuLP has no CBC here; pip install 'pulp[cbc]', or take HiGHS",
    None: "the MILP needs HiGHS or CBC and neither can be imported; pip install highspy",
}


class LinearProgram:
    """What is to be minimised, `goal`, under rows that are added one by one."""

    def __init__(self) -> None:
        self.lp = pulp.LpProblem("gplan", pulp.LpMinimize)
        self.is_contradictory = False  # a row of numbers alone does not hold
        self._names = set[str]()
        self.goal = self.variable("goal")
        self.lp += self.goal

    def limit_goal(self, high: float) -> None:
        """Look for nothing worse than this."""
        self.goal.upBound = high

    def variable(self, name: str, *, high: float | None = None, is_binary: bool = False) -> Expression:
        """A new variable from 0 to `high`; CBC refuses a program in which two have one name."""
        assert name not in self._names, f"there are two variables {name}"
        self._names.add(name)
        kind = pulp.LpBinary if is_binary else pulp.LpContinuous
        return self.lp.add_variable(name, 0, 1 if is_binary else high, kind)

    def at_least(self, name: str, values: Iterable[Expression], *, high: float | None = None) -> Expression:
        """A new variable that is at least 0 and each of these."""
        variable = self.variable(name, high=high)
        for value in values:
            self.require(variable, at_least=value)
        return variable

    def require(self, larger: Expression, *, at_least: Expression) -> None:
        """A row: the one is at least the other."""
        difference = weighted([(1.0, larger), (-1.0, at_least)])
        if isinstance(difference, float):
            self.is_contradictory |= difference < -_ROUNDING
        else:
            self.lp += difference >= 0

    def require_equal(self, one: Expression, other: Expression) -> None:
        """Both are the same."""
        self.require(one, at_least=other)
        self.require(other, at_least=one)


def weighted(terms: Iterable[tuple[float, Expression]]) -> Expression:
    """The sum of factor times expression; a float where no variable is left.

    >>> weighted([(2.0, 3), (1.0, 0.5)])
    6.5
    """
    factors: defaultdict[Any, float] = defaultdict(float)
    constant = 0.0
    for factor, term in terms:
        if isinstance(term, pulp.LpVariable):
            factors[term] += factor
        elif isinstance(term, pulp.LpAffineExpression):
            constant += factor * term.constant
            for variable, times in term.items():
                factors[variable] += factor * times
        else:
            constant += float(factor) * float(term)
    left = {variable: float(factor) for variable, factor in factors.items() if factor}
    return pulp.LpAffineExpression(left, constant=constant) if left else constant


def total(terms: Iterable[Expression]) -> Expression:
    """The sum of some expressions."""
    return weighted((1.0, term) for term in terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverResult:
    """How a solver ended; the values it found are in the program's variables."""

    is_infeasible: bool
    has_values: bool
    is_proven: bool
    bound: float  # of the goal, in units; 0 where the solver does not say


def available_solver(requested: SolverName | None) -> SolverName:
    """The solver to use: the one asked for, else HiGHS, else CBC.

    Raises UsageError where it, or any, cannot be used.
    """
    names: tuple[SolverName, ...] = get_args(SolverName)
    if requested not in (None, *names):
        raise UsageError(f"there is no MILP solver {requested!r}; expected one of {', '.join(names)}")
    for name in names if requested is None else (requested,):
        if is_available(name):
            return name
    raise UsageError(_MISSING[requested])


def is_available(name: SolverName) -> bool:
    """Whether the solver can be used here."""
    return bool((pulp.HiGHS(msg=False) if name == "HiGHS" else _cbc()).available())


def run_solver(program: LinearProgram, name: SolverName, *, start: Start, time_limit_s: float) -> SolverResult:
    """Solve a program; Ctrl-C stops the solver and is passed on."""
    if program.is_contradictory:
        return SolverResult(is_infeasible=True, has_values=False, is_proven=True, bound=0.0)
    run = _run_highs if name == "HiGHS" else _run_cbc
    run(program, start, time_limit_s)
    status, is_optimal = program.lp.sol_status, program.lp.sol_status == pulp.LpSolutionOptimal
    bound = program.lp.solverModel.getInfo().mip_dual_bound if name == "HiGHS" else 0.0
    return SolverResult(
        is_infeasible=program.lp.status == pulp.LpStatusInfeasible,
        has_values=is_optimal or status == pulp.LpSolutionIntegerFeasible,
        is_proven=is_optimal,
        bound=float(pulp.value(program.goal)) if is_optimal else max(0.0, bound),
    )


def _run_highs(program: LinearProgram, start: Start, time_limit_s: float) -> None:
    def run(lp: Any) -> None:
        if start:
            columns = np.array([variable.index for variable in start], dtype=np.int32)
            lp.solverModel.setSolution(len(start), columns, np.array(list(start.values()), dtype=np.float64))
        _run_until_interrupted(lp.solverModel)

    solver = pulp.HiGHS(msg=False, gapRel=0.0, gapAbs=0.0, timeLimit=time_limit_s, presolve="off")
    solver.callSolver = run
    program.lp.solve(solver)


def _run_until_interrupted(highs: Any) -> None:
    highs.HandleUserInterrupt = True
    highs.startSolve()
    try:
        while not highs.wait(_POLL_S)[0]:
            pass
    except KeyboardInterrupt:
        highs.cancelSolve()
        highs.wait()
        raise


def _run_cbc(program: LinearProgram, start: Start, time_limit_s: float) -> None:
    for variable, value in start.items():
        variable.setInitialValue(value)
    with tempfile.TemporaryDirectory() as folder:
        solver = _cbc(gapRel=0.0, timeLimit=time_limit_s, warmStart=bool(start))
        solver.tmpDir = folder
        program.lp.solve(solver)


def _cbc(**options: Any) -> Any:
    """PuLP's own CBC, or the one that is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        bundled = pulp.PULP_CBC_CMD(msg=False, **options)
    return bundled if bundled.available() else pulp.COIN_CMD(msg=False, **options)


Stages = tuple[tuple[int, ...], ...]

MOST_ROWS = 50_000
"""Candidate stages in one program; where there are more, it has the linear part of the costs only."""

_SCALE = 1000.0  # about what the objective is, in the program's unit of time, for a solver's absolute tolerances
_SLACK = 1 + 1e-9  # by which a known plan's objective may be off in the program
_AGREES = 1 + 1e-5  # by which the program's objective and the cost model's may differ


def smallest_by_milp(
    problem: Problem, *, start: Solution | None = None, solver: SolverName | None = None, time_limit_s: float = 60.0
) -> Solution | None:
    """The partition with the smallest objective; None where it is proven that there is none.

    Only plans no worse than `start` are looked for, if there is one; without a solver's name HiGHS is taken, or CBC where
    it cannot be imported. When the time is over the best plan so far comes with the bound that is proven, and a note.

    Raises UsageError for a time limit of 0, a solver that is not there and recompute "selected"; NoPlanError where the
    time was over before any plan was found.
    """
    if not time_limit_s > 0:
        raise UsageError(f"the MILP was given {time_limit_s:g} s; expected more than 0")
    if problem.recompute == "selected":
        raise UsageError(
            "the MILP does not choose layers to recompute; expected recompute never, always or except-last"
        )
    name, until_s, limit = available_solver(solver), time.monotonic() + time_limit_s, seconds_text(time_limit_s)
    notes = ("highspy cannot be imported: the MILP was solved by CBC",) if name == "CBC" and solver is None else ()
    best, best_s = start, goal_s(problem, start.stages) if start else float("inf")
    least_s = least_load_s(problem) * (problem.num_microbatches if problem.minimize == "step-time" else 1)
    made, bound_s = _formulation(problem, best_s * _SLACK, unit_s=least_s / _SCALE or 1.0), 0.0
    while made is not None and bound_s * _AGREES < best_s:
        known, left_s = made.values_for(best.stages) if best else {}, until_s - time.monotonic()
        if best is not None:
            made.program.limit_goal(best_s / made.unit_s * _SLACK)
        outcome = run_solver(made.program, name, start=known, time_limit_s=max(1e-3, left_s))
        if outcome.is_infeasible:
            break
        bound_s = max(bound_s, outcome.bound * made.unit_s)
        stages = made.stages_found() if outcome.has_values else None
        if stages is not None and fits_memory(problem, stages):
            found_s = goal_s(problem, stages)
            assert not outcome.is_proven or bound_s <= found_s * _AGREES, f"the MILP says {bound_s}, the plan {found_s}"
            if found_s < best_s:
                best, best_s = Solution(stages=stages, lower_bound_s=0.0, solver=f"milp/{name}"), found_s
        if stages is None or not outcome.is_proven:
            if best is None:
                raise NoPlanError(
                    f"in {limit} the MILP found no plan, nor that there is none; "
                    "give it more time, or its devices more memory"
                )
            notes = (*notes, f"the MILP was stopped after {limit}")
            return replace(best, lower_bound_s=min(best_s, max(least_s, bound_s)), notes=notes)
        values = made.values_for(stages).items()
        made.program.require(total(weighted([(1, 1), (-1, y)]) if one else y for y, one in values), at_least=1)
    return best and replace(best, lower_bound_s=best_s, solver=f"milp/{name}", notes=notes)


def _formulation(problem: Problem, most_s: float, *, unit_s: float) -> _Formulation | None:
    """The program for plans up to an objective; None where there are none."""
    in_order = pairwise(range(problem.num_layers)) if problem.constraints.profile_order else ()
    graph = LayerGraph(problem.num_layers, (*problem.costs.profile.precedence, *in_order))
    if graph.is_chain or problem.costs.given_downsets is not None:
        by_load = problem.minimize != "step-time"
        most = [most_s if by_load else most_s / problem.num_microbatches] * problem.num_stages
        try:
            found = candidates_within(problem, CandidateLimit(by_load=by_load, most_s=most), most=MOST_ROWS)
            return None if found is None else _StagePath(problem, unit_s, found)
        except TooManyCandidates:
            pass
    return _LinearPart(problem, unit_s, graph)


class _Formulation:
    """A program with the choices y, to be completed."""

    def __init__(self, problem: Problem, unit_s: float) -> None:
        self.program, self.unit_s, self.problem = LinearProgram(), unit_s, problem
        self.layers, self.stages = range(problem.num_layers), range(problem.num_stages)
        self.y = {
            (v, k): self.program.variable(f"y_{v}_{k}", is_binary=True) for k in self.stages[:-1] for v in self.layers
        }

    def values_for(self, stages: Stages) -> Start:
        """The values of the binaries for these stages."""
        stage_of = {v: k for k, layers in enumerate(stages) for v in layers}
        return {y: int(stage_of[v] <= k) for (v, k), y in self.y.items()}

    def stages_found(self) -> Stages:
        """The stages that a solver has found."""
        stage_of = [sum(self.y[v, k].value() < 0.5 for k in self.stages[:-1]) for v in self.layers]
        return tuple(tuple(v for v in self.layers if stage_of[v] == k) for k in self.stages)

    def add_goal(self, seconds: Sequence[StageSeconds[Any]], *, most_update: float = 0.0) -> None:
        """The goal is at least what the problem minimises, given the seconds of every stage, in units."""
        problem, program, goal = self.problem, self.program, self.program.goal
        times = [
            StageSeconds(**{x: program.at_least(f"{x}_{k}", [each]) for x, each in some.present.items()})
            for k, some in enumerate(seconds)
        ]
        if problem.minimize != "step-time":
            loads = [load_s(problem, k, x, times[k - 1].activation_s if k else 0.0) for k, x in enumerate(times)]
            for stages in problem.stages_by_device:
                program.require(goal, at_least=total(loads[k] for k in stages))
            return
        actions = window_program(problem, 0, self.stages[-1])
        durations, hops = actions.durations_s(times), actions.hops_s(times)
        free: list[Expression] = [0.0] * problem.num_devices
        arrivals, sent = dict[int, Expression](), dict[int, Expression]()
        for i, (device, need, duration, hop, link) in enumerate(actions.entries):  # as in `kernel.action_times`
            start = free[device] if need < 0 else program.at_least(f"start_{i}", [free[device], arrivals[need]])
            arrival = free[device] = total([start, durations[duration]])
            if hop >= 0:
                if link in sent:
                    arrival = program.at_least(f"queued_{i}", [arrival, sent[link]])
                arrivals[i] = sent[link] = total([arrival, hops[hop]])
        updates = [total(times[k].optimizer_s for k in stages) for stages in problem.stages_by_device]
        for end, update in zip(free, updates, strict=True):
            program.require(goal, at_least=total([end, update]))
        for one, other in permutations(self.stages, 2):
            (there, here), tied = [problem.devices[k] for k in (one, other)], [times[k].is_tied for k in (one, other)]
            if there != here and None not in tied:  # where both are tied, updates wait for the other device
                less = weighted((most_update * len(self.stages), x) for x in (*tied, -2))
                program.require(goal, at_least=total([free[there], updates[here], less]))


class _StagePath(_Formulation):
    """A plan as a path of candidate stages."""

    def __init__(self, problem: Problem, unit_s: float, candidates: Sequence[Candidates]) -> None:
        super().__init__(problem, unit_s)
        require_equal, variable, downsets = self.program.require_equal, self.program.variable, problem.costs.downsets
        self.rows = [[variable(f"r_{k}_{i}", high=1) for i in range(len(x))] for k, x in enumerate(candidates)]
        cut: dict[int, Expression] = {0: 1.0}
        for k, some in enumerate(candidates):
            for p, z in cut.items():
                require_equal(self.sum(k, some.first == p), z)
            cut = {p: variable(f"z_{k}_{p}", high=1) for p in np.unique(some.end).tolist()}
            for p, z in cut.items():
                require_equal(self.sum(k, some.end == p), z)
            for v in self.layers if k < self.stages[-1] else ():
                is_before = downsets.is_before(v)
                require_equal(self.y[v, k], total(z for p, z in cut.items() if is_before[p]))
        units = {"is_tied": 1.0}  # the others are in seconds
        times = [
            StageSeconds(**{x: self.sum(k, s / units.get(x, unit_s)) for x, s in some.times.present.items()})
            for k, some in enumerate(candidates)
        ]
        self.add_goal(times, most_update=max(float(x.times.optimizer_s.max()) for x in candidates) / unit_s)
        for stages in problem.stages_by_device if problem.has_chunks else ():
            if limit := problem.memory_of(stages[0]):
                own = [(candidates[k], problem.boundaries(k)) for k in stages]
                parts = [problem.costs.part_rows(x.first, x.end, boundaries) / limit for x, boundaries in own]
                for moment in moments_of(problem, *stages).counts:
                    held = (self.sum(k, counts @ size) for k, counts, size in zip(stages, moment, parts, strict=True))
                    self.program.require(_SLACK, at_least=total(held))

    def sum(self, k: int, values: Any) -> Expression:
        """The value [E] of the candidate that is stage k."""
        return weighted((float(values[i]), self.rows[k][i]) for i in np.flatnonzero(values).tolist())


class _LinearPart(_Formulation):
    """A plan as the stage of every layer, with the part of its costs that is linear in that."""

    def __init__(self, problem: Problem, unit_s: float, graph: LayerGraph) -> None:
        super().__init__(problem, unit_s)
        self.costs, require = replace(problem.costs, given_downsets=None), self.program.require
        for k in self.stages:
            require(self.sum(k, [1] * len(self.layers)), at_least=1)
            for v in self.layers:
                require(self.up_to(v, k), at_least=self.up_to(v, k - 1))
            for before, after in graph.reduced_edges:
                require(self.up_to(before, k), at_least=self.up_to(after, k))
        self.add_constraints(problem.constraints)
        self.crossing = [self.crossing_bytes(k, graph) for k in self.stages]
        self.add_goal([self.seconds(k) for k in self.stages])
        for stages in problem.stages_by_device:
            if limit := problem.memory_of(stages[0]):
                parts = [(i, PARTS.index(x), size) for i, k in enumerate(stages) for x, size in self.parts(k).items()]
                for moment in moments_of(problem, *stages).counts:
                    held = weighted((moment[i, j] / limit, size) for i, j, size in parts if moment[i, j])
                    require(1 + 1 / limit, at_least=held)  # a byte for rounding

    def up_to(self, v: int, k: int) -> Expression:
        """y[v, k]; nothing is before stage 0, and layer L, the model's output, behind all stages."""
        return self.y.get((v, k), float(k >= 0 and v in self.layers))

    def sum(self, k: int, values: Iterable[float]) -> Expression:
        """The sum of values[L] over the layers of stage k."""
        terms = [(float(x), self.up_to(v, k), self.up_to(v, k - 1)) for v, x in enumerate(values) if x]
        return weighted((sign * x, y) for x, here, before in terms for sign, y in ((1, here), (-1, before)))

    def held(self, k: int, field: str) -> Expression:
        """A field of layers and shared weights, summed over those on stage k; shared ones count where their first user is."""
        amounts = [getattr(x, field) for x in self.costs.profile.layers]
        for x in self.costs.profile.shared_weights:
            amounts[x.layers[0]] += getattr(x, field)
        return self.sum(k, amounts)

    def crossing_bytes(self, k: int, graph: LayerGraph) -> tuple[Expression, Expression]:
        """Bytes of activations and gradients over the cut after stage k, if it is between two devices."""
        if k == self.stages[-1] or not self.problem.boundaries(k).after:
            return 0.0, 0.0
        end, crossing = self.layers.stop, list[tuple[ValueCost, Expression]]()
        for i, value in enumerate(values_of(self.costs.profile)):
            made = 1.0 if value.producer is None else self.up_to(value.producer, k)
            last_readers = (end,) if end in value.consumers else graph.last_of(value.consumers)
            rows = [weighted([(1, made), (-1, self.up_to(x, k))]) for x in last_readers]
            crosses = rows[0] if len(rows) == 1 else self.program.at_least(f"c_{i}_{k}", rows, high=1)
            crossing.append((value.costs[0], crosses))
        return weighted((x.num_bytes, c) for x, c in crossing), weighted((x.gradient_bytes, c) for x, c in crossing)

    def add_constraints(self, constraints: Constraints) -> None:
        """Rows that satisfy all constraints; "up to" and "between" are in the profile's order."""
        index = {layer.name: v for v, layer in enumerate(self.costs.profile.layers)}
        for last in {index[name] for name in constraints.cut_after}:
            cuts = [self.program.variable(f"cut_{last}_{k}", high=1) for k in self.stages[:-1]]
            self.program.require(total(cuts), at_least=1)  # one of them is right after these layers
            for (v, k), y in self.y.items():
                self.program.require(y if v <= last else weighted([(1, 1), (-1, y)]), at_least=cuts[k])
        for one, other in constraints.keep_together:
            for v, k in self.y:
                if index[one] <= v < index[other]:
                    self.program.require_equal(self.y[v, k], self.y[v + 1, k])
        for pin in constraints.pins:
            self.program.require(self.sum(pin.stage, np.eye(len(self.layers))[index[pin.layer]]), at_least=1)

    def seconds(self, k: int) -> StageSeconds[Any]:
        """The least that stage k takes, in units."""
        costs, step, profile = self.costs, self.costs.profile.step, self.costs.profile
        link, scale = self.problem.link_after(k), 1 / self.problem.speed(k) / self.unit_s
        is_last = k == self.stages[-1]

        def of_pass(name: SecondsOf) -> Expression:
            layers_s, loss_s = costs.sums.clocks_s(name), costs.sums.loss_clocks_s(name)
            clocks = [
                weighted([(scale, self.sum(k, x)), ((costs.overhead_s + y * is_last) * scale, 1)])
                for x, y in zip(layers_s, loss_s, strict=True)
            ]
            return clocks[0] if len(clocks) == 1 else self.program.at_least(f"{name}_{k}", clocks)

        update = step.spread_s / profile.whole_update_amount * scale
        fixed = step.fixed_part_s + costs.around_s * (k == 0)
        halves: tuple[SecondsOf, ...] = ("input_gradient", "weight_gradient") if costs.sums.has_halves else ()
        return StageSeconds(
            forward_s=of_pass("forward"),
            backward_s=of_pass("backward"),
            recompute_s=self.sum(k, costs.sums.layer_s("last_recompute") * scale),
            optimizer_s=weighted([(update, self.held(k, "update_amount")), (fixed * scale, 1)]),
            activation_s=weighted([(link.least_s_per_byte / self.unit_s, self.crossing[k][0])]),
            gradient_s=weighted([(link.least_s_per_byte / self.unit_s, self.crossing[k][1])]),
            **{f"{name}_s": of_pass(name) for name in halves},
        )

    def parts(self, k: int) -> dict[str, Expression]:
        """The least that stage k holds, by the fields of `StageBytes`."""
        costs, frees_outputs = self.costs, self.costs.transfers.frees_outputs
        kept = np.array([x.stash_bytes for x in costs.sums.costs])
        for (producer, _), num_bytes in costs.saved_outputs(only_later=True):
            kept[producer] -= num_bytes  # not made again in a recompute
        state_bytes = costs.profile.step.state_bytes / (costs.profile.trained_bytes or 1)
        updating = ((1, "reduced_bytes"), (-1, "gathered_bytes")) if costs.sharding == "optimizer" else ()
        return {
            "weight": self.held(k, "weight_bytes"),
            "gradient": self.held(k, "gradient_bytes"),
            "optimizer": weighted([(state_bytes, self.held(k, "updated_bytes"))]),
            "optimizer_workspace": weighted((sign, self.held(k, field)) for sign, field in updating),
            "received_activation": 0.0 if frees_outputs or k == 0 else self.crossing[k - 1][0],
            "received_gradient": self.crossing[k][1],
            "stash": self.sum(k, kept),
            "recomputed_stash": 0.0 if frees_outputs else self.sum(k, kept),
            "pending": self.sum(k, [x.pending_bytes for x in costs.sums.costs]),
        }
