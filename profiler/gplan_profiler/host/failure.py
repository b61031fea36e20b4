"""Find the root cause among the failures of a job's ranks.

A rank whose peer dies fails as well, and often reports it first. Failures are therefore ranked: a signal that the job
did not send, an exception, a stopped process, an exit without a message, and last an error of communication, which is the
consequence of another rank's failure.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from gplan.core import errors
from gplan.core.errors import GplanError, RunError
from gplan_profiler.host.heartbeat import HeartbeatStatus
from gplan_profiler.model.error_location import author_line_of_dump, describe, root_cause

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
_NAMES_A_RANK = re.compile(r"\brank \d+ \(stages? \d[^)]*\)")  # an error that all ranks agreed on names the rank itself
_NUM_QUOTED = 5
_SENT_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals whose reason is not in the output of the process that they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """An error reported by the rank that failed."""

    name: str  # of the error's class
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The state of one rank when its job fails."""

    rank: int
    code: int | None = None  # as of subprocess: negative for a signal; None while it runs
    stopped_by: signal.Signals | None = None
    error: RankError | None = None
    last_lines: tuple[str, ...] = ()  # of its output
    status: HeartbeatStatus | None = None  # None: without a heartbeat

    @property
    def place(self) -> str:
        """The current action with a leading space; empty if unknown."""
        return f" {self.status.place}" if self.status is not None else ""


class Priority(IntEnum):
    """How likely a failure is the root cause; the lowest value is the most likely."""

    SIGNAL = 0
    ERROR = 1
    STOPPED = 2
    NO_MESSAGE = 3
    ENDED_EARLY = 4
    COMMUNICATION = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The error to raise for a failed job, and whether it cannot be the consequence of another rank's failure."""

    error: GplanError
    is_certain: bool


def is_lost_connection(text: str) -> bool:
    """Whether an error message means that a connection between ranks was lost or timed out.

    >>> is_lost_connection("RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5514")
    True
    >>> is_lost_connection("ConnectionResetError: Connection reset by peer"), is_lost_connection("ValueError: a shape")
    (False, False)
    """
    return _LOST_CONNECTION.search(text) is not None


def failure_text(error: BaseException) -> str:
    """What went wrong first, in one line, with the user's line where the error is not gplan's own."""
    return explain_lost_connection(str(error) if isinstance(error, GplanError) else describe(root_cause(error)))


def explain_lost_connection(text: str) -> str:
    """The error message with gloo's text replaced by a plain explanation; other messages are returned unchanged.

    >>> text = "stage 0: RuntimeError: [gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:91. This is typically"
    >>> print(*explain_lost_connection(text).partition(", which"), sep="\\n")
    stage 0: lost another rank of the run
    , which
     was killed or reports the reason in its own output (Connection closed by peer [10.0.0.2]:91)
    """
    match = _GLOO.search(text)
    if match is None:
        return text
    explanation = "lost another rank of the run, which was killed or reports the reason in its own output"
    if _TIMED_OUT.search(match[1]):
        explanation = "another rank of the run did not answer: it hangs, or needs longer than the timeout allows"
    return f"{text[: match.start()]}{explanation} ({match[1]}){text[match.end() :]}"


def strip_gloo_advice(text: str) -> str:
    """The error message without gloo's source line and advice.

    >>> strip_gloo_advice("RuntimeError: [gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:91. This is typically caused by; mend")
    'Connection closed by peer [10.0.0.2]:91; mend'
    """
    return _GLOO.sub(r"\1", text)


def find_cause(reports: Sequence[RankReport]) -> Cause:
    """The root cause of a job's failure. At least one rank has failed; the reports are in the order of failure."""
    failures = [x for x in map(_failure, reports) if x is not None]
    priority, error = min(failures, key=lambda pair: pair[0])
    return Cause(error=error, is_certain=priority <= Priority.STOPPED)


def hang_error(reports: Sequence[RankReport], *, silence_s: float) -> RunError:
    """The error of a job without progress; it names the ranks that do not wait for others, if any."""
    found = f"no rank moved for {silence_s:g} s"
    stuck = [x for x in reports if x.code is None and (x.status is None or not x.status.is_waiting)]
    if stuck:
        lines = [(x, author_line_of_dump(x.last_lines)) for x in stuck]
        hanging = (f"rank {x.rank} hangs{x.place}" + (f" ({line})" if line else "") for x, line in lines)
        return RunError(f"{found}; {'; '.join(hanging)}; if the step is only slow, raise the timeout")
    waiting = "; ".join(f"rank {x.rank}{x.place}" if x.code is None else f"rank {x.rank} has ended" for x in reports)
    return RunError(f"{found}: the run hangs, every rank waits for another: {waiting}")


def _failure(report: RankReport) -> tuple[Priority, GplanError] | None:
    """How likely the rank's failure is the root cause, and its error; None for a rank that has not failed."""
    rank, place, code = report.rank, report.place, report.code
    if report.error is not None:
        is_lost = is_lost_connection(report.error.message)
        no_cause = "; no rank reported a cause" if is_lost else ""
        prefix = "" if _NAMES_A_RANK.search(report.error.message) else f"rank {rank}: "
        kind: type[GplanError] = getattr(errors, report.error.name, RunError)
        error = kind(f"{prefix}{report.error.message}{no_cause}")
        return Priority.COMMUNICATION if is_lost else Priority.ERROR, error
    if report.stopped_by is not None:
        text = f"rank {rank} was stopped by {report.stopped_by.name}{place}; the other ranks were ended"
        return Priority.STOPPED, RunError(text)
    if code is None:
        return None
    if code == 0:
        text = f"rank {rank} ended{place}, without an error but before the others; does its code call exit?"
        return Priority.ENDED_EARLY, RunError(text)
    priority = Priority.SIGNAL if code < 0 else Priority.NO_MESSAGE
    if is_lost_connection("\n".join(report.last_lines)):
        priority = Priority.COMMUNICATION  # such as NCCL's watchdog, which ends its own process by SIGABRT
    how = f"ended with code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    hint = " (as the system does when memory runs out)" if code == -signal.SIGKILL else ""
    line = author_line_of_dump(report.last_lines)  # the user's, in a stack that Python printed
    quoted = "" if line is None else f"; it was at {line}"
    if line is None and report.last_lines and -code not in _SENT_FROM_OUTSIDE:
        quoted = "; its last output:\n" + "\n".join(report.last_lines[-_NUM_QUOTED:])
    return priority, RunError(f"rank {rank} {how}{hint}{place}; the other ranks were ended{quoted}")
