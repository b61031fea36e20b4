"""Programs over equal blocks against brute force: every schedule, way to recompute and memory."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.core import Link
from gplan.partition.block_program import BlockProgram, Counted, equal_blocks
from gplan.partition.plan_evaluation import objective_s
from gplan.partition.problem import Problem
from tests.made import FREE_LINK
from tests.partition.problems import EVERY, make_problem, peak_bytes, plans
from tests.scheduled import OWN

UNIT = 100_000_000
"""Bytes; a program counts memory in GiB."""

BY_RULE = [x for x in EVERY if x not in (OWN, "zb-h1", "zb-v")]  # these need halves of backwards


@st.composite
def block_problems(draw: st.DrawFn) -> Problem:
    """A first layer, six equal blocks and a last layer, on two devices or more, with or without a memory limit."""
    schedule, ends = draw(st.sampled_from(BY_RULE)), st.integers(0, 9)

    def of_layers(unit: int = 1) -> list[int]:
        return [unit * x for x in (draw(ends), *[draw(ends)] * 6, draw(ends))]

    chunks = {"interleaved-1f1b:2": 2, "interleaved-1f1b:3": 3, "looped-bfs:2": 2}.get(schedule, 1)
    problem = make_problem(
        [1.0 + x for x in of_layers()], num_stages=2 * chunks, num_microbatches=draw(st.sampled_from([2, 4, 8])),
        schedule=schedule, recompute=draw(st.sampled_from(["never", "always", "except-last"])), minimize="step-time",
        weight_bytes=of_layers(UNIT), stash_bytes=of_layers(UNIT), output_bytes=[2 * UNIT] * 8,
        workspace_bytes=of_layers(UNIT), link=draw(st.sampled_from([FREE_LINK, Link(latency_s=1.0, bytes_per_s=2.0 * UNIT)])),
    )  # fmt: skip
    if draw(st.booleans()):
        return problem
    _, stages = draw(st.sampled_from(list(plans(problem))))
    return replace(problem, memory_bytes=peak_bytes(problem, stages))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(block_problems())
def test_the_bound_is_below_every_step_and_without_memory_it_is_the_best(problem: Problem) -> None:
    blocks = equal_blocks(problem)
    if blocks is None:
        return
    steps = [objective_s(problem, stages) for _, stages in plans(problem)]
    nothing = Counted(cut=None, step_s=float("inf"), lower_bound_s=0.0)
    found = BlockProgram(problem, blocks).solve(nothing, enough=1e-6, deadline_s=time.perf_counter() + 60)
    assert found.lower_bound_s <= min(steps) * (1 + 1e-9)
    if problem.memory_bytes is None:
        assert found.step_s == pytest.approx(min(steps), rel=1e-5)
    elif found.cut is not None:
        assert found.step_s >= min(steps) * (1 - 1e-9) and found.cut.peak_bytes <= problem.memory_bytes
