"""`gplan cluster` and processes of several hosts: here processes on the loopback, of which the launcher names hosts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gplan.core.errors import FileError, RunError, UsageError
from gplan.files.machine_file import load_machine
from gplan.runtime import cluster, peers
from gplan.runtime.cluster import PairTimes, RankFindings, machine_of, pair_rounds
from gplan.runtime.peers import Peer, Peers, meet
from gplan.runtime.process_group import check_interface
from gplan_profiler.host import links
from tests.runtime.forked import forking, launcher_environments


class Launched:
    """The processes of `gplan cluster` as a launcher starts them; `hosts` has the host of each rank."""

    def __init__(self, folder: Path, hosts: Sequence[int], *options: str) -> None:
        self.output, self.processes = folder / "cluster.toml", list[subprocess.Popen[str]]()
        for environment in launcher_environments(hosts):
            arguments = ["cluster", "--device", "cpu", "--json", "--output", str(self.output), *options]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "gplan", *arguments],
                    env={**os.environ, **environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def end(self, timeout_s: float = 60.0) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of each process."""
        try:
            texts = [x.communicate(timeout=timeout_s) for x in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return [(x.returncode, *text) for x, text in zip(self.processes, texts, strict=True)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Less is measured, in forked processes."""
    monkeypatch.setattr(cluster, "_BUDGET_S", 0.2)
    monkeypatch.setattr(links, "MESSAGE_BYTES", (2**10, 2**16))
    monkeypatch.setattr(links, "COLLECTIVE_BYTES", (2**12, 2**16))
    with forking():
        yield


@pytest.mark.usefixtures("quick")
def test_measured_cluster_can_be_planned_with(tmp_path: Path) -> None:
    (code, out, errors), *others = Launched(tmp_path, [0, 0, 1]).end()
    assert code == 0, errors
    assert [(x[0], x[1]) for x in others] == [(0, ""), (0, "")]
    host = socket.gethostname()
    machine = load_machine(tmp_path / "cluster.toml")
    assert [x.name for x in machine.devices] == [f"{host}-0:0", f"{host}-0:1", f"{host}-1:0"]
    assert all(x.memory_bytes for x in machine.devices)
    assert [x["name"] for x in json.loads(out)["devices"]] == [x.name for x in machine.devices]
    for link in (machine.within, machine.between):
        assert [x.num_bytes for x in link.points] == [2**10, 2**16]
        assert {(x.kind, x.num_devices) for x in link.collectives} == {
            ("all_reduce", 2),
            ("all_gather", 2),
            ("reduce_scatter", 2),
        }
    assert "2 hosts of 3 devices" in machine.notes[0]


@pytest.mark.usefixtures("quick")
def test_a_host_that_dies_is_named_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cluster.pair_times

    def dying(timer: Any, *, budget_s: float) -> Any:
        if os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        return real(timer, budget_s=budget_s)

    ask = Peers.lost

    def lost_late(own: Peers) -> str:
        if own.rank == 1:
            time.sleep(3.0)  # rank 0, which keeps the store, has its answer by then
        return ask(own)

    monkeypatch.setattr(cluster, "pair_times", dying)
    monkeypatch.setattr(Peers, "lost", lost_late)
    begun_s = time.monotonic()
    found = Launched(tmp_path, [0, 1, 2], "--timeout", "5").end()
    assert time.monotonic() - begun_s < 15.0
    assert [code for code, _, _ in found] == [5, 5, -signal.SIGKILL]
    for _, _, errors in found[:2]:
        assert f"rank 2 on {socket.gethostname()}-2 no longer answers" in errors
    assert list(tmp_path.iterdir()) == []


def test_an_interface_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="GLOO_SOCKET_IFNAME is none7, which is not an interface of .*; expected .*lo"):
        check_interface("none7")
    check_interface("")


def test_hosts_that_only_reach_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.socket, "gethostname", iter("ab").__next__)
    monkeypatch.setattr(peers, "_gloo_address", lambda: "127.0.1.1")
    for error in come([{"backend": "gloo"}] * 2, timeout_s=5.0):
        assert isinstance(error, UsageError)
        assert re.search(r"rank \d on [ab] would be reached at 127.0.1.1, .* set GLOO_SOCKET_IFNAME", str(error))


def come(facts: Sequence[dict[str, str] | None], *, timeout_s: float) -> list[tuple[Peer, ...] | Exception]:
    """What `meet` returns or raises on each rank; None: a rank that does not come."""
    store = dist.HashStore()

    def one(rank: int, own: dict[str, str]) -> tuple[Peer, ...] | Exception:
        try:
            return meet(store, rank=rank, num_ranks=len(facts), facts=own, timeout_s=timeout_s, address="h:1").peers
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(one, *zip(*((i, x) for i, x in enumerate(facts) if x is not None), strict=True)))


@pytest.mark.parametrize(
    ("what", "kind", "remedy"),
    [
        ("torch", UsageError, "install one version"),
        ("plan", FileError, "copy one plan file"),
        ("model file", FileError, "copy one model file"),
        ("options", UsageError, "start all with the same options"),
    ],
)
def test_differences_are_the_same_error_everywhere(
    monkeypatch: pytest.MonkeyPatch, what: str, kind: type[Exception], remedy: str
) -> None:
    monkeypatch.setattr(peers.socket, "gethostname", lambda: "h")
    for error in come([{what: "x"}, {what: "x"}, {what: "y"}], timeout_s=5.0):
        assert isinstance(error, kind)
        assert f"rank 2 on h has {what} y, rank 0 on h has x; expected the same on all hosts: {remedy}" in str(error)


def test_a_host_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.socket, "gethostname", lambda: "h")
    for error in come([{}, None, {}], timeout_s=0.3):
        assert isinstance(error, RunError)
        assert "2 came (on h), 1 process never came (of rank 1)" in str(error)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=7))
def test_rounds_measure_every_pair_once(sizes: list[int]) -> None:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    hosts = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    host_of = {rank: i for i, own in enumerate(hosts) for rank in own}
    within, between = list[tuple[int, int]](), list[tuple[int, int]]()
    for _, pairs in pair_rounds(hosts):
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)
        for a, b in pairs:
            (within if host_of[a] == host_of[b] else between).append((a, b))
    assert sorted(within) == sorted(x for own in hosts for x in combinations(own, 2))
    assert sorted((host_of[a], host_of[b]) for a, b in between) == list(combinations(range(len(hosts)), 2))


def test_slow_and_lossy_pairs_are_named() -> None:
    ranks = [Peer(rank=i, node=i, host="abcd"[i], local_rank=0, facts={"torch": "2", "gplan": "1"}) for i in range(4)]  # fmt: skip
    sizes = (2**10, 2**20, 2**24)

    def pair(a: int, b: int) -> PairTimes:
        slow = 5.0 if (a, b) == (1, 2) else 1.0
        times = [(n, slow * (1e-4 + n / 1e9)) for n in sizes]
        return PairTimes(ranks=(a, b), times=times, resent=0.04 if (a, b) == (0, 3) else 0.0)

    found = [
        RankFindings(
            hardware="x" if i else "y",
            memory_bytes=2**30,
            clock_s=5.0 if i == 3 else 0.0,
            pairs=tuple(pair(a, b) for a, b in combinations(range(4), 2) if i in (a, b)),
        )
        for i in range(4)
    ]
    machine = machine_of(ranks, found, backend="gloo")
    assert [x.hosts for x in machine.links] == [("b", "c")]
    assert machine.between.bytes_per_s == pytest.approx(1e9)
    assert machine.link(machine.devices[1], machine.devices[2]).bytes_per_s == pytest.approx(2e8)
    text = "\n".join(machine.notes)
    assert "slow: the pair b:0 - c:0 takes 84.4 ms for 16.0 MiB, 5.0 times as long" in text
    assert "lossy: the pair a:0 - d:0 had to send 4.0 % of its packets again" in text
    assert "the devices differ (x, y)" in text
    assert "the clock of d is 5.00 s ahead of that of a" in text
