"""Tables 2 and 3 measured on this host: scaled-down models, which plans of them are run, and in which order.

The batch stays the same, 32 samples: M micro-batches are of 32 / M. The virtual engine computes every action in one
process, on one core, and lays the durations that it measured out on K devices by the simulator's rules
(gplan/runtime/virtual_engine.py); the torch engine runs K processes. A round runs every case once, every second round in the
opposite order, so that the drift of a host's speed falls on all cases alike. Two cases with the same stages share one
run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from gplan.simulation.without_contention import profile_without_contention

import gplan
from gplan.core import Constraints, Plan, Profile, RecomputeMode, Run
from gplan.core.errors import UsageError
from paper.measured_parts import parts_of
from paper.profiles import EXAMPLES, without_limit
from paper.published import (
    DEVICE_COUNTS,
    GPU_AMOEBANET,
    GPU_TRANSFORMER,
    TPU_AMOEBANET,
    TPU_TRANSFORMER,
    Throughputs,
)
from paper.throughput import plan_by_rule

BATCH_SIZE = 32
MICROBATCH_COUNTS = (1, 4, 32)
PROFILE_BUDGET_S = 5.0  # for each micro-batch size

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model scaled down until a step takes about a second, and what the paper prints of the model it stands for."""

    title: str
    stands_for: str  # in Table 2
    stands_for_linked: str  # in Table 3
    example: str
    settings: Mapping[str, int]
    published: Throughputs
    published_linked: Throughputs

    @property
    def reference(self) -> str:
        """The model file."""
        return str(EXAMPLES / f"{self.example}.py")


SUBJECTS = (
    Subject(
        title="AmoebaNet-D(6, 16), images of 64x64",
        stands_for="AmoebaNet-D(18, 256)",
        stands_for_linked="AmoebaNet-D(18, 128)",
        example="amoebanet_d",
        settings={"num_layers": 6, "num_filters": 16, "image_size": 64},
        published=TPU_AMOEBANET,
        published_linked=GPU_AMOEBANET,
    ),
    Subject(
        title="Transformer-16, 128 wide, sequences of 32",
        stands_for="Transformer-48",
        stands_for_linked="Transformer-24",
        example="transformer_l",
        settings={"num_layers": 16, "width": 128, "feed_forward": 512, "sequence_length": 32},
        published=TPU_TRANSFORMER,
        published_linked=GPU_TRANSFORMER,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan to run: by whose partition, and on which engine."""

    way: Literal["best", "rule"]
    engine: Literal["torch", "virtual"]
    plan: Plan

    @property
    def work(self) -> tuple[str, tuple[int, ...], int, str]:
        """What it makes the engine do; cases of equal work need one run."""
        return self.engine, self.plan.cuts, self.plan.num_microbatches, self.plan.recompute


def profile_of(subject: Subject) -> Profile:
    """The subject measured at every micro-batch size of the tables."""
    return gplan.profile(
        subject.reference,
        settings=subject.settings,
        microbatch_sizes=sorted(BATCH_SIZE // m for m in MICROBATCH_COUNTS),
        budget_s=PROFILE_BUDGET_S,
    )


def cases_of(
    profile: Profile,
    *,
    batch_size: int = BATCH_SIZE,
    device_counts: Sequence[int] = DEVICE_COUNTS,
    microbatch_counts: Sequence[int] = MICROBATCH_COUNTS,
) -> list[Case]:
    """Every plan to run, each count of micro-batches with every count of devices.

    gplan's best on the virtual engine, with the fewest devices on the torch engine too; GPipe's rule where there are
    several micro-batches (a single one takes as long under any partition) and where it leaves no stage empty. With the
    most micro-batches on the fewest devices also without recompute: the difference is what recompute takes. Plans for
    the virtual engine are made without the contention of processes that share a host, as it has none.
    """
    shared, found = without_limit(profile), list[Case]()
    free = profile_without_contention(shared)
    for m, k in product(microbatch_counts, device_counts):
        best = gplan.balance(free, **_asked(k, m, batch_size))
        found.append(Case(way="best", engine="virtual", plan=best))
        rule = plan_by_rule(free, _asked(k, m, batch_size)) if m > 1 else None
        if rule is not None:
            found.append(Case(way="rule", engine="virtual", plan=rule))
        if k == min(device_counts):
            real = gplan.balance(shared, **_asked(k, m, batch_size))
            found.append(Case(way="best", engine="torch", plan=real))
            if m == max(microbatch_counts):
                found.append(Case(way="best", engine="virtual", plan=_without_recompute(free, best)))
    return found


def _asked(num_devices: int, num_microbatches: int, batch_size: int, recompute: RecomputeMode = "always") -> Row:
    if batch_size % num_microbatches:
        raise UsageError(f"{batch_size} samples do not make {num_microbatches} equal micro-batches; choose a divisor")
    return {
        "num_devices": num_devices,
        "num_microbatches": num_microbatches,
        "microbatch_size": batch_size // num_microbatches,
        "schedule": "gpipe",
        "recompute": recompute,
    }


def _without_recompute(profile: Profile, plan: Plan) -> Plan:
    """The same stages with nothing recomputed."""
    asked = _asked(plan.num_devices, plan.num_microbatches, plan.batch_size, "never")
    names = tuple(stage.layer_names[-1] for stage in plan.stages[:-1])
    return gplan.balance(profile, constraints=Constraints(cut_after=names), **asked)


def measured_rows(cases: Sequence[Case], *, num_steps: int, num_rounds: int) -> Iterator[Row]:
    """A row for each case and round, as they come."""
    for number in range(num_rounds):
        runs: dict[tuple[str, tuple[int, ...], int, str], Run] = {}
        for case in cases if number % 2 == 0 else reversed(cases):
            if case.work not in runs:
                runs[case.work] = gplan.run(case.plan, engine=case.engine, num_steps=num_steps)
            yield {"round": number, **row_of(case, runs[case.work])}


def row_of(case: Case, run: Run) -> Row:
    """Seconds of the step and its parts, predicted and measured; the prediction is that for the engine that ran."""
    plan, predicted = run.plan, gplan.simulate(run.plan)
    recompute_s = plan.num_microbatches * sum(cost.recompute_s for cost in plan.stage_costs)
    is_recomputed = plan.recompute == "always"
    return {
        "way": case.way,
        "engine": case.engine,
        "k": plan.num_devices,
        "m": plan.num_microbatches,
        "recompute": plan.recompute,
        "cuts": " ".join(map(str, plan.cuts)),
        "predicted_step_s": predicted.step_s,
        "measured_step_s": run.timeline.step_s,
        **{f"predicted_{name}": share for name, share in parts_of(predicted).items()},
        "predicted_recompute": recompute_s / (plan.num_devices * predicted.step_s) if is_recomputed else 0.0,
        **{f"measured_{name}": share for name, share in parts_of(run.timeline).items()},
        "num_counted": run.num_counted,
        "num_disturbed": run.num_disturbed,
        "num_timed": len(run.step_s) - run.num_warmup_steps,
        "device": plan.device.name,
        "created": run.created[:10],
        "torch": dict(run.versions)["torch"],
    }
