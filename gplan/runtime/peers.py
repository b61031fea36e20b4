"""The processes of a launcher such as torchrun: the host of each, whether they fit together, and which one is lost.

Each process writes to the launcher's store who it is and what it runs. All read that before they connect, so that
different versions or plans end every process with the same error. Later each writes a sign of life twice a second, and
before it ends with an error the reason: a process that loses a connection can then name the one at fault, although the
process group only reports that some connection was closed.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.metadata import version
from types import TracebackType

import msgspec
import torch

from gplan.core.errors import FileError, GplanError, RunError, UsageError
from gplan.core.units import counted
from gplan_profiler.host.failure import failure_text, is_lost_connection
from gplan_profiler.host.links import Store

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that names the network interface for gloo."""

_BEAT_S = 0.5
_SILENCE_S = 2.0  # without a sign of life a process is lost
_ANSWER_S = 6.0  # for the store to answer
_REMEDIES: Mapping[str, tuple[type[GplanError], str]] = {
    "torch": (UsageError, "install one version on all of them"),
    "gplan": (UsageError, "install one version on all of them"),
    "plan": (FileError, "copy one plan file to all of them"),
    "model file": (FileError, "copy one model file to all of them"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A process: its rank, host and number on the host, and what must be the same everywhere, by name."""

    rank: int
    node: int  # the launcher's number of the host
    host: str
    local_rank: int
    facts: dict[str, str]
    address: str = ""  # by which gloo is reached; "" if unknown

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


class Peers:
    """All processes of a launcher, by rank."""

    def __init__(self, store: Store, peers: Sequence[Peer], *, rank: int) -> None:
        self.peers, self.rank = tuple(peers), rank
        self.store, self._is_ended = store, threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()
        atexit.register(self._end)  # a thread inside the store while the interpreter ends would abort the process

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts in the order of their first ranks."""
        return tuple(dict.fromkeys(x.host for x in self.peers))

    @property
    def own_name(self) -> str:
        """This process in words."""
        return str(self.peers[self.rank]) if len(self.hosts) > 1 else f"rank {self.rank}"

    def report(self, reason: str) -> None:
        """Write why this process ends; "" if it only lost another one."""
        self._is_ended.set()
        _within(_ANSWER_S, lambda: self.store.set(f"failed/{self.rank}", reason))

    def show_equal_errors_once(self) -> None:
        """From now on, of an exception that ends all ranks alike, only rank 0 prints the traceback."""
        plain = sys.excepthook

        def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            text, firsts = failure_text(error), list[str | None]()
            if self.rank and isinstance(error, Exception):
                _within(_ANSWER_S, lambda: firsts.append(self._awaited("failed/0")))
            if firsts == [text]:
                print(f"{self.own_name} ends with the same error as rank 0", file=sys.stderr)
            else:
                plain(kind, error, trace)
            self.report(text)  # afterwards, as torchrun ends the other ranks when one has ended

        sys.excepthook = show

    def _awaited(self, key: str) -> str | None:
        until_s = time.monotonic() + _SILENCE_S
        while not self.store.check([key]) and time.monotonic() < until_s:
            time.sleep(_BEAT_S / 10)
        return self._read(key)

    def lost(self) -> str:
        """Name the process at fault after this one lost a connection: one with a reason, or without signs of life."""
        found: list[str] = []
        _within(_ANSWER_S, lambda: found.append(self._find_lost()))
        return found[0] if found else f"{self.peers[0]}, which keeps the store of all processes, no longer answers"

    def _find_lost(self) -> str:
        others, before = [x for x in self.peers if x.rank != self.rank], self._beats()
        until_s = time.monotonic() + _SILENCE_S
        while time.monotonic() < until_s:
            for peer in others:
                if reason := self._read(f"failed/{peer.rank}"):
                    return f"{peer} ended: {reason}"
            time.sleep(_BEAT_S / 2)
        now = self._beats()
        silent = [x for x in others if now[x.rank] == before[x.rank] and self._read(f"failed/{x.rank}") is None]
        if not silent:
            return "every other process still answers"
        hosts = {x.host for x in silent}
        ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(str(x.rank) for x in silent)}"
        return f"{ranks} on {' and '.join(sorted(hosts))} no longer {'answer' if len(silent) > 1 else 'answers'}"

    def _beats(self) -> list[str | None]:
        return [self._read(f"beat/{x.rank}") for x in self.peers]

    def _read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _beat(self) -> None:
        store, count = self.store.clone(), 0  # a connection of its own, as the other one may be waiting
        with suppress(RuntimeError):  # the store is gone
            while not self._is_ended.wait(_BEAT_S):
                count += 1
                store.set(f"beat/{self.rank}", str(count))

    def _end(self) -> None:
        self._is_ended.set()
        self._beating.join(_ANSWER_S)


@contextmanager
def explained_by_peers(peers: Peers | None) -> Iterator[None]:
    """Turn an error inside into a GplanError that names the process at fault, and tell the others why this one ends."""
    try:
        yield
    except Exception as error:
        text = failure_text(error)
        is_lost = is_lost_connection(text)
        if peers is not None:
            peers.report("" if is_lost else text)
            text = f"{peers.lost()}; {peers.own_name}: {text}" if is_lost else f"{peers.own_name}: {text}"
            if is_lost and peers.rank == 0:
                time.sleep(_ANSWER_S)  # rank 0 keeps the store, from which the others learn which process is lost
        kind = type(error) if isinstance(error, GplanError) else RunError
        raise kind(text) from error


def local_place() -> tuple[int, int]:
    """This process's number on its host, and how many the launcher started there."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_own_gpu(local_rank: int, otherwise: str) -> None:
    """Raise UsageError where this host has no GPU for a local rank; `otherwise` is what else can be done."""
    if local_rank >= (num_gpus := torch.cuda.device_count()):
        raise UsageError(
            f"local rank {local_rank} has no GPU of its own; this host has {counted(num_gpus, 'GPU')}: start fewer processes, "
            f"{otherwise}"
        )


def meet(store: Store, *, rank: int, num_ranks: int, facts: Mapping[str, str], timeout_s: float, address: str) -> Peers:
    """Wait for all processes and check that they fit together; `facts` must be the same in all of them.

    Raises RunError if one does not come, UsageError for different versions or options, FileError for different files.
    """
    own = Peer(
        rank=rank,
        node=int(os.environ.get("GROUP_RANK", "0")),
        host=socket.gethostname(),
        local_rank=local_place()[0],
        facts={"torch": str(torch.__version__), "gplan": version("gplan"), **facts},
        address=_gloo_address(),
    )
    store.set(f"peer/{rank}", msgspec.json.encode(own))
    keys = [f"peer/{x}" for x in range(num_ranks)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise _never_came(store, keys, timeout_s=timeout_s, address=address) from error
    found = [msgspec.json.decode(store.get(key), type=Peer) for key in keys]
    is_over_network = len({x.host for x in found}) > 1 and found[0].facts.get("backend") == "gloo"
    for peer in found if is_over_network else ():
        if peer.address.startswith("127.") or peer.address == "::1":
            raise UsageError(
                f"{peer} would be reached at {peer.address}, which only its own host can use; set {INTERFACE} on every "
                "host to the interface that connects them, such as eth0"
            )
    num_nodes = Counter(host for host, _ in {(x.host, x.node) for x in found})  # that have the same name
    peers = [replace(x, host=f"{x.host}-{x.node}") if num_nodes[x.host] > 1 else x for x in found]
    for peer in peers:
        for what, expected in peers[0].facts.items():
            fact = peer.facts.get(what, "none")
            if fact != expected:
                kind, remedy = _REMEDIES.get(what, (UsageError, "start all with the same options"))
                raise kind(
                    f"{peer} has {what} {fact}, {peers[0]} has {expected}; expected the same on all hosts: {remedy}"
                )
    return Peers(store, peers, rank=rank)


def _never_came(store: Store, keys: Sequence[str], *, timeout_s: float, address: str) -> RunError:
    came: list[Peer | None] = []
    with suppress(RuntimeError):
        came += [msgspec.json.decode(store.get(x), type=Peer) if store.check([x]) else None for x in keys]
    if not came:
        return RunError(
            f"lost another rank of the run: the store at {address} no longer answers; start all processes again"
        )
    missing = [str(rank) for rank, peer in enumerate(came) if peer is None]
    hosts = ", ".join(dict.fromkeys(x.host for x in came if x is not None))
    return RunError(
        f"waited {timeout_s:g} s for {len(keys)} processes at {address}: {len(keys) - len(missing)} came"
        f"{f' (on {hosts})' if hosts else ''}, {counted(len(missing), 'process')} never came (of rank "
        f"{', '.join(missing)}); start all of them, or allow more time"
    )


def _gloo_address() -> str:
    """The address of this host's name, which gloo listens at unless an interface is set."""
    interface = os.environ.get(INTERFACE, "")
    if interface:
        return "127.0.0.1" if interface == "lo" else ""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    except OSError:
        return "127.0.0.1"  # as gloo does


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Call a function of the store, which may block for long if its host is gone; errors of the store are dropped."""

    def call() -> None:
        with suppress(RuntimeError):
            action()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
