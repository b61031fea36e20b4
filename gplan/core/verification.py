"""Verification: a plan and its rivals, each run several times, with predicted and measured step times."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import geometric_mean

from gplan.core.checks import check_not_empty, check_positive
from gplan.core.plan import Plan, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One plan: its measured step in every round, and the run of the most typical round."""

    label: str
    run: Run  # of the round with the step nearest to the mean; its plan is the executed one
    steps_s: tuple[float, ...]  # the measured step of each round until a failure

    def __post_init__(self) -> None:
        check_not_empty("steps_s", self.steps_s)
        if min(self.steps_s) <= 0:
            raise ValueError(f"steps_s has {min(self.steps_s)!r}; expected seconds above 0")

    @property
    def plan(self) -> Plan:
        """The executed plan, priced for its engine."""
        return self.run.plan

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of a step."""
        return self.plan.prediction.step_s

    @property
    def measured_s(self) -> float:
        """Seconds of a step: the geometric mean over rounds, in which a steady drift of the host cancels."""
        return geometric_mean(self.steps_s)

    @property
    def error(self) -> float:
        """Relative error of the prediction; positive if it was too high."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A rival that was not run, or not to the end, with the reason."""

    label: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Measured step times of a plan and its rivals; the plan comes first."""

    engine: str
    contenders: tuple[Contender, ...]
    left_out: tuple[LeftOut, ...]
    num_steps: int  # of every run, including warm-up
    created: str  # ISO 8601, UTC
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_not_empty("contenders", self.contenders)
        check_positive(self, "num_steps")
        longest = max(self.contenders, key=lambda x: len(x.steps_s))
        if len(longest.steps_s) > self.num_rounds:
            raise ValueError(
                f"{longest.label} has {len(longest.steps_s)} rounds; expected at most {self.num_rounds}, as the plan has"
            )

    @property
    def chosen(self) -> Contender:
        """The plan that the others are compared with."""
        return self.contenders[0]

    @property
    def num_rounds(self) -> int:
        """Number of runs of each plan, except rivals that failed earlier."""
        return len(self.chosen.steps_s)

    def beside(self, contender: Contender) -> float:
        """A contender's step divided by the plan's, over the contender's rounds, so that drift of the host cancels."""
        return contender.measured_s / geometric_mean(self.chosen.steps_s[: len(contender.steps_s)])
