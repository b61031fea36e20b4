"""What runs teach about a profile: drift per kind of layer, contention, optimizer, link, and the engine's gaps.

Every second plan of a verification teaches, the others only check: their errors are kept without and with what was
learned. Each stage's mean forward and backward is a sum over the kinds of its layers, so kinds that are mixed
differently in different stages can be told apart; those that are not share one factor (`fitting.py`).

One process alone (the virtual engine) teaches how far the layers' own times have drifted, and nothing of engine and
link. In processes side by side drift and contention cannot be told apart: what all kinds have in common is taken for
contention where the profile has any, else for drift.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from statistics import fmean

from gplan.alone import plan_alone
from gplan.balancer import Solution
from gplan.balancer.price import price
from gplan.errors import UsageError
from gplan.explain.belonging import profile_in_plan_order
from gplan.explain.whatif import obstacle, problem_of, setting_of
from gplan.nouns import (
    BACKWARD_KINDS,
    ActionKind,
    Calibration,
    Contender,
    HeldOut,
    KindDrift,
    Plan,
    Profile,
    ProfileId,
    Run,
    Stage,
    Timeline,
    Verification,
)
from gplan.schedules import flow_of
from gplan.simulator import schedule_of, simulate
from gplan.verifier.calibrated import calibrated, company_share
from gplan.verifier.facts import Facts, Seen, predicted_facts
from gplan.verifier.fitting import Sample, common_factor, own_factors

_ROUNDING = 1e-6


def calibrate(verification: Verification, profile: Profile) -> Calibration:
    """What every second plan of a verification, the chosen one first, teaches about the profile; the rest check it.

    The profile is as it was measured, not calibrated before. Raises FileError where it is not that of the plans,
    UsageError where the plans are for a machine of devices that differ.
    """
    check_teachable(verification.chosen.plan)
    lessons = [_lesson(x, profile, verification.engine) for x in verification.contenders[::2]]
    learned = _learned(lessons, profile, verification)
    checks = (_held_out(x, profile, learned) for x in verification.contenders[1::2])
    return replace(learned, held_out=tuple(checks))


def check_teachable(plan: Plan) -> None:
    """Raise UsageError where runs of the plan could not be learned from."""
    if reason := obstacle(plan):
        raise UsageError(f"nothing can be learned from runs of this plan: {reason}; verify it without calibrating")


def planned_anew(plan: Plan, profile: Profile, *, engine: str) -> Plan:
    """The plan's stages and setting priced with a profile, as the engine carries them out."""
    ordered = profile_in_plan_order(plan, profile)
    stages = tuple(tuple(range(x.first_layer, x.end_layer)) for x in plan.stages)
    problem = problem_of(ordered, setting_of(plan))
    priced = price(problem, Solution(stages=stages, lower_bound_s=0.0, solver="given"), solve_s=0.0)
    return plan_alone(priced) if engine == "virtual" else priced


def profile_of(plan: Plan, profile: Profile, calibration: Calibration | None, *, engine: str = "torch") -> Profile:
    """The profile that the plan was priced with: as it was measured, or, where only that gives its step, calibrated.

    `engine` is that of the run whose plan it is, as the virtual one has its plans without contention.
    """
    is_another = plan.model.digest != profile.model.digest
    if calibration is None or not calibration.belongs_to(profile) or is_another or obstacle(plan):
        return profile
    corrected, step_s = calibrated(profile, calibration), plan.prediction.step_s

    def error_s(known: Profile) -> float:
        return abs(planned_anew(plan, known, engine=engine).prediction.step_s - step_s)

    return corrected if error_s(corrected) < _ROUNDING * step_s <= error_s(profile) else profile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lesson:
    """A run, and the plan that it carried out as the uncalibrated profile prices it."""

    plan: Plan
    run: Run
    profile: Profile

    def forwards(self) -> Iterator[Sample]:
        """Each stage's mean forward, in pieces by kind of layer."""
        for stage in self.plan.stages:
            yield self._sample(stage, stage.layer_forward_s, (ActionKind.FORWARD,))

    def backwards(self) -> Iterator[Sample]:
        """Each stage's mean backward, whole or in halves, with what it recomputes."""
        for stage in self.plan.stages:
            yield self._sample(stage, stage.layer_backward_s, BACKWARD_KINDS)

    def updates(self) -> Iterator[Sample]:
        """Each device's optimizer; replicas may add up gradients in it, which teaches nothing."""
        if self.plan.num_replicas > 1:
            return
        for device in range(self.plan.num_devices):
            costs = [x.cost for x in self.plan.stages_of(device)]
            pieces = {"optimizer": sum(x.optimizer_s for x in costs)}
            yield Sample(measured_s=self.run.timeline.update_s(device), pieces_s=pieces)

    def transfers(self) -> Iterator[Sample]:
        """Those that devices waited for."""
        facts, seen = self._facts()
        for kind, measured_s in seen.transfers().items():
            yield Sample(measured_s=measured_s, pieces_s={"link": facts.transfers[kind]})

    def gaps_missed_s(self) -> Iterator[float]:
        """By how much longer than predicted the engine took after actions of each kind and stage."""
        facts, seen = self._facts()
        for kind, measured_s in seen.gaps().items():
            yield measured_s - facts.gaps[kind]

    def _facts(self) -> tuple[Facts, Seen]:
        flow = flow_of(schedule_of(self.plan))
        facts = predicted_facts(self.plan, flow)
        return facts, Seen(flow, self.run.timeline, facts)

    def _sample(self, stage: Stage, by_layer_s: Sequence[float], kinds: Sequence[ActionKind]) -> Sample:
        """What a micro-batch takes of a stage in actions of these kinds."""
        predicted_s, num_actions = _per_microbatch(simulate(self.plan), stage.index, kinds)
        measured_s, _ = _per_microbatch(self.run.timeline, stage.index, kinds)
        fixed_s, total_s = num_actions * self.profile.overhead_s, sum(by_layer_s) or 1.0
        kind_of, pieces = {x.name: x.kind for x in self.profile.layers}, dict[str, float]()
        for name, seconds in zip(stage.layer_names, by_layer_s, strict=True):
            share = max(0.0, predicted_s - fixed_s) * seconds / total_s
            pieces[kind_of[name]] = pieces.get(kind_of[name], 0.0) + share
        return Sample(measured_s=measured_s, pieces_s=pieces, fixed_s=fixed_s)


def _lesson(contender: Contender, profile: Profile, engine: str) -> _Lesson:
    return _Lesson(plan=planned_anew(contender.plan, profile, engine=engine), run=contender.run, profile=profile)


def _per_microbatch(timeline: Timeline, stage: int, kinds: Sequence[ActionKind]) -> tuple[float, float]:
    """Seconds of a stage's actions of these kinds, and how many of them take any time, by micro-batch."""
    spans = [x for x in timeline.spans if x.action.stage == stage and x.action.kind in kinds]
    num_microbatches = timeline.num_microbatches
    return sum(x.duration_s for x in spans) / num_microbatches, sum(x.duration_s > 0 for x in spans) / num_microbatches


def _learned(lessons: Sequence[_Lesson], profile: Profile, verification: Verification) -> Calibration:
    """All factors; nothing is checked yet."""
    forwards = [x for lesson in lessons for x in lesson.forwards()]
    backwards = [x for lesson in lessons for x in lesson.backwards()]
    is_alone, num_devices = verification.engine == "virtual", verification.chosen.plan.num_devices
    has_company = not is_alone and company_share(profile, num_devices) > 0
    contention = common_factor([*forwards, *backwards]) if has_company else 1.0
    forward, backward = own_factors(forwards), own_factors(backwards)
    kinds = (KindDrift(kind=x, forward=forward[x] / contention, backward=backward[x] / contention) for x in forward)
    base_s = profile.engine.action_s if profile.engine else 0.0
    return Calibration(
        profile=ProfileId.of(profile),
        engine=verification.engine,
        num_devices=num_devices,
        kinds=tuple(kinds),
        contention=contention,
        optimizer=common_factor(list(chain.from_iterable(x.updates() for x in lessons))),
        link=1.0 if is_alone else common_factor(list(chain.from_iterable(x.transfers() for x in lessons))),
        action_s=base_s if is_alone else _action_s(base_s, lessons),
        learned_from=tuple(x.label for x in verification.contenders[::2]),
        held_out=(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _action_s(base_s: float, lessons: Sequence[_Lesson]) -> float:
    """The engine's time after an action, moved by what it took longer, the less so the fewer samples there are."""
    missed = [x for lesson in lessons for x in lesson.gaps_missed_s()]
    if not missed:
        return base_s
    return max(0.0, base_s + fmean(missed) * len(missed) / (len(missed) + 1))


def _held_out(contender: Contender, profile: Profile, learned: Calibration) -> HeldOut:
    before, after = (
        planned_anew(contender.plan, x, engine=learned.engine).prediction.step_s
        for x in (profile, calibrated(profile, learned))
    )
    return HeldOut(label=contender.label, measured_s=contender.measured_s, before_s=before, after_s=after)
