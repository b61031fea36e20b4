"""Processes that cannot meet end within the timeout, with a clear error."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from gplan.core.errors import RunError, UsageError
from gplan.runtime.process_group import (
    Rendezvous,
    explain_connection_error,
    init_from_environment,
    rendezvous_from_environment,
)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A port in use."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def given(monkeypatch: pytest.MonkeyPatch, *, rank: int = 0, port: int | str, host: str = "127.0.0.1") -> None:
    variables = {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": 2, "GLOO_SOCKET_IFNAME": "lo"}
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_a_port_in_use_is_said(monkeypatch: pytest.MonkeyPatch, listening: socket.socket) -> None:
    given(monkeypatch, port=listening.getsockname()[1])
    with pytest.raises(RunError, match=r"port \d+ is in use .*--master-port"):
        init_from_environment("gloo", timeout_s=5.0)


def test_missing_peer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, port=free_port())
    begun_s = time.monotonic()
    with pytest.raises(
        RunError, match="waited 1 s for 2 processes at 127.0.0.1:.*: 1 came .on .*, 1 process never came .of rank 1"
    ):
        init_from_environment("gloo", timeout_s=1.0)
    assert time.monotonic() - begun_s < 20.0


def test_missing_rank_0_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, rank=1, port=free_port())
    begun_s = time.monotonic()
    with pytest.raises(RunError, match="rank 1 waited 1 s for rank 0 at 127.0.0.1:.*never came"):
        init_from_environment("gloo", timeout_s=1.0)
    assert time.monotonic() - begun_s < 20.0


def test_foreign_listener_detected(monkeypatch: pytest.MonkeyPatch, listening: socket.socket) -> None:
    given(monkeypatch, rank=1, port=listening.getsockname()[1])
    begun_s = time.monotonic()
    with pytest.raises(RunError, match=r"what answers at 127.0.0.1:\d+ is not rank 0"):
        init_from_environment("gloo", timeout_s=0.5)
    assert time.monotonic() - begun_s < 20.0


def test_processes_that_come_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, port=free_port())
    monkeypatch.setenv("WORLD_SIZE", "1")
    init_from_environment("gloo", timeout_s=5.0)
    try:
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unknown_host_is_said_at_once(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    given(monkeypatch, rank=rank, port=29500, host="no-such-host.invalid")
    with pytest.raises(RunError, match="host no-such-host.invalid .*not known"):
        init_from_environment("gloo", timeout_s=1000.0)


def test_incomplete_environment_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, port="x")
    with pytest.raises(UsageError, match="MASTER_PORT is 'x'; expected a whole number"):
        rendezvous_from_environment()
    given(monkeypatch, port=70000)
    with pytest.raises(UsageError, match="MASTER_PORT is 70000; expected 1 to 65535"):
        rendezvous_from_environment()
    given(monkeypatch, port=1, rank=2)
    with pytest.raises(UsageError, match="RANK is 2 and WORLD_SIZE 2"):
        rendezvous_from_environment()
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(UsageError, match="MASTER_ADDR not set: start the processes with torchrun"):
        rendezvous_from_environment()


def test_launcher_store(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, port=29500)
    assert rendezvous_from_environment().keeps_store
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not rendezvous_from_environment().keeps_store


MEETING = Rendezvous(host="h", port=80, rank=1, num_ranks=3, keeps_store=False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("listen on any local network address. code: -13, name: EACCES", "port 80 may not be used"),
        ("wait timeout after 5000ms, keys: /default_pg/0//cpu//0/0", "rank 1 waited 5 s .*; at least 1 never came"),
        ("Ping failed, invalid value returned from server", "what answers at h:80 is not rank 0"),
        ("Something else\nand its stack", "rank 1 could not join the others at h:80: RuntimeError: Something else$"),
    ],
)
def test_errors_of_torch_are_explained(text: str, told: str) -> None:
    with pytest.raises(RunError, match=told):
        raise explain_connection_error(RuntimeError(text), MEETING, timeout_s=5.0)
