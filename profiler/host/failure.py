"""Why a job of several processes failed: of all that its ranks say and show, the one thing that the others follow from.

A rank whose neighbour dies fails as well, and often says so first. So causes are weighed: a rank ended by a signal that
the job did not send comes before an exception, that before a rank that is stopped, one that ended without a word or
hangs, and last comes an error of communication, which tells of another rank's end.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from gplan.core import errors
from gplan.core.errors import GplanError, RunError
from gplan.core.units import seconds_text
from profiler.model.error_location import author_line_of_dump

_LOST_CONNECTION = re.compile(
    r"gloo/\S+ .*([Cc]onnect|closed|Broken pipe|[Tt]ime)|monitoredBarrier"
    r"|Dist(Network|Store)Error|Wait timeout|never came"
    r"|Watchdog caught collective operation timeout|NCCL communicator was aborted|remote process exited|ncclRemoteError"
    r"|another rank of the run"
)
_GLOO = re.compile(
    r"(?:RuntimeError: )?\[\S*gloo/\S+\] (.+?)"
    r"(?:\. This is typically[^;)\n]*)?(?= \(|[;)\n]|$)"  # its advice
)
_TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]ime-?out")
_NAMES_A_RANK = re.compile(r"\brank \d+ \(stages? \d[^)]*\)")  # what ranks agreed on: any of them may have said it
_NUM_QUOTED = 5


class RankStatus(Protocol):
    """Where a rank is, by its own notes."""

    @property
    def place(self) -> str:
        """What it does, as it follows "rank 1 hangs": "in step 12, forward of micro-batch 3 on stage 1"."""

    @property
    def is_starting(self) -> bool:
        """Whether it has not said what it does yet: the interpreter and its imports."""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for another rank."""

    @property
    def moved_s(self) -> float:
        """When it last noted anything, by time.monotonic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """What a rank said of its own failure: the name of the error's class and its text."""

    name: str
    message: str

    @property
    def is_of_another(self) -> bool:
        """Whether it tells of another rank's end or silence."""
        return is_lost_connection(self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """All that is known of one rank when its job fails."""

    rank: int
    code: int | None = None  # as of subprocess: negative for a signal; None while it runs
    stopped_by: signal.Signals | None = None
    error: RankError | None = None
    words: tuple[str, ...] = ()  # the last lines that it printed
    status: RankStatus | None = None

    @property
    def place(self) -> str:
        """Where it is, with a space before it, or nothing where that is not known."""
        return f" {self.status.place}" if self.status is not None else ""


class Weight(IntEnum):
    """How much a rank's failure looks like the cause of the others'; the least weighs most."""

    SIGNAL = 0
    ERROR = 1
    STOPPED = 2
    WORDLESS = 3
    HANGING = 4
    ENDED_EARLY = 5
    COMMUNICATION = 6

    @property
    def is_certain(self) -> bool:
        """Whether no other rank can be to blame."""
        return self <= Weight.STOPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A rank's failure, how it weighs, and the error that tells it."""

    weight: Weight
    rank: int
    error: GplanError


def is_lost_connection(text: str) -> bool:
    """Whether an error's text tells of a connection between ranks that was lost or went silent.

    >>> is_lost_connection("RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5514")
    True
    >>> is_lost_connection("ConnectionResetError: Connection reset by peer"), is_lost_connection("ValueError: a shape")
    (False, False)
    """
    return _LOST_CONNECTION.search(text) is not None


def explain_lost_connection(text: str) -> str:
    """An error's text with what gloo says of a lost connection put for those who do not know gloo; any other as it is.

    >>> text = "stage 0: RuntimeError: [gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:91. This is typically"
    >>> print(*explain_lost_connection(text).partition(", which"), sep="\\n")
    stage 0: lost another rank of the run
    , which
     was killed or says why in its own output (Connection closed by peer [10.0.0.2]:91)
    """
    said = _GLOO.search(text)
    if said is None:
        return text
    told = "lost another rank of the run, which was killed or says why in its own output"
    if _TIMED_OUT.search(said[1]):
        told = "another rank of the run did not answer: it hangs, or needs longer than the timeout allows"
    return f"{text[: said.start()]}{told} ({said[1]}){text[said.end() :]}"


def strip_gloo_advice(text: str) -> str:
    """An error's text with gloo's own words alone, without its source line and its advice.

    >>> strip_gloo_advice("RuntimeError: [gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:91. This is typically caused by; mend")
    'Connection closed by peer [10.0.0.2]:91; mend'
    """
    return _GLOO.sub(r"\1", text)


def find_cause(reports: Sequence[RankReport]) -> Cause:
    """The cause of a job's failure; one of its ranks has failed. Of equals the first given counts, so give the reports
    in the order in which the ranks failed."""
    timed_out = any(x.error is not None and _TIMED_OUT.search(x.error.message) for x in reports)
    causes = [cause for report in reports if (cause := _cause_in(report, timed_out=timed_out)) is not None]
    return min(causes, key=lambda cause: cause.weight)


def hang(reports: Sequence[RankReport], *, silence_s: float) -> RunError:
    """The error of a job in which nothing moves: it names the ranks that do not wait for others, if any."""
    running = [report for report in reports if report.code is None]
    stuck = [x for x in running if x.status is None or not x.status.is_waiting]
    found = f"no rank moved for {silence_s:g} s"
    advice = "if it only takes long, raise the timeout"
    if all(report.status is None for report in running):
        ranks = ", ".join(str(report.rank) for report in running)
        return RunError(f"{found} (still running: {ranks}); a stage hangs; {advice}")
    if stuck:
        return RunError(f"{found}; {'; '.join(map(_hanging, stuck))}; {advice}")
    waiting = "; ".join(f"rank {x.rank}{x.place}" if x.code is None else f"rank {x.rank} has ended" for x in reports)
    return RunError(f"{found}: the run hangs, every rank waits for another: {waiting}")


def stopped(report: RankReport, *, stopped_s: float) -> RunError:
    """The error of a job one of whose ranks was stopped from outside."""
    assert report.stopped_by is not None
    return RunError(
        f"rank {report.rank} was stopped by {report.stopped_by.name}{report.place}, and did not go on for "
        f"{seconds_text(stopped_s)}; the other ranks need it and were ended"
    )


def _cause_in(report: RankReport, *, timed_out: bool) -> Cause | None:
    """What one rank's report says of the failure; None for a rank that merely was there."""
    weight = _weight(report, timed_out=timed_out)
    if weight is None:
        return None
    return Cause(weight=weight, rank=report.rank, error=_told(report, weight))


def _weight(report: RankReport, *, timed_out: bool) -> Weight | None:
    if report.error is not None:
        return Weight.COMMUNICATION if report.error.is_of_another else Weight.ERROR
    if report.stopped_by is not None:
        return Weight.STOPPED
    if report.code is None:
        is_stuck = timed_out and report.status is not None and not report.status.is_waiting
        return Weight.HANGING if is_stuck else None
    if report.code == 0:
        return Weight.ENDED_EARLY
    if is_lost_connection("\n".join(report.words)):
        return Weight.COMMUNICATION  # such as NCCL's watchdog, which ends its own process by SIGABRT
    return Weight.SIGNAL if report.code < 0 else Weight.WORDLESS


def _told(report: RankReport, weight: Weight) -> GplanError:
    rank, place = report.rank, report.place
    if report.error is not None:
        return _told_by_itself(rank, report.error)
    if weight is Weight.STOPPED:
        assert report.stopped_by is not None
        return RunError(f"rank {rank} was stopped by {report.stopped_by.name}{place}; the other ranks were ended")
    if weight is Weight.HANGING:
        return RunError(f"{_hanging(report)}; the other ranks waited for it in vain and were ended")
    if weight is Weight.ENDED_EARLY:
        return RunError(f"rank {rank} ended{place}, without an error but before the others; does its code call exit?")
    return RunError(f"rank {rank} {_ended_how(report.code or 0)}{place}; the other ranks were ended{_quoted(report)}")


def _told_by_itself(rank: int, said: RankError) -> GplanError:
    kind = getattr(errors, said.name, RunError)
    alone = "; no rank told of a cause" if said.is_of_another else ""
    who = "" if _NAMES_A_RANK.search(said.message) else f"rank {rank}: "
    return kind(f"{who}{said.message}{alone}")


def _hanging(report: RankReport) -> str:
    if report.status is None:
        return f"rank {report.rank} hangs and left no word of where"
    line = author_line_of_dump(report.words)
    return f"rank {report.rank} hangs{report.place}" + (f" ({line})" if line else "")


def _ended_how(code: int) -> str:
    if code > 0:
        return f"ended with code {code}"
    hint = " (as the system does when memory runs out)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


def _quoted(report: RankReport) -> str:
    """The author's line in a crash that Python could still report, else the last words."""
    line = author_line_of_dump(report.words)
    if line is not None:
        return f"; it was at {line}"
    if not report.words or report.code == -signal.SIGKILL:
        return ""
    return "; its last words:\n" + "\n".join(report.words[-_NUM_QUOTED:])
