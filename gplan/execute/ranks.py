"""Which part of a plan a process carries out: one stage of one replica, or, alone, all of it.

Global rank = replica * K + stage, so that neighbours in a pipeline are neighbours among the ranks.
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

    num_stages: int
    num_replicas: int
    stage: int
    replica: int
    pipeline: dist.ProcessGroup  # one rank per stage, those of this replica
    replicas: dist.ProcessGroup | None  # the ranks that hold this stage; None: there is one
    timeout: timedelta

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stage == self.num_stages - 1

    @property
    def last_rank(self) -> int:
        """The global rank that computes the loss of this pipeline."""
        return self.rank_of(self.num_stages - 1)

    def rank_of(self, stage: int) -> int:
        """The global rank of a stage of this replica."""
        return self.replica * self.num_stages + stage

    def group_of_stages(self, stages: Sequence[int], *, backend: str | None = None) -> dist.ProcessGroup:
        """The group of this replica's ranks for some stages; every rank must ask for every group, in the same order."""
        groups: list[dist.ProcessGroup] = [
            dist.new_group(
                [replica * self.num_stages + stage for stage in stages], timeout=self.timeout, backend=backend
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
    num_stages, num_replicas = plan.num_stages, plan.num_replicas
    if num_ranks != num_stages * num_replicas:
        replicas = f" in each of {num_replicas} replicas" if num_replicas > 1 else ""
        raise UsageError(
            f"there are {counted(num_ranks, 'process')}; the plan has {counted(num_stages, 'stage')}"
            f"{replicas}: use --nproc-per-node {num_stages * num_replicas} or balance with --k {num_ranks}"
        )
    return _ranks(num_stages, num_replicas, timeout)


def _ranks(num_stages: int, num_replicas: int, timeout: timedelta) -> Ranks:
    replica, stage = divmod(dist.get_rank(), num_stages)
    world = dist.group.WORLD
    assert world is not None
    pipelines, replicas = [world], [None]
    if num_replicas > 1:
        rows = [range(r * num_stages, (r + 1) * num_stages) for r in range(num_replicas)]
        pipelines = [dist.new_group(list(row), timeout=timeout) for row in rows]
        columns = [range(s, num_stages * num_replicas, num_stages) for s in range(num_stages)]
        replicas = [dist.new_group(list(column), timeout=timeout) for column in columns]
    return Ranks(
        num_stages=num_stages,
        num_replicas=num_replicas,
        stage=stage,
        replica=replica,
        pipeline=pipelines[replica],
        replicas=replicas[stage] if num_replicas > 1 else None,
        timeout=timeout,
    )


class Telling:
    """What the last stage of a pipeline finds in a step, told to the others.

    These open their hands when the step begins, so the last stage, which is done first, need not wait for any of them;
    a broadcast would hold it until all are done. Over gloo, on the CPU, whatever else the ranks use.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group = ranks.group_of_stages(range(ranks.num_stages), backend="gloo")
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
                dist.isend(own, dst=self._ranks.rank_of(stage), group=self._group)
                for stage in range(self._ranks.num_stages - 1)
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
