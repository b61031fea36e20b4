"""Meeting the other processes of a run: in the time that the user allows, and with an error that says what is missing.

torch waits for the process that keeps the store (rank 0) up to 2.4 times as long as it is told, and does not tell a
host that is not known from one that does not answer; for another program at its port it waits without end. So the host
is looked up first, rank 0's port awaited and its store greeted; what then still fails in `init_process_group` is
explained.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from gplan.errors import RunError, UsageError
from gplan.units import counted

_POLL_S = 0.1
_CONNECT_S = 2.0  # for one attempt; a host that is down does not answer at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Who meets where, as a launcher such as torchrun says it in the environment."""

    host: str
    port: int
    rank: int
    num_ranks: int
    keeps_store: bool  # whether this process listens at the port

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"


def meeting_of_environment() -> Meeting:
    """From MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; raises UsageError where one is missing or no number."""
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise UsageError(f"{', '.join(missing)} not set: start the processes with torchrun, or set {', '.join(names)}")
    port, rank, num_ranks = (_whole(name) for name in names[1:])
    if not 0 < port < 2**16:
        raise UsageError(f"MASTER_PORT is {port}; expected 1 to 65535")
    if not 0 <= rank < num_ranks:
        raise UsageError(f"RANK is {rank} and WORLD_SIZE {num_ranks}; expected a rank from 0 to {num_ranks - 1}")
    return Meeting(
        host=os.environ["MASTER_ADDR"],
        port=port,
        rank=rank,
        num_ranks=num_ranks,
        keeps_store=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True),
    )


def meet(backend: str, *, timeout_s: float) -> None:
    """`init_process_group` as the environment says; all later communication has the same timeout.

    Raises UsageError where the environment says too little, RunError where the processes do not meet: rank 0 has
    `timeout_s` to come, and all others as long from there.
    """
    meeting = meeting_of_environment()
    check_host(meeting)
    if not meeting.keeps_store:
        await_store(meeting, timeout_s=timeout_s)
        check_store(meeting, timeout_s=timeout_s)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise explain_connection_error(error, meeting, timeout_s=timeout_s) from error


def check_host(meeting: Meeting) -> None:
    """Raise RunError where the name of the host is not known."""
    try:
        socket.getaddrinfo(meeting.host, meeting.port)
    except socket.gaierror as error:
        raise RunError(
            f"the host {meeting.host} (MASTER_ADDR) is not known here: {error.strerror}; give its address, or "
            "127.0.0.1 where all processes are on one host"
        ) from error


def await_store(meeting: Meeting, *, timeout_s: float) -> None:
    """Return once something listens where the processes meet; RunError where nothing does."""
    deadline_s = time.monotonic() + timeout_s
    while not _answers(meeting):
        if time.monotonic() > deadline_s:
            raise RunError(
                f"rank {meeting.rank} waited {timeout_s:g} s for rank 0 at {meeting.address}, which never came; is it "
                "running, and do all processes have the same MASTER_ADDR and MASTER_PORT?"
            )
        time.sleep(_POLL_S)


def check_store(meeting: Meeting, *, timeout_s: float) -> None:
    """Raise RunError where what listens there is no store of torch's: it would be waited for without end."""
    has_spoken = threading.Event()

    def greet() -> None:
        with suppress(RuntimeError):
            timeout = timedelta(seconds=timeout_s)
            dist.TCPStore(  # type: ignore[attr-defined]
                meeting.host, meeting.port, is_master=False, timeout=timeout, wait_for_workers=False
            )
            has_spoken.set()

    greeter = threading.Thread(target=greet, daemon=True)  # left behind where no answer ever comes
    greeter.start()
    greeter.join(timeout_s)
    if not has_spoken.is_set():
        raise RunError(_is_another(meeting))


def explain_connection_error(error: Exception, meeting: Meeting, *, timeout_s: float) -> RunError:
    """What an error of `init_process_group` means for the user.

    Known: a port in use or not allowed, processes that never came, something else at the address. Of any other the
    first line is quoted.
    """
    text = str(error)
    if "EADDRINUSE" in text:
        return RunError(
            f"port {meeting.port} is in use by another process; choose another with MASTER_PORT (torchrun: "
            "--master-port), or end what is left of an earlier run"
        )
    if "EACCES" in text:
        return RunError(f"port {meeting.port} may not be used by this user; choose a MASTER_PORT above 1023")
    if came := re.search(r"(\d+)/(\d+) clients joined", text):
        return RunError(_never_came(meeting, int(came[1]), int(came[2]), timeout_s))
    if re.search(r"[Ww]ait timeout|timed out|Timed out", text):
        return RunError(
            f"rank {meeting.rank} waited {timeout_s:g} s for all {meeting.num_ranks} processes at {meeting.address}; "
            "at least 1 never came"
        )
    if re.search("Ping failed|Connection reset|failed to recv|Broken pipe", text):
        return RunError(_is_another(meeting))
    first = next(iter(text.strip().splitlines()), "no message")
    return RunError(
        f"rank {meeting.rank} could not join the others at {meeting.address}: {type(error).__name__}: {first}"
    )


def _never_came(meeting: Meeting, num_came: int, num_expected: int, timeout_s: float) -> str:
    missing = counted(num_expected - num_came, "process")
    return (
        f"waited {timeout_s:g} s for {num_expected} processes at {meeting.address}: {num_came} came, {missing} never "
        "came; start all of them, or allow more time"
    )


def _is_another(meeting: Meeting) -> str:
    return (
        f"what answers at {meeting.address} is not rank 0 of this run, or has just ended; if it is another program, "
        "choose another MASTER_PORT (torchrun: --master-port)"
    )


def _answers(meeting: Meeting) -> bool:
    """Whether something listens there now."""
    with suppress(OSError):
        socket.create_connection((meeting.host, meeting.port), timeout=_CONNECT_S).close()
        return True
    return False


def _whole(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError as error:
        raise UsageError(f"{name} is {os.environ[name]!r}; expected a whole number") from error
