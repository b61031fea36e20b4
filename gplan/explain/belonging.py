"""Whether a profile is the one that a plan was made from; if so, the profile in the plan's order of layers."""

from __future__ import annotations

from gplan.errors import FileError
from gplan.explain.explanation import Setting
from gplan.explain.whatif import priced
from gplan.nouns import Plan, Profile
from gplan.order import in_order
from gplan.units import seconds_text

_ROUNDING = 1e-6
_REMEDY = "expected the profile that the plan was made from: name it with --profile, or balance again"


def profile_in_plan_order(plan: Plan, profile: Profile) -> Profile:
    """The profile with its layers in the plan's order; raises FileError where the two do not belong together."""
    if plan.model.digest != profile.model.digest:
        raise FileError(
            f"the plan is for {plan.model.name} (digest {plan.model.digest[:12]}), the profile is of {profile.model.name} "
            f"(digest {profile.model.digest[:12]}); {_REMEDY}"
        )
    places = {layer.name: i for i, layer in enumerate(profile.layers)}
    names = plan.layer_names
    unknown = next((name for name in names if name not in places), None)
    if unknown is not None:
        raise FileError(f"the plan has a layer {unknown}, which the profile does not have; {_REMEDY}")
    if len(set(names)) != len(profile.layers) or len(names) != len(profile.layers):
        raise FileError(f"the plan has {len(names)} layers, the profile {len(profile.layers)}; {_REMEDY}")
    low, high = profile.microbatch_sizes[0], profile.microbatch_sizes[-1]
    if not low <= plan.microbatch_size <= high:
        raise FileError(
            f"the plan has micro-batches of {plan.microbatch_size}, the profile was made at {low} to {high}; {_REMEDY}"
        )
    return in_order(profile, [places[name] for name in names])


def notes_on(plan: Plan, profile: Profile, setting: Setting) -> tuple[str, ...]:
    """What is odd about the pair: times that are not those that the plan was made with."""
    found_s, planned_s = priced(profile, setting, plan.cuts).step_s, plan.prediction.step_s
    if abs(found_s - planned_s) <= _ROUNDING * planned_s:
        return ()
    return (
        f"with this profile the plan's step takes {seconds_text(found_s)}, not {seconds_text(planned_s)}: it was measured "
        "again after the plan was made, or the plan's costs come from elsewhere; `gplan balance` makes them agree",
    )
