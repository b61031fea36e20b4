"""Transfers straight from the device that makes a value to each that reads it, as dnn-partitioning's planner has them.

A device pays for a value once if it makes it and any other device reads it, and once if it reads it and another makes
it (Tarnawski et al. 2020, "Efficient Algorithms for Device Placement of DNN Graph Operators", max-load).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gplan.costs import Costs
from gplan.crossing import values_of
from gplan.downsets import Floats
from gplan.interpolation import value_cost_at
from gplan.nouns import Value


def direct_transfers_s(costs: Costs, stages: Sequence[Sequence[int]]) -> Floats:
    """[K]: seconds of the transfers of each stage, given its layers."""
    device = {layer: index for index, stage in enumerate(stages) for layer in stage}
    transfers_s = np.zeros(len(stages))
    values = values_of(costs.profile)
    for value, seconds in zip(values, value_seconds(costs, values), strict=True):
        readers = {device[x] for x in value.consumers if x in device}
        if value.producer is None or not readers - {device[value.producer]}:
            continue
        for index in readers | {device[value.producer]}:
            transfers_s[index] += seconds
    return transfers_s


def value_seconds(costs: Costs, values: Sequence[Value]) -> Floats:
    """[V]: seconds to move each value, and its gradient back, from one device to another."""
    return np.array([_seconds(costs, value) for value in values])


def _seconds(costs: Costs, value: Value) -> float:
    cost, link = value_cost_at(value.costs, costs.microbatch_size), costs.profile.link
    there_s = link.transfer_s(cost.num_bytes) if value.transfer_s is None else value.transfer_s
    return there_s + link.transfer_s(cost.gradient_bytes)
