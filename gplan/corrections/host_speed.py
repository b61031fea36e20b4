"""The speed of the host: how many times as long the yardstick took in a run as in the profile, and a profile at that speed.

Only one number of each is known, so all layers are taken to be slowed alike. Other work on the host slows some more than
others (docs/cost-model.md, Host speed).
"""

from __future__ import annotations

from dataclasses import replace
from math import hypot

from gplan.core import HostLoad, Profile
from gplan.core.layer_cost import quartiles_median_error

_LEAST_READINGS = 5
_NUM_ERRORS = 2.0  # standard errors, as readings shortly after each other are alike


def speed_ratio(profile: HostLoad | None, run: HostLoad | None) -> tuple[float, float] | None:
    """The ratio of the yardsticks, run over profile, and its uncertainty by the spread of the readings.

    None where either was not read, as on a GPU, or fewer than five times.

    >>> from gplan.core import Timing
    >>> once = HostLoad(yardstick=Timing(median_s=1.0, low_s=0.9, high_s=1.17, num_samples=100))
    >>> twice = HostLoad(yardstick=Timing.exactly(2.0)), HostLoad(yardstick=once.yardstick.times(2.0))
    >>> speed_ratio(once, twice[0]), [round(x, 3) for x in speed_ratio(once, twice[1])]
    (None, [2.0, 0.141])
    """
    timings = [x.yardstick for x in (profile, run) if x is not None and x.yardstick is not None]
    if len(timings) < 2 or any(x.num_samples < _LEAST_READINGS for x in timings):
        return None
    before, now = timings
    if not before.median_s:
        return None
    ratio = now.median_s / before.median_s
    errors = (quartiles_median_error(x.low_s, x.high_s, x.num_samples) / x.median_s for x in timings if x.median_s)
    return ratio, _NUM_ERRORS * ratio * hypot(*errors)


def few_readings_notes(run: HostLoad | None) -> tuple[str, ...]:
    """A note where a run read its host's speed too rarely for `speed_ratio`."""
    count = 0 if run is None or run.yardstick is None else run.yardstick.num_samples
    if not 0 < count < _LEAST_READINGS:
        return ()
    return (
        f"the host's speed was read {count} times, so there is no error at equal host speed, which takes "
        f"{_LEAST_READINGS}: run more steps",
    )


def at_host_speed(profile: Profile, ratio: float) -> Profile:
    """The profile of a host on which all work takes `ratio` times as long, messages between its processes included."""
    engine = profile.engine and replace(
        profile.engine,
        action_s=ratio * profile.engine.action_s,
        sending=profile.engine.sending.times(ratio),
        step_s=ratio * profile.engine.step_s,
    )
    return replace(
        profile.with_costs(lambda cost: cost.corrected(forward=ratio, backward=ratio, recompute=ratio)),
        step=profile.step.corrected(ratio),
        overhead_s=ratio * profile.overhead_s,
        whole_model=tuple(
            replace(x, forward=x.forward.corrected(ratio), backward=x.backward.corrected(ratio))
            for x in profile.whole_model
        ),
        link=profile.link.times(ratio),
        engine=engine,
    )
