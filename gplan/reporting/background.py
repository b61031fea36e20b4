"""What the profile adds to the report of a plan: the reasons for it, and the step for other numbers of devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gplan.alone import profile_alone
from gplan.explain import Explanation, explain
from gplan.nouns import Plan, Profile, Run
from gplan.reporting.choices import Choice, choices_of, planned_choices
from gplan.reporting.frames import Subject, plan_of
from gplan.verifier import planned_anew

_ROUNDING = 1e-6
_OPTIONS_S = 8.0  # after which no other option is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """What is known of a plan beside its own figures."""

    choices: tuple[Choice, ...]
    explanation: Explanation | None = None  # None: there was no profile

    @property
    def is_planned(self) -> bool:
        """Whether each choice is a plan of its own, and not this one with other micro-batches."""
        return self.explanation is not None


def background_of(
    subject: Subject,
    profile: Profile | None,
    *,
    progress: Callable[[str, float], None] = lambda _text, _share: None,
) -> Background:
    """From a plan, and better with the profile that it was made from; raises FileError where it was not.

    A run by the virtual engine has its plan without contention, and so are those that it is compared with.
    """
    plan = plan_of(subject)
    if profile is None:
        return Background(choices=choices_of(plan))
    is_alone = isinstance(subject, Run) and subject.engine == "virtual"
    known = profile_alone(profile) if is_alone else profile
    reasons = explain(plan, known, options_s=_OPTIONS_S, sensitivities_s=0.0, progress=progress)
    if is_alone and reasons.notes and _is_priced_by(plan, profile):
        reasons = replace(reasons, notes=())
    tried = reasons.options[0].outcome is not None
    choices = planned_choices(plan, known, progress=progress) if tried else choices_of(plan)
    return Background(choices=choices, explanation=reasons)


def _is_priced_by(plan: Plan, profile: Profile) -> bool:
    """Whether a plan of the virtual engine is the profile's, with each stage's mean contention taken out."""
    step_s = planned_anew(plan, profile, engine="virtual").prediction.step_s
    return abs(step_s - plan.prediction.step_s) <= _ROUNDING * step_s
