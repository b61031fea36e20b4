"""Contention: devices that are cores of one host take longer while others of them compute.

A profile has the factor of each layer, and of the update, beside as many processes as were measured (`num_neighbours`).
Beside fewer, the excess is a proportional share of it; beside more it is that of those measured.
"""

from __future__ import annotations

from dataclasses import replace

from gplan.core import LayerCost, Profile


def beside_each_other(profile: Profile, *, num_devices: int) -> Profile:
    """The profile of one of `num_devices` devices that compute side by side; itself where nothing was measured.

    All times of layers and loss hold from then on. `StepCost.slow_down` is the factor on an update beside the passes of
    other devices, `StepCost.tied_update_s` what an update takes longer beside that of a device with the same weight.
    """
    share = _share(num_devices - 1, profile.num_neighbours)
    if not share:
        return without_contention(profile)
    step = replace(
        profile.step,
        slow_down=_factor(profile.step.slow_down, share),
        update_slow_down=1.0,
        tied_update_s=_tied_update_s(profile, num_devices),
    )

    def lengthened(cost: LayerCost) -> LayerCost:
        by = _factor(cost.slow_down, share)
        return replace(cost.corrected(forward=by, backward=by, recompute=by), slow_down=1.0)

    return replace(profile.with_costs(lengthened), step=step, num_neighbours=0, shares_host=True)


def without_contention(profile: Profile) -> Profile:
    """The profile of a device on a host of its own."""
    if not profile.num_neighbours:
        return profile
    return replace(
        profile.with_costs(lambda cost: replace(cost, slow_down=1.0)),
        step=replace(profile.step, slow_down=1.0, update_slow_down=1.0),
        num_neighbours=0,
    )


def _share(num_others: int, num_measured: int) -> float:
    """The share of the measured excess that so many other devices cause; 0 where none was measured.

    >>> [_share(n, measured) for n, measured in ((1, 2), (5, 2), (5, 0))]
    [0.5, 1.0, 0.0]
    """
    return min(1.0, num_others / num_measured) if num_measured else 0.0


def _factor(slow_down: float, share: float) -> float:
    return 1.0 + (slow_down - 1.0) * share


def _tied_update_s(profile: Profile, num_devices: int) -> float:
    """Seconds that an update takes longer beside that of another device which holds one of the stage's weights.

    Both devices wait for the summed gradients and update at the same time, until the shorter update has ended: an equal
    share of the updates of all devices. Every device that can hold a shared weight updates it; of several replicas one
    counts.
    """
    step, held = profile.step, (*profile.layers, *profile.shared_weights)
    together = _factor(step.update_slow_down, _share(min(1, num_devices - 1), profile.num_neighbours))
    # by the other devices that have shared weights
    again = ((min(num_devices, len(x.layers)) - 1) * x.update_amount for x in profile.shared_weights)
    amount = max(0.0, sum(x.update_amount for x in held)) + sum(again)
    shorter_s = step.spread_s * amount / profile.whole_update_amount / num_devices
    return max(0.0, together - 1.0) * shorter_s
