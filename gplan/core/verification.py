"""A plan and its rivals, each run several times: what was predicted of every one beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import geometric_mean

from gplan.core.checks import check_not_empty, check_not_negative, check_positive
from gplan.core.plan import Plan, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One plan: its measured step in every round, and the run of the most usual round."""

    label: str
    run: Run  # of the round whose step is nearest to the mean; its plan is the one that was carried out
    steps_s: tuple[float, ...]  # the measured step of each round, the first ones where it failed later
    num_refused: int = 0  # runs thrown away as other work disturbed them, and repeated
    num_disturbed: int = 0  # runs kept although they were disturbed, as the repetitions were used up

    def __post_init__(self) -> None:
        check_not_empty("steps_s", self.steps_s)
        if min(self.steps_s) <= 0:
            raise ValueError(f"steps_s has {min(self.steps_s)!r}; expected seconds above 0")
        check_not_negative(self, "num_refused", "num_disturbed")

    @property
    def plan(self) -> Plan:
        """As it was carried out: for the virtual engine, without contention."""
        return self.run.plan

    @property
    def predicted_s(self) -> float:
        """Seconds of a step, as the plan says."""
        return self.plan.prediction.step_s

    @property
    def measured_s(self) -> float:
        """Seconds of a step: the geometric mean of the rounds, in which a steady drift of the host cancels."""
        return geometric_mean(self.steps_s)

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured; positive where it was too high."""
        return self.predicted_s / self.measured_s - 1.0

    @property
    def predicted_sample_s(self) -> float:
        """Seconds of a step for each sample in it."""
        return self.predicted_s / self.plan.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A rival that was not run, or not to the end, and why."""

    label: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What running a plan and its rivals showed; the plan comes first."""

    engine: str
    contenders: tuple[Contender, ...]
    left_out: tuple[LeftOut, ...]
    num_steps: int  # of every run, its warm-up included
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
        """The plan that the others are held against."""
        return self.contenders[0]

    @property
    def num_rounds(self) -> int:
        """How often every plan was run, but for rivals that failed before the last round."""
        return len(self.chosen.steps_s)

    def beside(self, contender: Contender) -> float:
        """How many times the plan's step a contender's is, over the rounds that it has: so the host's drift cancels."""
        return contender.measured_s / geometric_mean(self.chosen.steps_s[: len(contender.steps_s)])

    @property
    def num_refused(self) -> int:
        """Runs that were thrown away and repeated."""
        return sum(x.num_refused for x in self.contenders)
