"""What devices with several stages hold at least: the mean over the devices, each at one of its moments.

The largest peak is no smaller than that mean. What stages hold at a moment is a sum of their layers' bytes and of bytes
at their two cuts, so the partition for which it is smallest needs no pairs of positions: with I_s what the layers
before a position add to stage s, B_s and E_s what beginning or ending there does,
    v_{s+1}[end] = E_s[end] + I_s[end] + min over first < end of (v_s[first] + B_s[first] - I_s[first])
Workspaces are left out.
"""

from __future__ import annotations

import numpy as np

from gplan.balancer.held import PARTS, counts_at
from gplan.balancer.peaks import bytes_before
from gplan.balancer.problem import Problem
from gplan.costs import Costs
from gplan.downsets import Ints
from gplan.memory import device_moments
from gplan.nouns import StageBytes


def least_mean_peak(problem: Problem) -> float:
    """Bytes that the fullest device of any partition holds at least, whatever memory there is; O(S P)."""
    costs = problem.costs
    pending = costs.downsets.int_sums(np.array([x.pending_bytes for x in costs.layer_costs], dtype=np.int64))
    layers = bytes_before(costs) | {"pending": pending.astype(np.float64)}
    passing = _most_passing(costs)
    value = np.where(np.arange(costs.num_positions) == 0, 0.0, np.inf)
    for stage, count in enumerate(_counts(problem)):
        held = dict(zip(PARTS, count.tolist(), strict=True))
        inside = sum(held[name] * sums for name, sums in layers.items())
        begin, end = _at_cuts(problem, stage, held, passing)
        least = np.minimum.accumulate(value + begin - inside)
        value = np.concatenate([[np.inf], least[:-1]]) + inside + end
    rounded = problem.num_stages  # the optimizer's state of a stage is a whole number of bytes
    return (float(value[-1]) - rounded) / problem.num_devices


def _counts(problem: Problem) -> Ints:
    """[S, parts]: how many of each part a device holds of a stage,
    when it holds most if stages have even shares of all."""
    whole = problem.costs.one_stage_bytes(0, problem.costs.num_positions - 1)
    even = StageBytes(**{name: getattr(whole, name) // problem.num_stages for name in PARTS})
    schedule, counts = problem.made_schedule, np.zeros((problem.num_stages, len(PARTS)), dtype=np.int64)
    for device, stages in enumerate(problem.stages_by_device):
        moments = device_moments(schedule, device, dict.fromkeys(stages, even), recompute=problem.recompute)
        fullest = max(moments, key=lambda moment: moment.num_bytes)
        for stage, moment in fullest.moments.items():
            counts[stage] = counts_at(moment)
    return counts


def _at_cuts(problem: Problem, stage: int, held: dict[str, int], most_passing: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """[P] each: what a stage holds of what crosses the cut before it, and of what crosses that after it, at least."""
    costs, apart, crossing = problem.costs, problem.apart(stage), problem.costs.crossing
    buffered = held["buffer"] * costs.num_microbatches
    passing, unsaved_passing = (x * apart.before for x in most_passing)
    before = (held["sent"] + held["pending"]) * costs.gradient_bytes + buffered * costs.activation_bytes
    after = held["sent"] * (costs.activation_bytes - passing) + buffered * costs.gradient_bytes
    is_inside = np.arange(costs.num_positions) < costs.num_positions - 1
    num_kept = held["checkpoint"] + held["again"] * is_inside
    kept = held["stash"] * (crossing.unsaved_bytes - unsaved_passing) + num_kept * (crossing.kept_bytes - passing)
    return before * apart.before, after * apart.after + kept


def _most_passing(costs: Costs) -> tuple[Ints, Ints]:
    """[P] each: the most of what crosses a cut that may have crossed the one before it too: stages of one layer's."""
    first, end, _ = costs.downsets.covers
    most = np.zeros((2, costs.num_positions), dtype=np.int64)
    for row, passing in zip(most, costs.passing.activation_bytes(first, end), strict=True):
        np.maximum.at(row, end, passing)
    return most[0], most[1]
