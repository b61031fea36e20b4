"""The same problem as a mixed-integer linear program, solved by HiGHS: an independent check of the other solvers.

The binary y[v, k] says that layer v is in a stage up to k; it falls along the layers and rises along the stages:
    y[v, k] >= y[v+1, k]        stages are runs of layers
    y[v+1, k+1] >= y[v, k]      stage k+1 holds at least one layer
so that x[v, k] = y[v, k] - y[v, k-1] says that layer v is on stage k, and y[v, k] - y[v+1, k] that it is its last
layer. Times, transfers and bytes are linear in these. A shared weight has a continuous 0 <= u <= 1 per stage, at
least x of each of its users; the largest workspace of a stage is a variable, at least that of each of its layers. One
row per stage and moment keeps the memory. `max-stage` minimises T >= every load; `step-time` gives every action of
the schedule an end, after the action before it on its device and after the arrival of its input, and minimises the
last end: a longest path, for any schedule.

Exact, within a time limit. A solver's numbers come with tolerances, so the cuts are read from y and priced again by
the cost model, and a plan that fits only by tolerance is forbidden and the program solved again. Times are scaled to
about a thousand, to make the solver's absolute tolerances mean one part in a billion. Ties are not settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
import pulp

from gplan.balancer.largest import smallest_largest
from gplan.balancer.price import Problem, Solution, moments_of, objective_s, recomputed_share, stages_of
from gplan.costs import Floats, Ints
from gplan.memory import StageBytes, moment_bytes
from gplan.nouns import Action, ActionKind
from gplan.schedules import make_schedule
from gplan.simulator import is_recomputed, needed_action
from gplan.units import seconds_text

Expression: TypeAlias = Any  # a number, variable or linear expression of PuLP, which has no types

TIME_LIMIT_S = 60.0

_SCALE = 1000.0  # about what the objective is, in the units of the program
_AGREES = 1e-5  # share by which the program's objective and the cost model's may differ


def smallest_by_milp(problem: Problem, *, time_limit_s: float = TIME_LIMIT_S) -> Solution | None:
    """The partition with the smallest objective; None where none fits the memory."""
    has_highs = find_spec("highspy") is not None
    model = _Model(problem)
    while True:
        model.program.solve(_solver(has_highs, time_limit_s))
        if model.program.status == pulp.LpStatusInfeasible:
            return None
        if model.program.sol_status == pulp.LpSolutionNoSolutionFound:
            return _without_plan(problem, model, has_highs, time_limit_s)
        cuts = model.cuts()
        stages = stages_of(problem, cuts)
        if problem.memory_bytes is None or all(x.memory.peak_bytes <= problem.memory_bytes for x in stages):
            break
        model.forbid(cuts)
    goal_s = objective_s(problem, stages)
    is_proven = model.program.sol_status == pulp.LpSolutionOptimal
    found_s = model.unit_s * pulp.value(model.program.objective)
    assert not is_proven or abs(found_s - goal_s) <= _AGREES * goal_s, f"the MILP says {found_s}, the model {goal_s}"
    notes = () if is_proven else (f"the MILP was stopped after {seconds_text(time_limit_s)}",)
    return Solution(
        cuts=cuts,
        lower_bound_s=goal_s if is_proven else _lower_bound_s(model, has_highs),
        solver="milp/HiGHS" if has_highs else "milp/CBC",
        notes=_solver_notes(has_highs) + notes,
    )


def _solver(has_highs: bool, time_limit_s: float) -> pulp.LpSolver:
    if has_highs:
        return pulp.HiGHS(msg=False, gapRel=0.0, gapAbs=0.0, timeLimit=time_limit_s)
    return pulp.PULP_CBC_CMD(msg=False, gapRel=0.0, timeLimit=time_limit_s)


def _solver_notes(has_highs: bool) -> tuple[str, ...]:
    return () if has_highs else ("highspy cannot be imported: the MILP was solved by CBC",)


def _lower_bound_s(model: _Model, has_highs: bool) -> float:
    """What a solver that was stopped has proven; CBC does not say."""
    if not has_highs:
        return 0.0
    bound: float = model.program.solverModel.getInfo().mip_dual_bound
    return max(0.0, bound * model.unit_s)


def _without_plan(problem: Problem, model: _Model, has_highs: bool, time_limit_s: float) -> Solution | None:
    """The smallest largest stage in place of a plan that was not found in time, and a note that says so."""
    start = smallest_largest(problem)
    if start is None:
        return None
    note = f"the MILP found no plan in {seconds_text(time_limit_s)}: this is the plan with the smallest largest stage"
    return Solution(
        cuts=start.cuts,
        lower_bound_s=_lower_bound_s(model, has_highs),
        solver=start.solver,
        notes=(*_solver_notes(has_highs), note),
    )


class _Model:
    """The program of one problem. Layers are v, stages k; [k] of a list is of stage k."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.program = pulp.LpProblem("gplan", pulp.LpMinimize)
        costs, num_times = problem.costs, problem.num_microbatches if problem.minimize == "step-time" else 1
        total_s = float(costs.forward_s[0, -1] + costs.backward_s[0, -1]) + costs.profile.overhead_s
        self.unit_s = total_s * num_times / problem.num_stages / _SCALE or 1.0  # a unit of time of the program
        self._choices = self._add_choices()
        self._shared_on = [self._add_shared(k) for k in self._stages]
        self._goal = self._variable("goal")
        self.program += self._goal
        if problem.minimize == "max-stage":
            self._add_loads()
        else:
            self._add_actions()
        if problem.memory_bytes is not None:
            for k in self._stages:
                self._add_memory(k, problem.memory_bytes)

    def cuts(self) -> tuple[int, ...]:
        """The cuts of the partition that was found."""
        return tuple(
            sum(round(pulp.value(self._up_to(v, k))) for v in self._layers) for k in self._stages[:-1]
        )  # fmt: skip

    def forbid(self, cuts: Sequence[int]) -> None:
        """Exclude this partition."""
        self.program += pulp.lpSum(1 - self._is_last(cut - 1, k) for k, cut in enumerate(cuts)) >= 1

    @property
    def _layers(self) -> range:
        return range(self.problem.num_layers)

    @property
    def _stages(self) -> range:
        return range(self.problem.num_stages)

    def _variable(self, name: str, high: float | None = None, category: str = pulp.LpContinuous) -> Expression:
        return self.program.add_variable(name, 0, high, category)

    def _at_least(self, name: str, values: Iterable[Expression]) -> Expression:
        """A new variable that is at least each of these."""
        variable = self._variable(name)
        for value in values:
            self.program += variable >= value
        return variable

    def _add_choices(self) -> dict[tuple[int, int], Expression]:
        """y, without the entries that are settled because no stage is empty."""
        num_layers, num_stages = self.problem.num_layers, self.problem.num_stages
        open_choices = [
            (v, k) for k in range(num_stages - 1) for v in range(k + 1, num_layers - (num_stages - 1 - k))
        ]  # fmt: skip
        choices = {(v, k): self._variable(f"y_{v}_{k}", 1, pulp.LpBinary) for v, k in open_choices}
        for (v, k), choice in choices.items():
            if (v + 1, k) in choices:
                self.program += choice >= choices[v + 1, k]
            if (v + 1, k + 1) in choices:
                self.program += choices[v + 1, k + 1] >= choice
        return choices

    def _up_to(self, v: int, k: int) -> Expression:
        """y[v, k]: whether layer v is in a stage up to k; there is no layer L and no stage -1."""
        if (v, k) in self._choices:
            return self._choices[v, k]
        return int(k >= 0 and v < self.problem.num_layers and (v <= k or k == self.problem.num_stages - 1))

    def _is_on(self, v: int, k: int) -> Expression:
        return self._up_to(v, k) - self._up_to(v, k - 1)

    def _is_last(self, v: int, k: int) -> Expression:
        return self._up_to(v, k) - self._up_to(v + 1, k)

    def _sum_on(self, k: int, values: Iterable[float]) -> Expression:
        """The sum over the layers of stage k."""
        return pulp.lpSum(value * self._is_on(v, k) for v, value in enumerate(values))

    def _of_last(self, k: int, values: Iterable[float]) -> Expression:
        """The value of the last layer of stage k."""
        return pulp.lpSum(value * self._is_last(v, k) for v, value in enumerate(values))

    def _after_cut(self, k: int, at_cuts: Ints | Floats) -> Expression:
        """The value at the cut after stage k, of values that are 0 at both ends of the chain; 0 for no stage."""
        return self._of_last(k, at_cuts[1:].tolist()) if k >= 0 else 0

    def _add_shared(self, k: int) -> list[Expression]:
        """For each shared weight, whether stage k holds it."""
        shared = self.problem.costs.profile.shared_weights
        held = [self._variable(f"u_{i}_{k}", 1) for i in range(len(shared))]
        for variable, weight in zip(held, shared, strict=True):
            for v in set(weight.layers):
                self.program += variable >= self._is_on(v, k)
        return held

    def _weights(self, k: int, field: str) -> Expression:
        """Bytes of the weights or gradients on stage k."""
        profile = self.problem.costs.profile
        own = self._sum_on(k, [getattr(layer, field) for layer in profile.layers])
        held = zip(profile.shared_weights, self._shared_on[k], strict=True)
        return own + pulp.lpSum(getattr(weight, field) * variable for weight, variable in held)

    def _trained_share(self, k: int) -> Expression:
        profile = self.problem.costs.profile
        total = sum(x.gradient_bytes for x in profile.layers) + sum(x.gradient_bytes for x in profile.shared_weights)
        return self._weights(k, "gradient_bytes") * (1.0 / total) if total else 0

    def _add_loads(self) -> None:
        costs, share = self.problem.costs, recomputed_share(self.problem)
        forward, backward, recompute = (
            np.diagonal(x, 1) for x in (costs.forward_s, costs.backward_s, costs.recompute_s)
        )
        for k in self._stages:
            load = self._sum_on(k, ((forward + backward + share * recompute) / self.unit_s).tolist())
            load += self._after_cut(k, costs.gradient_s / self.unit_s)
            load += self._after_cut(k - 1, costs.activation_s / self.unit_s)
            self.program += self._goal >= load + 2 * costs.profile.overhead_s / self.unit_s

    def _add_actions(self) -> None:
        """An end for every action: after the one before it on its device, and after its input has arrived."""
        num_stages, num_microbatches = self.problem.num_stages, self.problem.num_microbatches
        schedule = make_schedule(self.problem.schedule, num_stages=num_stages, num_microbatches=num_microbatches)
        times = [self._add_times(k) for k in self._stages]
        ends = {action: self._variable(f"end_{action}") for order in schedule.orders for action in order}
        for order in schedule.orders:
            for before, action in zip([None, *order[:-1]], order, strict=True):
                duration = self._duration(action, times)
                self.program += ends[action] >= (ends[before] if before else 0) + duration
                needed = needed_action(action, num_stages)
                if needed is not None:
                    self.program += ends[action] >= ends[needed] + _transfer(needed, action, times) + duration
            updates = pulp.lpSum(times[k].optimizer for k in {action.stage for action in order})
            self.program += self._goal >= ends[order[-1]] + updates

    def _add_times(self, k: int) -> _Times:
        costs, overhead = self.problem.costs, self.problem.costs.profile.overhead_s / self.unit_s
        forward, backward, again = (
            self._sum_on(k, (np.diagonal(x, 1) / self.unit_s).tolist())
            for x in (costs.forward_s, costs.backward_s, costs.recompute_s)
        )
        optimizer = self._trained_share(k) * (costs.optimizer_total_s / self.unit_s)
        return _Times(
            forward=self._at_least(f"forward_{k}", [forward + overhead]),
            backward=self._at_least(f"backward_{k}", [backward + overhead]),
            again=self._at_least(f"again_{k}", [backward + again + overhead]),
            optimizer=self._at_least(f"optimizer_{k}", [optimizer]),
            activation=self._at_least(f"activation_{k}", [self._after_cut(k, costs.activation_s / self.unit_s)]),
            gradient=self._at_least(f"gradient_{k}", [self._after_cut(k, costs.gradient_s / self.unit_s)]),
        )

    def _duration(self, action: Action, times: Sequence[_Times]) -> Expression:
        if action.kind is ActionKind.FORWARD:
            return times[action.stage].forward
        num_microbatches, recompute = self.problem.num_microbatches, self.problem.recompute
        again = is_recomputed(action.microbatch, num_microbatches=num_microbatches, recompute=recompute)
        return times[action.stage].again if again else times[action.stage].backward

    def _add_memory(self, k: int, limit_bytes: int) -> None:
        """One row for each moment of stage k; a byte of room for rounding in the shares of the optimizer."""
        parts = self._bytes_of(k)
        for moment in moments_of(self.problem, k):
            held: Expression = moment_bytes(moment, parts)
            self.program += held * (1.0 / limit_bytes) <= 1.0 + 1.0 / limit_bytes

    def _bytes_of(self, k: int) -> StageBytes[Expression]:
        """The parts of the memory of stage k."""
        costs, step = self.problem.costs, self.problem.costs.profile.step
        loss_bytes = costs.loss.stash_bytes if costs.loss else 0
        unsaved = [x.output_unsaved_bytes for x in costs.layer_costs]
        outputs = [*(x.output_bytes for x in costs.layer_costs[:-1]), unsaved[-1]]
        loss = loss_bytes if k == self._stages[-1] else 0
        received = self._after_cut(k - 1, costs.activation_bytes) + self._after_cut(k, costs.gradient_bytes)
        stash = self._sum_on(k, [x.stash_bytes for x in costs.layer_costs]) + self._of_last(k, unsaved)
        return StageBytes(
            weight=self._weights(k, "weight_bytes"),
            gradient=self._weights(k, "gradient_bytes"),
            optimizer=self._trained_share(k) * step.state_bytes,
            stash=stash + loss,
            checkpoint=self._of_last(k, outputs) + loss,
            sent=self._after_cut(k, costs.activation_bytes) + self._after_cut(k - 1, costs.gradient_bytes),
            forward_workspace=self._largest_above_stash(k, "forward_workspace_bytes"),
            backward_workspace=self._largest_above_stash(k, "backward_workspace_bytes"),
            recompute_workspace=self._largest_alone(k),
            optimizer_workspace=self._trained_share(k) * step.workspace_bytes,
            buffer=self.problem.num_microbatches * received,
        )

    def _largest_above_stash(self, k: int, field: str) -> Expression:
        """The largest workspace on stage k, above the stash of all its layers; those after the running one hold none."""
        costs, is_last = self.problem.costs, k == self._stages[-1]
        later: Expression = costs.loss.stash_bytes if costs.loss and is_last else 0
        above: list[Expression] = [getattr(costs.loss, field)] if costs.loss and is_last else []
        for v in reversed(range(costs.num_layers)):
            cost = costs.layer_costs[v]
            above.append(getattr(cost, field) * self._is_on(v, k) - later)
            later = later + cost.stash_bytes * self._is_on(v, k)
        return self._as_share_of_memory(f"{field}_{k}", above)

    def _largest_alone(self, k: int) -> Expression:
        """The largest workspace on stage k of a forward that keeps nothing."""
        alone = np.diagonal(self.problem.costs.stage_bytes.recompute_workspace, 1).tolist()
        return self._as_share_of_memory(f"recompute_{k}", [x * self._is_on(v, k) for v, x in enumerate(alone)])

    def _as_share_of_memory(self, name: str, num_bytes: Iterable[Expression]) -> Expression:
        """A variable of at least each of these, in bytes; within the program it is a share of the memory."""
        limit_bytes = self.problem.memory_bytes or 1
        return limit_bytes * self._at_least(name, [x * (1.0 / limit_bytes) for x in num_bytes])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """The variables of one stage's times, as in `StageCost`."""

    forward: Expression
    backward: Expression
    again: Expression  # a backward that recomputes
    optimizer: Expression
    activation: Expression  # to the next stage
    gradient: Expression  # from the next stage


def _transfer(sent: Action, action: Action, times: Sequence[_Times]) -> Expression:
    """From the end of one action until its output is where another needs it."""
    if sent.stage == action.stage:
        return 0
    return times[sent.stage].activation if sent.kind is ActionKind.FORWARD else times[action.stage].gradient
