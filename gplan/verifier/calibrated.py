"""A profile corrected by what running plans taught; everything after it works as with any profile."""

from __future__ import annotations

from dataclasses import replace

from gplan.errors import FileError
from gplan.explain.whatif import FREE_LINK, with_link_times
from gplan.nouns import Calibration, EngineCost, Layer, LayerCost, Profile, WholeModel
from gplan.units import counted, percent_text

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
    return replace(corrected, whole=as_much_longer(profile, corrected))


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
    for i, whole in enumerate(before.whole):
        forward, backward = (
            b / a if a else 1.0 for a, b in zip(before.one_stage_s(i), after.one_stage_s(i), strict=True)
        )
        longer = replace(whole, forward=whole.forward.corrected(forward), backward=whole.backward.corrected(backward))
        found.append(longer)
    return tuple(found)
