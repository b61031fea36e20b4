"""The process group of a run: joining it within a timeout, and the rank layout of a plan.

torch waits for rank 0's store up to 2.4 times the timeout, reports an unknown host and a silent one alike, and waits
forever if another program listens at the port. So the host is resolved first, then rank 0's port is awaited and its
store opened, through which the processes compare versions and plans (`peers`); remaining errors of `init_process_group`
are explained.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gplan.core import Plan
from gplan.core.errors import RunError, UsageError
from gplan.core.units import counted, pipeline_text
from gplan.runtime.peers import INTERFACE, Peers, meet
from gplan_profiler.host.links import Store

_POLL_S = 0.1
_CONNECT_S = 2.0  # timeout of one attempt; a host that is down does not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the processes meet, as torchrun or another launcher sets it in the environment."""

    host: str
    port: int
    rank: int
    num_ranks: int
    keeps_store: bool  # whether this process hosts the store at the port

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"


def rendezvous_from_environment() -> Rendezvous:
    """Read MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; raises UsageError if one is missing or not a number."""
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise UsageError(f"{', '.join(missing)} not set: start the processes with torchrun, or set {', '.join(names)}")
    port, rank, num_ranks = (_integer(name) for name in names[1:])
    if not 0 < port < 2**16:
        raise UsageError(f"MASTER_PORT is {port}; expected 1 to 65535")
    if not 0 <= rank < num_ranks:
        raise UsageError(f"RANK is {rank} and WORLD_SIZE {num_ranks}; expected a rank from 0 to {num_ranks - 1}")
    return Rendezvous(
        host=os.environ["MASTER_ADDR"],
        port=port,
        rank=rank,
        num_ranks=num_ranks,
        keeps_store=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True),
    )


def backend_of(device_kind: str) -> str:
    """The backend for tensors of "cuda" or "cpu"."""
    return "nccl" if device_kind == "cuda" else "gloo"


def init_from_environment(backend: str, *, timeout_s: float, facts: Mapping[str, str] | None = None) -> Peers:
    """Call `init_process_group` with the environment's rendezvous; all later communication has the same timeout.

    `facts` must be the same in all processes, such as the digest of the plan. Raises UsageError if the environment is
    incomplete or options differ, FileError if files differ, RunError if the processes do not meet: rank 0 has
    `timeout_s` to start, and then all others as long.
    """
    rendezvous = rendezvous_from_environment()
    try:
        socket.getaddrinfo(rendezvous.host, rendezvous.port)
    except socket.gaierror as error:
        raise RunError(
            f"the host {rendezvous.host} (MASTER_ADDR) cannot be resolved: {error.strerror}; give its address, or "
            "127.0.0.1 where all processes are on one host"
        ) from error
    if backend == "gloo":
        check_interface(os.environ.get(INTERFACE, ""))
    store = _open_store(rendezvous, timeout_s=timeout_s)
    peers = meet(
        store,
        rank=rendezvous.rank,
        num_ranks=rendezvous.num_ranks,
        facts={"backend": backend, **(facts or {})},
        timeout_s=timeout_s,
        address=rendezvous.address,
    )
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
            rank=rendezvous.rank,
            world_size=rendezvous.num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        failure = explain_connection_error(error, rendezvous, timeout_s=timeout_s)
        peers.report(str(failure))
        raise failure from error
    return peers


def check_interface(names: str) -> None:
    """Raise UsageError for interfaces, separated by commas, that this host does not have."""
    known = [name for _, name in socket.if_nameindex()]
    for name in filter(None, names.split(",")):
        if name not in known:
            raise UsageError(
                f"{INTERFACE} is {names}, which is not an interface of {socket.gethostname()}; expected one of "
                f"{', '.join(known)}"
            )


def _open_store(rendezvous: Rendezvous, *, timeout_s: float) -> Store:
    """Open the store at the address once something listens there.

    Raises RunError if nothing does within the timeout, or if that is no store of torch: torch would wait forever.
    """
    deadline_s = time.monotonic() + timeout_s
    while not rendezvous.keeps_store:
        with suppress(OSError):
            socket.create_connection((rendezvous.host, rendezvous.port), timeout=_CONNECT_S).close()
            break
        if time.monotonic() > deadline_s:
            raise RunError(
                f"rank {rendezvous.rank} waited {timeout_s:g} s for rank 0 at {rendezvous.address}, which never came; is it "
                "running, and do all processes have the same MASTER_ADDR and MASTER_PORT?"
            )
        time.sleep(_POLL_S)
    opened: list[Store | RuntimeError] = []

    def connect() -> None:
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                rendezvous.host,
                rendezvous.port,
                is_master=rendezvous.keeps_store,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            opened.append(error)
        else:
            opened.append(store)

    probe = threading.Thread(target=connect, daemon=True)  # still blocked at the end if no answer comes
    probe.start()
    probe.join(timeout_s)
    if not opened or (isinstance(opened[0], RuntimeError) and not rendezvous.keeps_store):
        raise RunError(_not_this_run(rendezvous))
    if isinstance(opened[0], RuntimeError):
        raise explain_connection_error(opened[0], rendezvous, timeout_s=timeout_s)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"gplan/{attempt}", opened[0])  # type: ignore[attr-defined]


def explain_connection_error(error: Exception, rendezvous: Rendezvous, *, timeout_s: float) -> RunError:
    """Translate an error of `init_process_group`.

    Recognised: a port in use or not allowed, processes that stop answering, another program at the address. For anything
    else the first line is quoted.
    """
    text = str(error)
    if "EADDRINUSE" in text:
        return RunError(
            f"port {rendezvous.port} is in use by another process; choose another with MASTER_PORT (torchrun: "
            "--master-port), or end what is left of an earlier run"
        )
    if "EACCES" in text:
        return RunError(f"port {rendezvous.port} may not be used by this user; choose a MASTER_PORT above 1023")
    if re.search(r"[Ww]ait timeout|timed out|Timed out", text):
        return RunError(
            f"rank {rendezvous.rank} waited {timeout_s:g} s for all {rendezvous.num_ranks} processes at {rendezvous.address}; "
            "at least 1 never came"
        )
    if re.search("Ping failed|Connection reset|failed to recv|Broken pipe", text):
        return RunError(_not_this_run(rendezvous))
    first = next(iter(text.strip().splitlines()), "no message")
    return RunError(
        f"rank {rendezvous.rank} could not join the others at {rendezvous.address}: {type(error).__name__}: {first}"
    )


def _not_this_run(rendezvous: Rendezvous) -> str:
    return (
        f"what answers at {rendezvous.address} is not rank 0 of this run, or has just ended; if it is another program, "
        "choose another MASTER_PORT (torchrun: --master-port)"
    )


def _integer(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError as error:
        raise UsageError(f"{name} is {os.environ[name]!r}; expected a whole number") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Position of this process in a run, and its process groups. Global rank = replica * K + device."""

    devices: tuple[int, ...]  # device of each stage, in one replica
    num_replicas: int
    device: int
    replica: int
    pipeline: dist.ProcessGroup  # the devices of this replica
    replicas: dist.ProcessGroup | None  # the same device of all replicas; None if there is one replica
    on_cpu: dist.ProcessGroup  # the devices of this replica, for tensors on the CPU, by gloo
    timeout: timedelta

    @property
    def num_devices(self) -> int:
        """K, the devices of one replica."""
        return 1 + max(self.devices)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank, in rising order."""
        return tuple(stage for stage, device in enumerate(self.devices) if device == self.device)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage and computes the loss."""
        return self.device == self.devices[-1]

    def rank_of(self, device: int) -> int:
        """Global rank of a device of this replica."""
        return self.replica * self.num_devices + device

    def devices_of(self, stages: Sequence[int]) -> tuple[int, ...]:
        """The devices that hold some stages; the first stage's device comes first."""
        return tuple(dict.fromkeys(self.devices[stage] for stage in stages))

    def new_group(self, devices: Sequence[int]) -> dist.ProcessGroup:
        """Create this replica's group of some devices. Collective: all ranks create the same groups in one order."""
        rows = [sorted(x * self.num_devices + device for device in devices) for x in range(self.num_replicas)]
        return _own_group(rows, self.timeout)


def join_process_group(plan: Plan, device: torch.device, *, timeout_s: float) -> RankLayout | None:
    """Join the run's process group and return this process's layout; None if the process is alone.

    Raises UsageError if the number of processes differs from the plan's devices, RunError if they do not meet.
    """
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        init_from_environment(backend_of(device.type), timeout_s=timeout_s).show_equal_errors_once()
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks == 1:
        return None
    num_devices, num_replicas = plan.num_devices, plan.num_replicas
    if num_ranks != plan.num_ranks:
        replicas = f" in each of {num_replicas} replicas" if num_replicas > 1 else ""
        raise UsageError(
            f"there are {counted(num_ranks, 'process')}; the plan has {pipeline_text(plan.num_stages, num_devices)}{replicas}: use "
            f"--nproc-per-node {plan.num_ranks} or balance with {'--devices' if num_replicas > 1 else '--k'} {num_ranks}"
        )
    replica, own_device = divmod(dist.get_rank(), num_devices)
    rows = [list(range(r * num_devices, (r + 1) * num_devices)) for r in range(num_replicas)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    pipeline = _own_group(rows, timeout) if num_replicas > 1 else dist.group.WORLD
    assert pipeline is not None
    return RankLayout(
        devices=plan.devices,
        num_replicas=num_replicas,
        device=own_device,
        replica=replica,
        pipeline=pipeline,
        replicas=_own_group(columns, timeout) if num_replicas > 1 else None,
        on_cpu=_own_group(rows, timeout, backend="gloo"),
        timeout=timeout,
    )


def _own_group(rows: list[list[int]], timeout: timedelta, *, backend: str | None = None) -> dist.ProcessGroup:
    """Create a group of each row of ranks; return this process's. Collective."""
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(rows, timeout=timeout, backend=backend)  # type: ignore[no-untyped-call]
    return group


class LossExchange:
    """Sends a step's loss from the last stage's rank to the other ranks of its pipeline.

    The others post their receives when the step begins, so the sender, which may finish first, waits for none of
    them; a broadcast would hold it until all are done. Losses are on the CPU.
    """

    def __init__(self, ranks: RankLayout | None) -> None:
        self._ranks = ranks
        self._expected: tuple[dist.Work, Tensor] | None = None

    def post_receive(self) -> None:
        """Start to receive, when a step begins. After a step that failed on all ranks, its receive is used again."""
        if self._ranks is not None and not self._ranks.is_last and self._expected is None:
            value = torch.zeros((), dtype=torch.float64)
            work = dist.irecv(value, src=self._ranks.rank_of(self._ranks.devices[-1]), group=self._ranks.on_cpu)
            assert work is not None
            self._expected = work, value

    def exchange(self, value: Tensor) -> Tensor:
        """Return the last stage's value, a float64 scalar, on every rank of the pipeline."""
        if self._ranks is None:
            return value
        if self._ranks.is_last:
            own = value.cpu()
            sent = [
                dist.isend(own, dst=self._ranks.rank_of(device), group=self._ranks.on_cpu)
                for device in range(self._ranks.num_devices)
                if device != self._ranks.device
            ]
            for work in sent:
                assert work is not None
                work.wait()
            return own
        assert self._expected is not None
        (receive, received), self._expected = self._expected, None
        receive.wait()
        return received
