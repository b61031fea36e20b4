"""Which part of a plan a process carries out: one device of one replica, or, alone, all of them.

Global rank = replica * K + device. A device holds one stage, or several as its chunks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gplan.errors import UsageError
from gplan.execute.connection import meet
from gplan.nouns import Plan
from gplan.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The place of this process among those of a run, and its groups."""

    devices: tuple[int, ...]  # of each stage, in one replica
    num_replicas: int
    device: int
    replica: int
    pipeline: dist.ProcessGroup  # one rank per device, those of this replica
    replicas: dist.ProcessGroup | None  # the ranks that hold this device's stages; None: there is one
    timeout: timedelta

    @property
    def num_devices(self) -> int:
        """K."""
        return 1 + max(self.devices)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank, rising."""
        return tuple(stage for stage, device in enumerate(self.devices) if device == self.device)

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.device == self.devices[-1]

    @property
    def last_rank(self) -> int:
        """The global rank that computes the loss of this pipeline."""
        return self.rank_of(self.devices[-1])

    def rank_of(self, device: int) -> int:
        """The global rank of a device of this replica."""
        return self.replica * self.num_devices + device

    def devices_of(self, stages: Sequence[int]) -> tuple[int, ...]:
        """The devices that hold some stages, that of the first one first."""
        return tuple(dict.fromkeys(self.devices[stage] for stage in stages))

    def group_of_devices(self, devices: Sequence[int], *, backend: str | None = None) -> dist.ProcessGroup:
        """The group of this replica's ranks for some devices; every rank must ask for every group,
        in the same order."""
        groups: list[dist.ProcessGroup] = [
            dist.new_group(
                sorted(replica * self.num_devices + device for device in devices), timeout=self.timeout, backend=backend
            )
            for replica in range(self.num_replicas)
        ]
        return groups[self.replica]


def join(plan: Plan, device: torch.device, *, timeout_s: float) -> Ranks | None:
    """This process's place in a run of the plan, or None where it is alone and carries out all of it.

    Joins the other processes where a launcher such as torchrun started several. Raises UsageError where they are not
    as many as the plan has devices, RunError where they do not meet.
    """
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        meet("nccl" if device.type == "cuda" else "gloo", timeout_s=timeout_s)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks == 1:
        return None
    num_devices, num_replicas = plan.num_devices, plan.num_replicas
    if num_ranks != num_devices * num_replicas:
        replicas = f" in each of {num_replicas} replicas" if num_replicas > 1 else ""
        raise UsageError(
            f"there are {counted(num_ranks, 'process')}; the plan has {_what_is_held(plan)}{replicas}: use "
            f"--nproc-per-node {num_devices * num_replicas} or balance with --k {num_ranks}"
        )
    return _ranks(plan, timeout)


def _what_is_held(plan: Plan) -> str:
    stages, devices = counted(plan.num_stages, "stage"), counted(plan.num_devices, "device")
    return stages if plan.num_stages == plan.num_devices else f"{stages} on {devices}"


def _ranks(plan: Plan, timeout: timedelta) -> Ranks:
    num_devices, num_replicas = plan.num_devices, plan.num_replicas
    replica, device = divmod(dist.get_rank(), num_devices)
    world = dist.group.WORLD
    assert world is not None
    pipelines, replicas = [world], [None]
    if num_replicas > 1:
        rows = [range(r * num_devices, (r + 1) * num_devices) for r in range(num_replicas)]
        pipelines = [dist.new_group(list(row), timeout=timeout) for row in rows]
        columns = [range(d, num_devices * num_replicas, num_devices) for d in range(num_devices)]
        replicas = [dist.new_group(list(column), timeout=timeout) for column in columns]
    return Ranks(
        devices=plan.devices,
        num_replicas=num_replicas,
        device=device,
        replica=replica,
        pipeline=pipelines[replica],
        replicas=replicas[device] if num_replicas > 1 else None,
        timeout=timeout,
    )


class Telling:
    """What the rank of the last stage finds in a step, told to the others.

    These open their hands when the step begins, so that rank, which may be done first, need not wait for any of them;
    a broadcast would hold it until all are done. Over gloo, on the CPU, whatever else the ranks use.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group = ranks.group_of_devices(range(ranks.num_devices), backend="gloo")
        self._expected: tuple[dist.Work | None, Tensor] | None = None

    def begin(self) -> None:
        """A step begins; on every rank. What one that failed everywhere never got is what this one waits for."""
        if not self._ranks.is_last and self._expected is None:
            value = torch.zeros((), dtype=torch.float64)
            self._expected = dist.irecv(value, src=self._ranks.last_rank, group=self._group), value

    def end(self, value: Tensor) -> Tensor:
        """The last stage's value, a float64 scalar, on every rank of the pipeline."""
        if self._ranks.is_last:
            own = value.cpu()
            sent = [
                dist.isend(own, dst=self._ranks.rank_of(device), group=self._group)
                for device in range(self._ranks.num_devices)
                if device != self._ranks.device
            ]
            for work in sent:
                assert work is not None
                work.wait()
            return own
        assert self._expected is not None
        (work, told), self._expected = self._expected, None
        assert work is not None
        work.wait()
        return told
