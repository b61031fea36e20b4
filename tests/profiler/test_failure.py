"""The root cause among the failures of several ranks."""

from __future__ import annotations

import re
import signal

import pytest

from gplan.core import ActionKind
from gplan.core.errors import ModelError, RunError
from gplan_profiler.host.failure import (
    RankError,
    RankReport,
    explain_lost_connection,
    find_cause,
    hang_error,
    is_lost_connection,
)
from gplan_profiler.host.heartbeat import Heartbeat, HeartbeatStatus

LOST = "RuntimeError: [pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
SILENT = "RuntimeError: [gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to"


def seen(*, waits: bool) -> HeartbeatStatus:
    notes = Heartbeat(stage=1)
    notes.enter_step(2)
    notes.enter_action(ActionKind.FORWARD, 1, 0)
    notes.enter_layer(0)
    if waits:
        notes.enter_wait("neighbours")
    return notes.read(["b"])


def named(*reports: RankReport) -> int:
    """The rank that is at fault."""
    match = re.match(r"rank (\d+)", str(find_cause(reports).error))
    assert match is not None
    return int(match[1])


def says(rank: int, message: str, *, name: str = "RunError") -> RankReport:
    return RankReport(rank=rank, code=5, error=RankError(name=name, message=message))


MESSENGER = says(0, LOST)


@pytest.mark.parametrize(
    ("culprit", "told"),
    [
        (
            RankReport(rank=1, code=-9, status=seen(waits=False)),
            r"rank 1 was ended by SIGKILL .*memory.* in step 3, .*layer b",
        ),
        (RankReport(rank=1, code=-11, last_lines=("Oh.",)), r"(?s)rank 1 was ended by SIGSEGV; .*last output:\nOh\."),
        (says(1, "ValueError: odd"), r"^rank 1: ValueError: odd$"),
        (
            RankReport(rank=1, stopped_by=signal.SIGSTOP, status=seen(waits=False)),
            r"rank 1 was stopped by SIGSTOP in step 3",
        ),
        (RankReport(rank=1, code=7, last_lines=("Oh.",)), r"(?s)rank 1 ended with code 7; .*Oh\."),
        (RankReport(rank=1, code=0, status=seen(waits=False)), r"rank 1 ended in step 3, .*layer b, without an error"),
    ],
)
def test_who_lost_a_neighbour_is_not_blamed(culprit: RankReport, told: str) -> None:
    for reports in ([MESSENGER, culprit], [culprit, MESSENGER], [MESSENGER, culprit, says(2, LOST)]):
        cause = find_cause(reports)
        assert named(*reports) == 1
        with pytest.raises(RunError, match=told):
            raise cause.error


def test_priority_of_causes() -> None:
    killed = RankReport(rank=2, code=-15)
    assert named(says(0, "a"), says(1, "b")) == 0
    assert named(says(0, "a"), says(1, "b"), killed) == 2


def test_a_process_that_its_communication_ended_is_a_messenger() -> None:
    words = ("[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", "terminate called")
    assert named(RankReport(rank=0, code=-6, last_lines=words), says(1, "ValueError")) == 1


def test_the_class_of_an_error_is_kept() -> None:
    assert isinstance(find_cause([says(0, "text", name="ModelError")]).error, ModelError)


def test_who_is_named_already_is_not_named_twice() -> None:
    told = "the checkpoint of step 5 was not saved: rank 1 (stage 1): no space"
    assert str(find_cause([says(0, told)]).error) == told


def test_explained_error_is_still_a_lost_connection() -> None:
    assert "did not answer: it hangs" in explain_lost_connection(SILENT)
    assert "GLHF" not in explain_lost_connection(f"{LOST}. This is typically caused by a remote worker crashing. GLHF!")
    assert all(is_lost_connection(explain_lost_connection(text)) for text in (LOST, SILENT))
    assert explain_lost_connection("ValueError: gloo") == "ValueError: gloo"


def test_a_lost_connection_alone_is_told_with_that() -> None:
    assert str(find_cause([MESSENGER]).error).endswith("no rank reported a cause")


@pytest.mark.parametrize(
    "text",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",  # the user's own: a data set from the network
        "TimeoutError: timed out",
        "RuntimeError: [enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 40 vs 10",
    ],
)
def test_errors_of_a_rank_itself_are_no_lost_connections(text: str) -> None:
    assert not is_lost_connection(text)
    assert is_lost_connection(LOST) and is_lost_connection(SILENT)


def test_a_hang_names_those_who_do_not_wait_and_their_line() -> None:
    stack = ("Current thread 0x00007f (most recent call first):", '  File "/x/model.py", line 12 in forward')
    told = str(
        hang_error(
            [
                RankReport(rank=0, status=seen(waits=True)),
                RankReport(rank=1, status=seen(waits=False), last_lines=stack),
            ],
            silence_s=6,
        )
    )
    assert (
        "no rank moved for 6 s; rank 1 hangs in step 3, forward of micro-batch 0 on stage 1, layer b (/x/model.py, line 12)"
        in told
    )
    assert "rank 0" not in told


def test_where_all_wait_a_hang_says_what_for() -> None:
    told = str(hang_error([RankReport(rank=0, status=seen(waits=True)), RankReport(rank=1, code=0)], silence_s=6))
    assert (
        "every rank waits" in told and "rank 0 in step 3, waiting for other stages on stage 1; rank 1 has ended" in told
    )
