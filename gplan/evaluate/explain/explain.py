"""Why a plan is as it is: what holds it up, what would help, how far it is from changing,
and what others would have done.

Everything is computed by what made the plan: the simulator's timeline, the balancer, the cost model. The numbers are
one value, `Explanation`; `gplan.reporting.text.explanation` puts them in words.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gplan.core import Plan, Profile
from gplan.evaluate.compare import samples_per_s
from gplan.evaluate.explain.alternatives import (
    memory_gain_s,
    not_tried,
    obstacle,
    options_of,
    rule_outcomes,
    setting_of,
)
from gplan.evaluate.explain.bottleneck import bottleneck_of, notes_on, profile_in_plan_order
from gplan.evaluate.explain.explanation import Explanation, Option, Sensitivities, Setting
from gplan.evaluate.explain.jitter import spread_of
from gplan.evaluate.explain.sensitivity import MOST_FACTOR, sensitivities_of

OPTIONS_S, SENSITIVITIES_S = 20.0, 10.0
"""Seconds after which no other option, and no other layer, is tried."""


def explain(
    plan: Plan,
    profile: Profile,
    *,
    options_s: float = OPTIONS_S,
    sensitivities_s: float = SENSITIVITIES_S,
    progress: Callable[[str, float], None] = lambda _text, _share: None,
) -> Explanation:
    """The reasons for a plan, from the profile that it was made from.

    What the time does not suffice for is named in the result. `progress` is called with a text and the share done of
    the options, then of the layers. Raises FileError where plan and profile do not belong together.
    """
    ordered, setting, why_not = profile_in_plan_order(plan, profile), setting_of(plan), obstacle(plan)
    deadline_s = time.perf_counter() + options_s
    options = (
        not_tried(setting, why_not)
        if why_not
        else options_of(profile, setting, deadline_s=deadline_s, progress=progress)
    )
    bottleneck = bottleneck_of(plan, memory_gain_s=memory_gain_s(options))
    deadline_s = time.perf_counter() + sensitivities_s
    return Explanation(
        model=plan.model.name,
        setting=setting,
        step_s=plan.prediction.step_s,
        samples_per_s=samples_per_s(plan, plan.prediction.step_s),
        peak_bytes=plan.peak_bytes,
        bottleneck=bottleneck,
        options=options,
        sensitivities=_sensitivities(profile, setting, options[0], bottleneck.device, deadline_s, progress),
        rules=() if why_not else tuple(rule_outcomes(plan, ordered, setting)),
        spread=spread_of(plan, ordered),
        notes=() if why_not else notes_on(plan, ordered, setting),
    )


def _sensitivities(
    profile: Profile,
    setting: Setting,
    same: Option,
    bottleneck: int,
    deadline_s: float,
    progress: Callable[[str, float], None],
) -> Sensitivities:
    """As `sensitivities_of`; none, with the reason, for a plan that cannot be balanced anew or has no cut."""
    reason = same.reason
    if setting.num_stages == 1:
        reason = "one stage has no cut that could move"
    elif setting.num_stages == len(profile.layers) and not profile.values:
        reason = "every stage has one layer, and none can move"
    elif same.outcome is not None and not same.outcome.is_proven:
        reason = "the best plan itself was not proven in time"
    if reason:
        return Sensitivities(layers=(), left_out=(), most_factor=MOST_FACTOR, reason=reason)
    return sensitivities_of(profile, setting, bottleneck=bottleneck, deadline_s=deadline_s, progress=progress)
