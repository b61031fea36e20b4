"""What the cost model says of stages that a solver has found: its word is the last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gplan.balancer.price import Problem, laid_out, objective_s, stages_of

Stages = tuple[tuple[int, ...], ...]


def goal_s(problem: Problem, stages: Sequence[Sequence[int]]) -> float:
    """What the problem minimises, of these stages."""
    laid, cuts = laid_out(problem, stages)
    return objective_s(laid, stages_of(laid, cuts))


def fits(problem: Problem, stages: Sequence[Sequence[int]]) -> bool:
    """Whether all stages fit the memory of their devices, to the byte."""
    laid, cuts = laid_out(problem, stages)
    bounds = np.array([0, *cuts, laid.num_layers])
    limits = [problem.memory_of(k) for k in range(len(stages))]
    return all(
        limit is None or laid.peak_bytes(k, bounds[k : k + 1], bounds[k + 1 : k + 2]).item() <= limit
        for k, limit in enumerate(limits)
    )
