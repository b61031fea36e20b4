"""The largest load as the goal: at least that of every stage, with the transfers that the objective counts."""

from __future__ import annotations

from gplan.balancer.direct import value_seconds
from gplan.balancer.milp.choices import Choices
from gplan.balancer.milp.cuts import Cuts
from gplan.balancer.milp.figures import Figures
from gplan.balancer.milp.program import Expression, Program, total, weighted
from gplan.crossing import values_of


def add_loads(program: Program, choices: Choices, cuts: Cuts, *, figures: Figures, unit_s: float) -> None:
    """The goal is the largest load of a device, in units."""
    problem, minimize = figures.problem, figures.problem.minimize
    direct = Direct(program, choices, figures, unit_s) if minimize == "max-device-load" else None
    loads = {}
    for k in choices.stages:
        load = compute_time(choices, k, figures=figures, unit_s=unit_s)
        if direct:
            load = total([load, direct.time(k)])
        else:
            sending = total([cuts.activation_sending(k), cuts.gradient_sending(k - 1)])
            load = total([load, weighted([(1.0 / problem.speed(k), sending)])])
        if minimize == "max-stage":
            load = total([load, cuts.gradient_time(k), cuts.activation_time(k - 1)])
        loads[k] = load
    for stages in problem.stages_by_device:
        program.require(program.goal, at_least=total(loads[k] for k in stages))


def compute_time(choices: Choices, k: int, *, figures: Figures, unit_s: float) -> Expression:
    """What stage k computes for a micro-batch, in units."""
    problem, scale = figures.problem, 1.0 / figures.problem.speed(k) / unit_s
    overheads_s = (2 + problem.split_shares[k]) * figures.overhead_s
    ends = [(overheads_s * scale, choices.is_used(k)), (figures.loss_compute_s(k) * scale, choices.is_last(k))]
    return weighted([(1.0, choices.sum_on(k, (figures.compute_s(k) * scale).tolist())), *ends])


class Direct:
    """Transfers from device to device: one pays for a value of which it holds the producer or readers, but not all.

    Values that the same layers make or read are one; its time on device k is z >= x[producer, k] - x[reader, k] and
    z >= x[reader, k] - x[producer, k] for every reader.
    """

    def __init__(self, program: Program, choices: Choices, figures: Figures, unit_s: float) -> None:
        self._program, self._choices = program, choices
        self._times: dict[tuple[int, ...], float] = {}
        values = values_of(figures.costs.profile)
        for value, seconds in zip(values, value_seconds(figures.costs, values), strict=True):
            readers = {x for x in value.consumers if x < figures.costs.num_layers}
            if value.producer is not None and readers and seconds:
                ends = tuple(sorted({value.producer, *readers}))
                self._times[ends] = self._times.get(ends, 0.0) + float(seconds) / unit_s

    def time(self, k: int) -> Expression:
        """What device k pays, in units."""
        return weighted((time, self._is_split(ends, k)) for ends, time in self._times.items())

    def _is_split(self, ends: tuple[int, ...], k: int) -> Expression:
        one, *others = (self._choices.is_on(v, k) for v in ends)
        differences = [weighted([(sign, one), (-sign, other)]) for other in others for sign in (1.0, -1.0)]
        return self._program.at_least(f"split_{'_'.join(map(str, ends))}_{k}", differences, high=1)
