"""A made host that runs plans exactly as predicted, except for the deviations that a test sets."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from gplan.core import Action, Plan, Profile, Run, Span, Timeline, Transfer
from gplan.core.errors import RunError
from gplan.simulation.simulator import simulate
from gplan.strategy_search.planner import balance
from tests.made import make_profile

NUM_STEPS, NUM_WARMUP_STEPS = 8, 3


@dataclass
class MadeHost:
    """Called with a plan it returns a run; `calls` holds the plans in the order in which they were run."""

    truth: Callable[[Plan], Plan] = lambda plan: plan  # the plan with what it really costs
    slowness: Callable[[Plan], float] = lambda _plan: 1.0  # how much longer than that
    drift: float = 0.0  # by what share every run takes longer than the one before
    disturbed: Collection[int] = ()  # runs during which other work uses the processor
    disturbance: float = 1.0  # how much longer those take
    interrupted_at: int | None = None
    fails: Callable[[Plan], bool] = lambda _plan: False
    engine: str = "torch"
    calls: list[Plan] = field(default_factory=list)

    def __call__(self, plan: Plan) -> Run:
        number = len(self.calls)
        self.calls.append(plan)
        if number == self.interrupted_at:
            raise KeyboardInterrupt
        if self.fails(plan):
            raise RunError("a process was stopped")
        is_disturbed = number in self.disturbed
        factor = self.slowness(plan) * (1 + self.drift) ** number * (self.disturbance if is_disturbed else 1.0)
        timeline = times(simulate(self.truth(plan)), factor)
        num_disturbed = NUM_STEPS - NUM_WARMUP_STEPS if is_disturbed else 0
        return measured_run(plan, timeline, engine=self.engine, num_disturbed=num_disturbed)


def run_of(plan: Plan, factor: float = 1.0, *, engine: str = "torch", num_disturbed: int = 0) -> Run:
    """A run in which everything took `factor` times what the plan predicts."""
    return measured_run(plan, times(simulate(plan), factor), engine=engine, num_disturbed=num_disturbed)


def measured_run(plan: Plan, timeline: Timeline, *, engine: str = "torch", num_disturbed: int = 0) -> Run:
    """A run of the plan that measured a timeline."""
    return Run(
        plan=plan, engine=engine, losses=(1.0,) * NUM_STEPS, step_s=(timeline.step_s,) * NUM_STEPS,
        num_warmup_steps=NUM_WARMUP_STEPS, num_disturbed=num_disturbed, num_counted=NUM_STEPS - NUM_WARMUP_STEPS,
        timeline=replace(timeline, origin="measured"), peak_bytes=plan.device_peak_bytes, check=None,
        created="2000-01-01T00:00:00+00:00", versions=(),
    )  # fmt: skip


def times(timeline: Timeline, factor: float) -> Timeline:
    """The timeline with every moment `factor` times as late."""
    return at_moments(timeline, lambda _, moment_s: moment_s * factor)


def at_moments(timeline: Timeline, moment_of: Callable[[Action, float], float]) -> Timeline:
    """The timeline with every start and end of an action, and of its transfer, elsewhere."""
    spans = (
        Span(
            device=x.device,
            action=x.action,
            start_s=moment_of(x.action, x.start_s),
            end_s=moment_of(x.action, x.end_s),
        )
        for x in timeline.spans
    )
    transfers = (
        Transfer(
            action=x.action,
            source=x.source,
            target=x.target,
            start_s=moment_of(x.action, x.start_s),
            end_s=moment_of(x.action, x.end_s),
            num_bytes=x.num_bytes,
        )
        for x in timeline.transfers
    )
    return replace(timeline, spans=tuple(spans), transfers=tuple(transfers))


def usual_profile(**changed: object) -> Profile:
    """Eight layers that differ; micro-batches of 1, 2 and 4 samples were profiled."""
    usual: dict[str, object] = {"optimizer_s": 0.5, "microbatch_sizes": (1, 2, 4), "weight_bytes": 8}
    return make_profile([7.0, 5.0, 2.0, 3.0, 1.0, 3.0, 2.0, 1.0], **{**usual, **changed})  # type: ignore[arg-type]


def usual_plan(profile: Profile | None = None, **changed: object) -> Plan:
    """Two devices, eight micro-batches of two samples, GPipe."""
    asked: dict[str, object] = {"num_devices": 2, "num_microbatches": 8, "microbatch_size": 2}
    return balance(profile or usual_profile(), **{**asked, **changed})  # type: ignore[arg-type]
