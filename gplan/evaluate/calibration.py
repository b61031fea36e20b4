"""Corrections of a profile that measured runs teach: drift by kind of layer, contention, optimizer, link, engine time.

Every second plan of a verification is learned from; the others check, with their errors before and after. Each stage's
mean forward and backward is a sum over the kinds of its layers, so kinds that are mixed differently in different stages
get their own factors.

One process alone (the virtual engine) teaches only the drift of the layers. In processes side by side drift and
contention cannot be told apart: what all kinds have in common counts as contention where the profile has any, else as
drift.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
    LayerCost,
    Plan,
    Profile,
    ProfileId,
    Run,
    Stage,
    Timeline,
    Verification,
    WholeModel,
)
from gplan.core.errors import FileError, UsageError
from gplan.core.host_speed import EQUAL_SPEED
from gplan.core.machine import FREE_LINK
from gplan.core.units import counted, now_text, percent_text
from gplan.corrections.contention import _share as contention_share
from gplan.evaluate.attribution import MeasuredTimes
from gplan.evaluate.replanning import reprice, why_not_replannable, with_link_times
from gplan.simulation.simulator import simulate

_NOISE = 0.03  # of a measured figure
_COMMON_SPREAD, _OWN_SPREAD = 0.3, 0.1  # expected deviation of the common factor from 1, and of each factor from it
_MOST_COMMON, _MOST_OWN = 4.0, 2.0  # largest factor, and inverse of the smallest
_LEAST_CONTENTION = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured time, its predicted pieces by name, and the part of the prediction that has no factor."""

    measured_s: float
    pieces_s: Mapping[str, float]
    fixed_s: float = 0.0


def common_factor(samples: Sequence[Sample]) -> float:
    """The factor f that explains measured = fixed + f * (sum of pieces) best; 1 without samples.

    Least squares of the relative error with shrinkage towards 1 (ridge), so that few or odd samples do not make it wild.

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
    """One factor for each name of a piece; measured = fixed + sum of factor[name] * piece[name].

    As `common_factor`, with shrinkage towards the common factor: a name with little evidence stays near it.
    """
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


def calibrated(profile: Profile, calibration: Calibration) -> Profile:
    """The profile with its times, link and engine corrected, and a note about it.

    Raises FileError where the calibration was learned for another profile.
    """
    if not calibration.belongs_to(profile):
        learned = calibration.profile
        raise FileError(
            f"the calibration was learned for the profile of {learned.created} on {learned.device}, the profile is of "
            f"{profile.created} on {profile.device.name}; calibrate again with `gplan verify --calibrate`"
        )
    factors = {x.kind: (x.forward, x.backward) for x in calibration.kinds}
    share = contention_share(calibration.num_devices - 1, profile.num_neighbours)

    def corrected_cost(cost: LayerCost, kind: str) -> LayerCost:
        forward, backward = factors.get(kind, (1.0, 1.0))
        contention = cost.contention
        if share:  # with the calibration's number of devices, the layer takes `calibration.contention` times as long
            others = calibration.num_devices - 1
            contended = (
                1 + (contention - 1) * contention_share(others, profile.num_neighbours)
            ) * calibration.contention
            contention = max(_LEAST_CONTENTION, 1.0 + (contended - 1.0) / share)
        return replace(cost.corrected(forward=forward, backward=backward, recompute=backward), contention=contention)

    layers = (
        replace(layer, costs=tuple(corrected_cost(cost, layer.kind) for cost in layer.costs))
        for layer in profile.layers
    )
    corrected = replace(
        with_link_times(profile, calibration.link),
        layers=tuple(layers),
        loss=tuple(corrected_cost(cost, profile.layers[-1].kind) for cost in profile.loss),
        step=profile.step.corrected(calibration.optimizer),
        engine=_corrected_engine(profile.engine, calibration.action_s),
        plan_notes=(*profile.plan_notes, calibration_note(calibration)),
    )
    return replace(corrected, whole_model=rescale_whole_model(profile, corrected))


def calibration_note(calibration: Calibration) -> str:
    """How many plans the figures are calibrated by, and the errors of other plans before and after."""
    learned = f"calibrated by {counted(len(calibration.learned_from), 'plan')} run with the {calibration.engine} engine"
    if not calibration.held_out:
        return f"{learned}; no other plan was run to check it by"
    before, after = (max(abs(x.equal_speed_ratios[i] - 1.0) for x in calibration.held_out) for i in range(2))
    others = counted(len(calibration.held_out), "other")
    return (
        f"{learned}; on {others} the largest error of the step was "
        f"{percent_text(before)} without and {percent_text(after)} with it"
        + (f" {EQUAL_SPEED}" if any(x.slowdown is not None for x in calibration.held_out) else "")
    )


def _corrected_engine(engine: EngineCost | None, action_s: float) -> EngineCost | None:
    if engine is None:
        return EngineCost(action_s=action_s, sending=FREE_LINK) if action_s else None
    return replace(engine, action_s=action_s)


def rescale_whole_model(before: Profile, after: Profile) -> tuple[WholeModel, ...]:
    """The whole model's times, scaled as the sum of its layers was, so that the two remain comparable."""
    rescaled = []
    for i, whole in enumerate(before.whole_model):
        forward, backward = (
            b / a if a else 1.0 for a, b in zip(before.one_stage_s(i), after.one_stage_s(i), strict=True)
        )
        rescaled.append(
            replace(whole, forward=whole.forward.corrected(forward), backward=whole.backward.corrected(backward))
        )
    return tuple(rescaled)


def calibrate(verification: Verification, profile: Profile) -> Calibration:
    """A calibration from every second plan of a verification, the chosen one first; the rest check it.

    The profile is as measured, not calibrated before. Raises FileError where it is not that of the plans, UsageError
    where the plans are for a machine of different devices.
    """
    check_calibratable(verification.chosen.plan)
    learned = _fit(verification, profile)
    checks = (_held_out(x, profile, learned) for x in verification.contenders[1::2])
    return replace(learned, held_out=tuple(checks))


def check_calibratable(plan: Plan) -> None:
    """Raise UsageError where runs of the plan cannot calibrate a profile."""
    if reason := why_not_replannable(plan):
        raise UsageError(f"nothing can be learned from runs of this plan: {reason}; verify it without calibrating")


def pricing_profile(plan: Plan, profile: Profile, calibration: Calibration | None, *, engine: str = "torch") -> Profile:
    """The profile that the plan's costs come from: as measured, or calibrated where only that gives the plan's step.

    `engine` is that of the run whose plan it is: plans run by the virtual engine are without contention.
    """
    is_other_model = plan.model.digest != profile.model.digest
    if calibration is None or not calibration.belongs_to(profile) or is_other_model or why_not_replannable(plan):
        return profile
    corrected = calibrated(profile, calibration)

    def gives_step(candidate: Profile) -> bool:
        return plan.prediction.gives(reprice(plan, candidate, engine=engine).prediction.step_s)

    return corrected if gives_step(corrected) and not gives_step(profile) else profile


@dataclass(frozen=True, kw_only=True)
class _CalibrationRun:
    """A run to learn from, and its plan with the costs of the uncalibrated profile."""

    plan: Plan
    run: Run
    profile: Profile

    @cached_property
    def predicted(self) -> Timeline:
        return simulate(self.plan)

    @cached_property
    def timeline(self) -> Timeline:
        """The measured one, at the mean speed of the host in the profile where both speeds are known."""
        return self.run.timeline.times(1.0 / (self.run.slowdown or 1.0))

    @cached_property
    def measured(self) -> MeasuredTimes:
        return MeasuredTimes(self.plan, self.timeline)

    def forwards(self) -> Iterator[Sample]:
        """Each stage's mean forward, in pieces by kind of layer."""
        for stage in self.plan.stages:
            yield self._sample(stage, [x for x, _ in stage.layer_times_s], (ActionKind.FORWARD,))

    def backwards(self) -> Iterator[Sample]:
        """Each stage's mean backward, whole or in halves, with its recompute."""
        for stage in self.plan.stages:
            yield self._sample(stage, [x for _, x in stage.layer_times_s], BACKWARD_KINDS)

    def updates(self) -> Iterator[Sample]:
        """Each device's optimizer; none with replicas, whose all-reduces may run in it."""
        if self.plan.num_replicas == 1:
            costs = self.plan.stage_costs
            for device in range(self.plan.num_devices):
                pieces = {"optimizer": sum(costs[x.index].optimizer_s for x in self.plan.stages_of(device))}
                measured_s = self.run.timeline.update_s(device) / _of_device(self.run.update_slowdowns, device)
                yield Sample(measured_s=measured_s, pieces_s=pieces)

    def transfers(self) -> Iterator[Sample]:
        """The transfers that devices waited for."""
        for kind, measured_s in self.measured.transfers.items():
            yield Sample(measured_s=measured_s, pieces_s={"link": self.measured.predicted.transfers[kind]})

    def gap_errors_s(self) -> Iterator[float]:
        """Measured minus predicted engine time after actions, by stage and kind."""
        for kind, measured_s in self.measured.gaps.items():
            yield measured_s - self.measured.predicted.gaps[kind]

    def _sample(self, stage: Stage, layers_s: Sequence[float], kinds: Sequence[ActionKind]) -> Sample:
        """A stage's mean seconds per micro-batch in actions of these kinds."""
        predicted_s, measured_s = (x.mean_s(*kinds, stage=stage.index) for x in (self.predicted, self.run.timeline))
        measured_s /= _of_device(self.run.device_slowdowns, self.plan.devices[stage.index])
        fixed_s = self.predicted.actions_per_microbatch(*kinds, stage=stage.index) * self.profile.overhead_s
        total_s = sum(layers_s) or 1.0
        kind_of, pieces = {x.name: x.kind for x in self.profile.layers}, dict[str, float]()
        for name, seconds in zip(stage.layer_names, layers_s, strict=True):
            share = max(0.0, predicted_s - fixed_s) * seconds / total_s
            pieces[kind_of[name]] = pieces.get(kind_of[name], 0.0) + share
        return Sample(measured_s=measured_s, pieces_s=pieces, fixed_s=fixed_s)


def _of_device(slowdowns: Sequence[float], device: int) -> float:
    """How many times as long a device took as at the host's speed in the profile; 1 where that is unknown."""
    return slowdowns[device] if slowdowns else 1.0


def _fit(verification: Verification, profile: Profile) -> Calibration:
    """All factors, not checked yet."""
    learned_from, engine = verification.contenders[::2], verification.engine
    runs = [
        _CalibrationRun(plan=reprice(x.plan, profile, engine=engine), run=x.run, profile=profile) for x in learned_from
    ]
    forwards = [sample for run in runs for sample in run.forwards()]
    backwards = [sample for run in runs for sample in run.backwards()]
    has_neighbours, num_devices = engine != "virtual", verification.chosen.plan.num_devices
    has_contention = has_neighbours and contention_share(num_devices - 1, profile.num_neighbours) > 0
    contention = common_factor([*forwards, *backwards]) if has_contention else 1.0
    forward, backward = own_factors(forwards), own_factors(backwards)
    kinds = (KindDrift(kind=x, forward=forward[x] / contention, backward=backward[x] / contention) for x in forward)
    action_s = profile.engine.action_s if profile.engine else 0.0
    errors = [x for run in runs for x in run.gap_errors_s()] if has_neighbours else []
    if errors:  # the fewer samples, the less the engine time moves
        action_s = max(0.0, action_s + fmean(errors) * len(errors) / (len(errors) + 1))
    transfers = [sample for run in runs for sample in run.transfers()] if has_neighbours else []
    return Calibration(
        profile=ProfileId.of(profile),
        engine=engine,
        num_devices=num_devices,
        kinds=tuple(kinds),
        contention=contention,
        optimizer=common_factor(list(chain.from_iterable(x.updates() for x in runs))),
        link=common_factor(transfers),
        action_s=action_s,
        learned_from=tuple(x.label for x in learned_from),
        held_out=(),
        created=now_text(),
    )


def _held_out(contender: Contender, profile: Profile, learned: Calibration) -> HeldOut:
    before, after = (
        reprice(contender.plan, x, engine=learned.engine).prediction.step_s
        for x in (profile, calibrated(profile, learned))
    )
    return HeldOut(
        label=contender.label,
        measured_s=contender.measured_s,
        before_s=before,
        after_s=after,
        slowdown=contender.slowdown,
    )
