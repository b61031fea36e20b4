"""How good a plan's prediction is: the plan and its rivals run in turns, and the plan ranked among them.

Every second round runs the plans in the opposite order, so a steady drift of the host cancels in the mean of the
logarithms over two rounds. Runs whose processes lost their cores in more than half of the steps are noted. A rival that
fails is not run again and keeps its rounds. An interrupt, or a failure of the plan itself, ends the measurement with the
complete rounds so far. The caller provides the function that runs a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import TypeAlias

import numpy as np

from gplan.core import Contender, LeftOut, Plan, Profile, Run, Verification
from gplan.core.errors import GplanError, UsageError
from gplan.core.host_load import interruption_text, largest_load
from gplan.core.progress import Progress, no_progress
from gplan.core.units import counted, now_text
from gplan.evaluate.rivals import rivals_of

NUM_ROUNDS = 4
NUM_STEPS = 8
LEAST_STEPS = 6
"""Of every run; fewer leave hardly a step after the warm-up."""

_MOST_DISTURBED = 0.5  # share of a run's steps
_NUM_ERRORS = 2.0  # standard errors of the regret's uncertainty

Runner: TypeAlias = Callable[[Plan], Run]
"""Runs a plan."""


def verify(
    plan: Plan,
    profile: Profile,
    runner: Runner,
    *,
    engine: str,
    num_rounds: int = NUM_ROUNDS,
    num_steps: int = NUM_STEPS,
    num_rivals: int | None = None,
    progress: Progress = no_progress,
) -> Verification:
    """Run the plan and at most `num_rivals` others (None: all) in turns; `runner` takes `num_steps` steps per run.

    Raises FileError where plan and profile do not belong together, UsageError for counts that cannot be used, and the
    runner's error where the plan itself fails in the first round.
    """
    check_counts(num_rounds, num_steps, num_rivals)
    rivals = rivals_of(plan, profile, num_rivals=num_rivals)
    contenders, left_out, notes = run_rounds(rivals.plans, runner, num_rounds=num_rounds, progress=progress)
    return Verification(
        engine=engine,
        contenders=contenders,
        left_out=(*rivals.left_out, *left_out),
        num_steps=num_steps,
        created=now_text(),
        notes=tuple(dict.fromkeys([*rivals.notes, *notes, *contenders[0].run.notes])),
    )


def check_counts(num_rounds: int, num_steps: int, num_rivals: int | None) -> None:
    """Raise UsageError for counts that `verify` cannot use."""
    if num_rounds < 1:
        raise UsageError(f"asked for {num_rounds} rounds; expected at least 1")
    if num_steps < LEAST_STEPS:
        raise UsageError(
            f"asked for {num_steps} steps a run; expected at least {LEAST_STEPS}, as the first ones warm up"
        )
    if num_rivals is not None and num_rivals < 0:
        raise UsageError(f"asked for {num_rivals} rivals; expected 0 or more")


def run_rounds(
    plans: Mapping[str, Plan], runner: Runner, *, num_rounds: int, progress: Progress
) -> tuple[tuple[Contender, ...], list[LeftOut], list[str]]:
    """Run every plan `num_rounds` times, in turns; return what was measured, what was left out, and notes on the rounds.

    Every plan gets its complete rounds, at least the first; a failed one the rounds that it has. Raises the runner's
    error where the first plan fails before a round is complete, and KeyboardInterrupt where even that plan has no run.
    """
    runs: list[list[Run]] = [[] for _ in plans]
    failed, left_out = set[int](), list[LeftOut]()
    ended: tuple[str, str] | None = None  # why before the last round, and the error
    labels, forth = list(plans), range(len(plans))
    try:
        for number, i in ((n, i) for n in range(num_rounds) for i in (forth[::-1] if n % 2 else forth)):
            if i in failed:
                continue
            share = sum(map(len, runs)) / ((len(plans) - len(failed)) * num_rounds)
            progress(f"round {number + 1} of {num_rounds}: {labels[i]}", min(1.0, share))
            try:
                runs[i].append(runner(plans[labels[i]]))
            except GplanError as error:
                if i == 0:
                    raise
                failed.add(i)
                where = f"failed in round {number + 1}, what came before counts: " if runs[i] else ""
                left_out.append(LeftOut(label=labels[i], reason=f"{where}{error}"))
    except KeyboardInterrupt:
        if not runs[0]:
            raise KeyboardInterrupt("no plan had been run to its end, so there is no verification") from None
        ended = "interrupted: ", ""
    except GplanError as error:
        if not all(own or i in failed for i, own in enumerate(runs)):
            raise
        ended = "the plan failed in a later round, so ", f": {error}"
    num_complete = max(1, min(len(own) for i, own in enumerate(runs) if i not in failed))
    runs = [own[:num_complete] for own in runs]
    never = (label for i, label in enumerate(labels) if not runs[i] and i not in failed)
    left_out += [LeftOut(label=label, reason="interrupted before its first run") for label in never]
    contenders = []
    for label, own in zip(labels, runs, strict=True):
        steps_s = tuple(run.timeline.step_s for run in own)
        if own:
            typical = min(own, key=lambda run: abs(run.timeline.step_s - geometric_mean(steps_s)))
            contenders.append(Contender(label=label, run=typical, steps_s=steps_s))
    notes = list[str]()
    if ended is not None:
        extent = "the whole rounds so far" if num_complete > 1 else "the first round"
        notes.append(f"{ended[0]}the results are of {extent}{ended[1]}")
    if disturbed := [x for own in runs for x in own if x.num_disturbed > _MOST_DISTURBED * x.num_settled]:
        load = largest_load([x.host_load for x in disturbed if x.host_load is not None])
        quiet = " when the machine is quiet" if load is not None and load.is_evidence else ""
        notes.append(
            f"{counted(len(disturbed), 'run')} counted although more than half of the steps were {interruption_text(load)}; "
            f"verify again{quiet}"
        )
    return tuple(contenders), left_out, notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The plan among the plans that were measured, and the errors of all predictions.

    The logarithm of a measured step is modelled as plan + round + noise. The round's part is the host's drift; the noise
    is pooled over all plans that have all rounds, so the mean of R rounds has a standard error of noise / sqrt(R).
    """

    best: str  # label of the fastest plan with the same batch
    regret: float  # share by which the plan's step is longer than the fastest one's
    predicted_lead: float  # the same share, predicted
    uncertainty: float | None  # of the regret, two standard errors; None: there is one round, or one plan
    rank_correlation: float | None  # of seconds per sample; None: fewer than three plans, or all tie
    num_same_batch: int  # plans that the regret is over
    median_error: float  # of the predicted steps, without sign, over all plans
    largest_error: float

    @property
    def is_within_noise(self) -> bool:
        """Whether the difference to the fastest plan is within the uncertainty."""
        return self.regret <= (math.inf if self.uncertainty is None else self.uncertainty)


def ranking_of(verification: Verification) -> Ranking:
    """The chosen plan's ranking; the regret is over plans of its batch size, as a larger batch alone is faster."""
    contenders, chosen = verification.contenders, verification.chosen
    same_batch = [x for x in contenders if x.plan.batch_size == chosen.plan.batch_size]
    best = min(same_batch, key=verification.beside)
    errors = [abs(x.error) for x in contenders]
    noise = round_noise([x.steps_s for x in contenders if len(x.steps_s) == verification.num_rounds])
    return Ranking(
        best=best.label,
        regret=1.0 / verification.beside(best) - 1.0,
        predicted_lead=chosen.predicted_s / best.predicted_s - 1.0,
        uncertainty=None if noise is None else _NUM_ERRORS * noise * math.sqrt(2 / len(best.steps_s)),
        rank_correlation=rank_correlation(  # of seconds per sample
            [x.predicted_s / x.plan.batch_size for x in contenders],
            [verification.beside(x) / x.plan.batch_size for x in contenders],
        ),
        num_same_batch=len(same_batch),
        median_error=float(np.median(errors)),
        largest_error=max(errors),
    )


def round_noise(steps_s: Sequence[Sequence[float]]) -> float | None:
    """The standard deviation of a plan's step from round to round, as a share, without the drift that all plans share.

    `steps_s[plan][round]`; None where there is one plan or one round.

    >>> round_noise([[1.0, 2.0], [3.0, 6.0]])
    0.0
    """
    logs = np.log(np.array(steps_s))
    freedom = (logs.shape[0] - 1) * (logs.shape[1] - 1)
    if not freedom:
        return None
    rest = logs - logs.mean(axis=1, keepdims=True) - logs.mean(axis=0, keepdims=True) + logs.mean()
    return round(float(np.sqrt((rest**2).sum() / freedom)), 12)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's; values that tie share their mean rank. None for fewer than three values, or where all of a side tie.

    >>> rank_correlation([1, 2, 3], [10, 30, 20]), rank_correlation([1, 2, 3], [1, 1, 1])
    (0.5, None)
    """
    ranks = [
        [sum(x < y for x in values) + (sum(x == y for x in values) - 1) / 2 for y in values]
        for values in (first, second)
    ]
    if len(first) < 3 or any(len(set(x)) == 1 for x in ranks):
        return None
    return round(float(np.corrcoef(np.array(ranks))[0, 1]), 12)
