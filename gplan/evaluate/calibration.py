"""What runs teach about a profile: drift per kind of layer, contention, optimizer, link, and the engine's gaps.

Every second plan of a verification teaches, the others only check: their errors are kept without and with what was
learned. Each stage's mean forward and backward is a sum over the kinds of its layers, so kinds that are mixed
differently in different stages can be told apart; those that are not share one factor (`fitting.py`).

One process alone (the virtual engine) teaches how far the layers' own times have drifted, and nothing of engine and
link. In processes side by side drift and contention cannot be told apart: what all kinds have in common is taken for
contention where the profile has any, else for drift.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from statistics import fmean

import numpy as np

from gplan.core import (
    BACKWARD_KINDS,
    ActionKind,
    Calibration,
    Contender,
    EngineCost,
    HeldOut,
    KindDrift,
    Layer,
    LayerCost,
    Plan,
    Profile,
    ProfileId,
    Run,
    Stage,
    Verification,
    WholeModel,
)
from gplan.core.errors import FileError, UsageError
from gplan.core.machine import FREE_LINK
from gplan.core.units import counted, percent_text
from gplan.evaluate.attribution import Facts, Seen, predicted_facts
from gplan.evaluate.explain.alternatives import obstacle, problem_of, setting_of, with_link_times
from gplan.evaluate.explain.bottleneck import profile_in_plan_order
from gplan.partition.plan_evaluation import price
from gplan.partition.problem import Solution
from gplan.schedules.dependencies import execution_order
from gplan.simulation.contention import plan_alone
from gplan.simulation.simulator import schedule_of, simulate

# Factors that explain measured sums by predicted pieces, and that few or odd samples cannot make wild.
#
# A sum is measured, its pieces were predicted: measured = fixed + factor[a] piece[a] + factor[b] piece[b] + ... All
# pieces first share one factor; then each name gets its own deviation from it. Both are least squares of the relative
# error with shrinkage (ridge), as for figures that are noisy by 3 %, a common factor that is 1 to within 30 % and
# deviations from it of 10 %. Factors end between a half and twice the common one, which itself ends between a quarter and
# four.


_NOISE = 0.03
_COMMON_SPREAD, _OWN_SPREAD = 0.3, 0.1
_MOST_COMMON, _MOST_OWN = 4.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured time, the predicted pieces of it by name, and what of the prediction has no factor."""

    measured_s: float
    pieces_s: Mapping[str, float]
    fixed_s: float = 0.0


def common_factor(samples: Sequence[Sample]) -> float:
    """The one factor on all pieces; 1 without samples.

    >>> round(common_factor([Sample(measured_s=1.2, pieces_s={"a": 0.5, "b": 0.5})]), 2)
    1.2
    """
    used = [x for x in samples if x.measured_s > 0]
    pieces = np.array([sum(x.pieces_s.values()) / x.measured_s for x in used])
    wanted = np.array([1 - x.fixed_s / x.measured_s for x in used])
    prior = (_NOISE / _COMMON_SPREAD) ** 2
    factor = (pieces @ wanted + prior) / (pieces @ pieces + prior)
    return float(np.clip(factor, 1 / _MOST_COMMON, _MOST_COMMON))


def own_factors(samples: Sequence[Sample]) -> dict[str, float]:
    """The factor of every name among the pieces, near the common one where little is known of it."""
    names = sorted({name for x in samples for name in x.pieces_s})
    used = [x for x in samples if x.measured_s > 0]
    common = common_factor(used)
    pieces = np.array([[common * x.pieces_s.get(name, 0.0) / x.measured_s for name in names] for x in used])
    if not pieces.size:
        return dict.fromkeys(names, common)
    missing = np.array([1 - x.fixed_s / x.measured_s for x in used]) - pieces.sum(axis=1)
    prior = (_NOISE / _OWN_SPREAD) ** 2 * np.eye(len(names))
    own = np.clip(1 + np.linalg.solve(pieces.T @ pieces + prior, pieces.T @ missing), 1 / _MOST_OWN, _MOST_OWN)
    return {name: common * float(x) for name, x in zip(names, own, strict=True)}


# A profile corrected by what running plans taught; everything after it works as with any profile.


_LEAST_CONTENTION = 0.1


def calibrated(profile: Profile, calibration: Calibration) -> Profile:
    """The profile with its times, link and engine corrected, and a note that says so.

    Raises FileError where the calibration was learned for another profile.
    """
    if not calibration.belongs_to(profile):
        learned = calibration.profile
        raise FileError(
            f"the calibration was learned for the profile of {learned.created} on {learned.device}, the profile is of "
            f"{profile.created} on {profile.device.name}; calibrate again with `gplan verify --calibrate`"
        )
    correction = _Correction(calibration, company_share(profile, calibration.num_devices))
    layers = tuple(correction.layer(layer) for layer in profile.layers)
    loss = tuple(correction.cost(cost, profile.layers[-1].kind) for cost in profile.loss)
    corrected = replace(
        with_link_times(profile, calibration.link),
        layers=layers,
        loss=loss,
        step=profile.step.corrected(calibration.optimizer),
        engine=_engine(profile.engine, calibration.action_s),
        plan_notes=(*profile.plan_notes, note_on(calibration)),
    )
    return replace(corrected, whole_model=as_much_longer(profile, corrected))


def note_on(calibration: Calibration) -> str:
    """That figures are calibrated, by what, and what it did for plans that it was not learned from."""
    learned = f"calibrated by {counted(len(calibration.learned_from), 'plan')} run with the {calibration.engine} engine"
    if not calibration.held_out:
        return f"{learned}; no other plan was run to check it by"
    before, after = (
        max(abs(x) for x in errors)
        for errors in zip(*((x.error_before, x.error_after) for x in calibration.held_out), strict=True)
    )
    others = counted(len(calibration.held_out), "other")
    return (
        f"{learned}; on {others} the largest error of the step was "
        f"{percent_text(before)} without and {percent_text(after)} with it"
    )


def company_share(profile: Profile, num_devices: int) -> float:
    """Which share of the profile's contention so many devices bring about; 0 where it has none."""
    return min(1.0, (num_devices - 1) / profile.num_neighbours) if profile.num_neighbours else 0.0


class _Correction:
    """What is done to every layer."""

    def __init__(self, calibration: Calibration, share: float) -> None:
        self._kinds = {x.kind: (x.forward, x.backward) for x in calibration.kinds}
        self._factor, self._share = calibration.contention, share

    def layer(self, layer: Layer) -> Layer:
        """With all of its costs corrected."""
        return replace(layer, costs=tuple(self.cost(cost, layer.kind) for cost in layer.costs))

    def cost(self, cost: LayerCost, kind: str) -> LayerCost:
        """Forward by one factor, all that the backward pass does by another."""
        forward, backward = self._kinds.get(kind, (1.0, 1.0))
        corrected = cost.corrected(forward=forward, backward=backward, recompute=backward)
        return replace(corrected, contention=self._contention(cost.contention))

    def _contention(self, contention: float) -> float:
        """Such that in the company it was learned in the layer takes `factor` times as long."""
        if not self._share:
            return contention
        in_company = 1.0 + (contention - 1.0) * self._share
        return max(_LEAST_CONTENTION, 1.0 + (in_company * self._factor - 1.0) / self._share)


def _engine(engine: EngineCost | None, action_s: float) -> EngineCost | None:
    if engine is None:
        return EngineCost(action_s=action_s, sending=FREE_LINK) if action_s else None
    return replace(engine, action_s=action_s)


def as_much_longer(before: Profile, after: Profile) -> tuple[WholeModel, ...]:
    """The model in one piece, longer by what its layers together have become, so that the two still compare."""
    found = []
    for i, whole in enumerate(before.whole_model):
        forward, backward = (
            b / a if a else 1.0 for a, b in zip(before.one_stage_s(i), after.one_stage_s(i), strict=True)
        )
        longer = replace(whole, forward=whole.forward.corrected(forward), backward=whole.backward.corrected(backward))
        found.append(longer)
    return tuple(found)


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
        flow = execution_order(schedule_of(self.plan))
        facts = predicted_facts(self.plan, flow)
        return facts, Seen(flow, self.run.timeline, facts)

    def _sample(self, stage: Stage, by_layer_s: Sequence[float], kinds: Sequence[ActionKind]) -> Sample:
        """What a micro-batch takes of a stage in actions of these kinds."""
        predicted, measured = simulate(self.plan), self.run.timeline
        predicted_s, measured_s = (x.mean_s(*kinds, stage=stage.index) for x in (predicted, measured))
        num_actions = sum(
            seconds > 0 for kind in kinds for seconds in predicted.microbatch_s(kind, stage=stage.index).values()
        )
        fixed_s = num_actions / predicted.num_microbatches * self.profile.overhead_s
        total_s = sum(by_layer_s) or 1.0
        kind_of, pieces = {x.name: x.kind for x in self.profile.layers}, dict[str, float]()
        for name, seconds in zip(stage.layer_names, by_layer_s, strict=True):
            share = max(0.0, predicted_s - fixed_s) * seconds / total_s
            pieces[kind_of[name]] = pieces.get(kind_of[name], 0.0) + share
        return Sample(measured_s=measured_s, pieces_s=pieces, fixed_s=fixed_s)


def _lesson(contender: Contender, profile: Profile, engine: str) -> _Lesson:
    return _Lesson(plan=planned_anew(contender.plan, profile, engine=engine), run=contender.run, profile=profile)


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
