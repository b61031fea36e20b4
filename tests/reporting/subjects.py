"""Plans and runs made by hand: costs that are known, and a measured timeline that differs from the predicted one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from msgspec import structs

from gplan.core import Link, Plan, Profile, RecomputeMode, Run, Timeline
from gplan.cost.memory_moments import device_memory
from gplan.cost.stage_table import StageTable
from gplan.partition.plan_evaluation import price
from gplan.partition.problem import Problem, Solution
from gplan.schedules.registry import make_schedule
from gplan.simulation.simulator import simulate, step_and_bubble
from tests.made import make_profile

SLOW_LINK = Link(latency_s=1e-4, bytes_per_s=2e9)


def make_layered_profile(num_layers: int, *, output_bytes: int = 2**20) -> Profile:
    """Layers with uneven costs, from 1 to 3 ms forward."""
    chance = random.Random(num_layers)
    return make_profile(
        [chance.uniform(1e-3, 3e-3) for _ in range(num_layers)],
        weight_bytes=[chance.randrange(2**20, 8 * 2**20) for _ in range(num_layers)],
        stash_bytes=3 * 2**20,
        output_bytes=output_bytes,
        workspace_bytes=2**20,
        optimizer_s=5e-3,
        link=SLOW_LINK,
    )


def make_plan(
    num_layers: int = 8, *, num_stages: int = 4, num_microbatches: int = 8, schedule: str = "1f1b",
    recompute: RecomputeMode = "never", profile: Profile | None = None, memory_bytes: int | None = None,
) -> Plan:  # fmt: skip
    """A plan with as many layers in every stage as can be."""
    costs = StageTable(profile or make_layered_profile(num_layers), num_microbatches)
    problem = Problem(
        costs=costs, num_stages=num_stages, schedule=schedule, recompute=recompute, minimize="max-stage",
        memory_bytes=memory_bytes,
    )  # fmt: skip
    bounds = [round(costs.num_layers * stage / num_stages) for stage in range(num_stages + 1)]
    stages = tuple(tuple(range(first, end)) for first, end in pairwise(bounds))
    return price(problem, Solution(stages=stages, lower_bound_s=0.0, solver="dp"), solve_s=0.01)


def make_scheduled_plan(
    schedule: str, *, num_devices: int = 2, num_microbatches: int = 4, recompute: RecomputeMode = "never"
) -> Plan:
    """A plan for any schedule, two layers in every stage; of a backward both halves take as long."""
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    chain = make_plan(
        2 * made.num_stages, num_stages=made.num_stages, num_microbatches=num_microbatches, recompute=recompute
    )
    stages, held = [], {}
    for stage, device in zip(chain.stages, made.devices, strict=True):
        assert stage.parts is not None
        half_s = stage.cost.backward_s / 2
        cost = replace(stage.cost, input_gradient_s=half_s, weight_gradient_s=half_s)
        stages.append(replace(stage, cost=cost, device=device, parts=structs.replace(stage.parts, pending=2**19)))
    for device in range(num_devices):
        parts = {i: stages[i].parts for i in made.stages_of(device)}
        held |= device_memory(made, device, parts, recompute=recompute)  # type: ignore[arg-type]
    stages = [replace(stage, memory=held[stage.index]) for stage in stages]
    step_s, bubble = step_and_bubble(made, [stage.cost for stage in stages], recompute=recompute)
    prediction = replace(chain.prediction, step_s=step_s, bubble=bubble)
    return replace(chain, stages=tuple(stages), schedule=schedule, prediction=prediction)


def named(plan: Plan, names: Sequence[str]) -> Plan:
    """The plan with other layer names."""
    stages = [replace(x, layer_names=tuple(names[x.first_layer : x.end_layer])) for x in plan.stages]
    return replace(plan, stages=tuple(stages))


def measured_timeline(plan: Plan, *, seed: int = 1, spread: float = 0.2) -> Timeline:
    """What simulate says when every stage takes up to `spread` longer than planned."""
    chance = random.Random(seed)
    stages = []
    for stage in plan.stages:
        slower = {
            name: getattr(stage.cost, name) * (1 + chance.uniform(0, spread))
            for name in ("forward_s", "backward_s", "optimizer_s", "activation_s", "gradient_s")
        }
        stages.append(replace(stage, cost=replace(stage.cost, **slower)))
    return replace(simulate(replace(plan, stages=tuple(stages))), origin="measured")


def make_run(plan: Plan | None = None, *, engine: str = "torch", seed: int = 1, spread: float = 0.2) -> Run:
    """A run of the plan, slower than planned, with a tenth more memory."""
    plan = plan or make_plan()
    timeline = measured_timeline(plan, seed=seed, spread=spread)
    return Run(
        plan=plan,
        engine=engine,
        losses=(2.0, 1.9, 1.8),
        step_s=(2 * timeline.step_s, timeline.step_s, timeline.step_s),
        num_warmup_steps=1,
        num_disturbed=0,
        num_counted=1,
        timeline=timeline,
        peak_bytes=tuple(round(1.1 * peak) for peak in plan.device_peak_bytes),
        check=None,
        created="2000-01-01T00:00:00+00:00",
        versions=(("torch", "2.13.0"),),
    )
