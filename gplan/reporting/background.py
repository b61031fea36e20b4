"""What the profile adds to the report of a plan: the reasons for it, and the step for other numbers of devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gplan.explain import Explanation, explain
from gplan.nouns import Plan, Profile
from gplan.reporting.choices import Choice, choices_of, planned_choices

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
    plan: Plan,
    profile: Profile | None,
    *,
    progress: Callable[[str, float], None] = lambda _text, _share: None,
) -> Background:
    """From a plan, and better with the profile that it was made from; raises FileError where it was not."""
    if profile is None:
        return Background(choices=choices_of(plan))
    reasons = explain(plan, profile, options_s=_OPTIONS_S, sensitivities_s=0.0, progress=progress)
    tried = reasons.options[0].outcome is not None
    choices = planned_choices(plan, profile, progress=progress) if tried else choices_of(plan)
    return Background(choices=choices, explanation=reasons)
