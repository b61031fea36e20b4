"""Plans run in turns: every round runs all of them once, and every second round in the opposite order.

So a host that grows steadily slower, or faster, does so for all plans alike: over two rounds it cancels in the mean of
the logarithms. A run of which other work disturbed more than half of the steps is thrown away and repeated once, and
there are at most as many such repeats as plans; what is disturbed after that is kept and said. A rival that fails is
not run again and keeps the rounds that it had. An interrupt, or a failure of the first plan, ends the measuring with
the whole rounds so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import TypeAlias

from gplan.errors import GplanError
from gplan.nouns import Contender, LeftOut, Plan, Run
from gplan.verifier.rivals import Rival

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
