"""Plans run in turns: every round runs all of them once, and every second round in the opposite order.

So a host that grows steadily slower, or faster, does so for all plans alike: over two rounds it cancels in the mean of
the logarithms. A run of which other work disturbed more than half of the steps is thrown away and repeated once, and
there are at most as many such repeats as plans; what is disturbed after that is kept and said. A rival that fails is
not run again and keeps the rounds that it had. An interrupt, or a failure of the first plan, ends the measuring with
the whole rounds so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import TypeAlias

import numpy as np

from gplan.core import Contender, LeftOut, Plan, Run, Verification
from gplan.core.errors import GplanError
from gplan.evaluate.rivals import Rival

# How the plan stands among its rivals: regret, rank correlation, and how much of it is noise.
#
# The logarithms of the measured steps are taken as plan + round + noise: what a round has in common is the host's drift,
# and the rest, pooled over all plans that have all rounds, is the noise. The mean of R rounds is then uncertain by
# noise / sqrt(R). Rank correlation: Spearman's, the correlation of the ranks, ties sharing their mean rank.


_SURE = 2.0  # standard errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The plan beside the best of those measured with the same batch."""

    best: str
    regret: float  # by what share the plan's step is longer than the best one's
    predicted_lead: float  # by what share the plan's step was predicted to be longer than the best one's
    uncertainty: float | None  # of the regret, two standard errors; None: there is one round, or one plan
    rank_correlation: float | None  # None: fewer than three plans, or all alike
    num_same_batch: int  # plans that the regret is over
    median_error: float  # of the predicted steps, without sign, over all plans
    largest_error: float

    @property
    def is_within_noise(self) -> bool:
        """Whether the difference to the best is no more than chance would make."""
        return self.regret <= (math.inf if self.uncertainty is None else self.uncertainty)


def standing_of(verification: Verification) -> Standing:
    """Of the seconds a sample; the regret is over plans of one batch size, as a larger batch alone makes them fewer."""
    contenders, chosen = verification.contenders, verification.chosen
    alike = [x for x in contenders if x.plan.batch_size == chosen.plan.batch_size]
    best = min(alike, key=verification.beside)
    errors = [abs(x.error) for x in contenders]
    noise = noise_of([x.steps_s for x in contenders if len(x.steps_s) == verification.num_rounds])
    return Standing(
        best=best.label,
        regret=1.0 / verification.beside(best) - 1.0,
        predicted_lead=chosen.predicted_s / best.predicted_s - 1.0,
        uncertainty=None if noise is None else _SURE * noise * math.sqrt(2 / len(best.steps_s)),
        rank_correlation=_correlation_of(verification),
        num_same_batch=len(alike),
        median_error=float(np.median(errors)),
        largest_error=max(errors),
    )


def noise_of(steps_s: Sequence[Sequence[float]]) -> float | None:
    """The share by which a plan's step differs from round to round, the drift of all aside; `steps_s[plan][round]`.

    None where there is one plan or one round. A host that slows down for all plans alike is not noisy:

    >>> noise_of([[1.0, 2.0], [3.0, 6.0]])
    0.0
    """
    logs = np.log(np.array(steps_s))
    freedom = (logs.shape[0] - 1) * (logs.shape[1] - 1)
    if not freedom:
        return None
    rest = logs - logs.mean(axis=1, keepdims=True) - logs.mean(axis=0, keepdims=True) + logs.mean()
    return round(float(np.sqrt((rest**2).sum() / freedom)), 12)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's; None for fewer than three values, or where one side's are all alike.

    >>> rank_correlation([1, 2, 3], [10, 30, 20]), rank_correlation([1, 2, 3], [1, 1, 1])
    (0.5, None)
    """
    ranks = [_ranks(values) for values in (one, other)]
    if len(one) < 3 or any(len(set(x)) == 1 for x in ranks):
        return None
    return round(float(np.corrcoef(np.array(ranks))[0, 1]), 12)


def _correlation_of(verification: Verification) -> float | None:
    contenders = verification.contenders
    measured = [verification.beside(x) / x.plan.batch_size for x in contenders]
    return rank_correlation([x.predicted_sample_s for x in contenders], measured)


def _ranks(values: Sequence[float]) -> list[float]:
    """From 0; values that tie share the mean of their ranks."""
    return [sum(x < y for x in values) + (sum(x == y for x in values) - 1) / 2 for y in values]


Runner: TypeAlias = Callable[[Plan], Run]
"""Carries a plan out."""

Progress: TypeAlias = Callable[[str, float], None]
"""Called with a text and the share done."""

_MOST_DISTURBED = 0.5  # share of a run's steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the rounds showed."""

    contenders: tuple[Contender, ...]
    left_out: tuple[LeftOut, ...]
    is_interrupted: bool = False
    failure: str = ""  # of the first plan, where that ended it


@dataclass(slots=True)
class _Record:
    """The runs of one plan so far."""

    rival: Rival
    runs: list[Run] = field(default_factory=list)
    num_refused: int = 0
    has_failed: bool = False
    is_disturbed: list[bool] = field(default_factory=list)  # of each run that was kept


def measured(
    rivals: Sequence[Rival], runner: Runner, *, num_rounds: int, refuses: bool = True, progress: Progress
) -> Measured:
    """Run every plan `num_rounds` times, in turns; without `refuses`, disturbed runs count like all others.

    A rival that fails is left out from then on, which `left_out` says. Raises what the runner raises for the first plan
    while there is no whole round, and KeyboardInterrupt where not even that plan has been run.
    """
    rounds = _Rounds(
        rivals, runner, num_rounds=num_rounds, num_repeats=len(rivals) if refuses else 0, progress=progress
    )
    is_interrupted, failure = False, ""
    try:
        rounds.run_all(refuses=refuses)
    except KeyboardInterrupt:
        if not rounds.records[0].runs:
            raise KeyboardInterrupt("no plan had been run to its end, so there is no verification") from None
        is_interrupted = True
    except GplanError as error:
        if not all(record.runs or record.has_failed for record in rounds.records):
            raise
        failure = str(error)
    return Measured(
        contenders=tuple(rounds.contenders()),
        left_out=tuple(rounds.left_out),
        is_interrupted=is_interrupted,
        failure=failure,
    )


def is_disturbed(run: Run) -> bool:
    """Whether other work used the processor in more than half of the steps that were timed."""
    num_timed = len(run.step_s) - run.num_warmup_steps
    return run.num_disturbed > _MOST_DISTURBED * num_timed


class _Rounds:
    def __init__(
        self, rivals: Sequence[Rival], runner: Runner, *, num_rounds: int, num_repeats: int, progress: Progress
    ) -> None:
        self.records = [_Record(rival) for rival in rivals]
        self.left_out: list[LeftOut] = []
        self._runner, self._progress = runner, progress
        self._num_rounds, self._num_repeats, self._num_done = num_rounds, num_repeats, 0

    def run_all(self, *, refuses: bool) -> None:
        for number in range(self._num_rounds):
            turns = self.records if number % 2 == 0 else self.records[::-1]
            for record in [x for x in turns if not x.has_failed]:
                self._take_turn(record, number, refuses=refuses)

    def contenders(self) -> Iterator[Contender]:
        """Every plan with the whole rounds, or with the first if it was cut short;
        one that failed with those that it has."""
        num_rounds = max(1, min(len(x.runs) for x in self.records if not x.has_failed))
        for record in self.records:
            if record.runs:
                yield _contender(record, num_rounds)
            elif not record.has_failed:
                self.left_out.append(LeftOut(label=record.rival.label, reason="interrupted before its first run"))

    def _take_turn(self, record: _Record, number: int, *, refuses: bool) -> None:
        try:
            run = self._run(record, number)
            if refuses and is_disturbed(run) and self._num_repeats:
                self._num_repeats -= 1
                record.num_refused += 1
                run = self._run(record, number, remark=", again: other work disturbed it")
        except GplanError as error:
            if record is self.records[0]:
                raise
            record.has_failed = True
            where = f"failed in round {number + 1}, what came before counts: " if record.runs else ""
            self.left_out.append(LeftOut(label=record.rival.label, reason=f"{where}{error}"))
        else:
            record.runs.append(run)
            record.is_disturbed.append(refuses and is_disturbed(run))
            self._num_done += 1

    def _run(self, record: _Record, number: int, *, remark: str = "") -> Run:
        share = self._num_done / (sum(not x.has_failed for x in self.records) * self._num_rounds)
        self._progress(f"round {number + 1} of {self._num_rounds}: {record.rival.label}{remark}", min(1.0, share))
        return self._runner(record.rival.plan)


def _contender(record: _Record, num_rounds: int) -> Contender:
    runs = record.runs[:num_rounds]
    steps_s = tuple(run.timeline.step_s for run in runs)
    return Contender(
        label=record.rival.label,
        run=min(runs, key=lambda run: abs(run.timeline.step_s - geometric_mean(steps_s))),
        steps_s=steps_s,
        num_refused=record.num_refused,
        num_disturbed=sum(record.is_disturbed[:num_rounds]),
    )
