"""What all ranks of a run must do together: call the same method of the pipeline, with the same mini-batch, on equal copies.

Each call is announced to all ranks by an all-gather of numbers on the CPU: the method, the number of samples, digests of
inputs and targets, and checksums of the trained weights that other ranks have copies of (tied ones, and those of replicas):
these drift apart where a script changes gradients differently on each rank. Only a rank that finds a difference can explain
the hang that would follow, so every call but a step waits for the others' numbers. A step goes on meanwhile and reads them
when the next call begins. Digests and checksums read every byte, so those of weights and of large batches are made in the
first ten steps and in those that are powers of two; such a step waits too.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gplan.core.errors import RunError, UsageError
from gplan.runtime.process_group import RankLayout
from gplan.runtime.sharded_tensors import local_tensor
from gplan_profiler.capture.authored_layers import PLAIN
from gplan_profiler.host.failure import failure_text
from gplan_profiler.host.heartbeat import Heartbeat
from gplan_profiler.torch_compat import pytree

_CALLS = ("step", "eval_step", "predict", "clip_grad_norm_", "full_state_dict", "save", "load")
_NUM_CHECKED = 10  # steps in a row whose batches are compared, however large
_CHEAP_BYTES = 2**18  # of a batch that is compared in every step
_SAME_BATCH = (
    "expected the same mini-batch on every rank: draw it with the same seed on each (DataLoader: "
    "generator=torch.Generator().manual_seed(0), no DistributedSampler), or let rank 0 send its own to the others "
    "(gplan.pipeline(..., broadcast_batches=True))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Announced:
    """A call whose numbers are under way."""

    call: str
    number: int  # of this call, from 1
    work: dist.Work
    rows: Sequence[Tensor]  # by rank


class Agreement:
    """Compares the calls and the mini-batches of all ranks, or sends the first rank's mini-batch to the others."""

    def __init__(
        self,
        ranks: RankLayout | None,
        heartbeat: Heartbeat,
        *,
        copies: Mapping[str, Tensor | None],
        broadcasts: bool = False,
    ) -> None:
        """`broadcasts`: the first rank's mini-batches count; `copies`: see `copied_weights`. Collective."""
        self._copies = copies
        self._heartbeat, self._is_alone = heartbeat, ranks is None
        self.broadcasts = broadcasts and ranks is not None
        self._counts = Counter[str]()
        self._announced: _Announced | None = None
        self._failed = ""  # what failed on this rank, such as "step 3"
        if ranks is None:
            return
        size, num_devices, timeout = dist.get_world_size(), ranks.num_devices, ranks.timeout
        self._all = dist.new_group(backend="gloo", timeout=timeout)
        self._users: list[tuple[bool, dist.ProcessGroup]] = []  # of inputs and of targets: (is one, the group)
        for stage in (0, -1) if self.broadcasts else ():
            users = sorted({0, *range(ranks.devices[stage], size, num_devices)})
            self._users.append((dist.get_rank() in users, dist.new_group(users, backend="gloo", timeout=timeout)))

    def begin(
        self, call: str, *, batch: tuple[Any, Any] | None = None, num_rows: int = 0, is_full: bool = True
    ) -> None:
        """Announce a call; raise UsageError on every rank that waits where ranks do not do the same.

        `batch`: inputs and targets to compare, of `num_rows` samples; None stands for either where it is not known.
        """
        if self._is_alone:
            return
        if self._failed:
            raise RunError(
                f"{self._failed} failed and left other ranks in the middle of it, so pipe.{call} cannot run; end all processes, and "
                "resume from a checkpoint"
            )
        self._settle()
        self._counts[call] += 1
        number = self._counts[call]
        is_due = number <= _NUM_CHECKED or number & (number - 1) == 0
        digests = [digest(x) if x is not None and (is_due or _is_cheap(x)) else 0 for x in batch or (None, None)]
        sums = [0 if x is None or not is_due else checksum(x) for x in self._copies.values()]
        own = torch.tensor([_CALLS.index(call), num_rows, *digests, *sums])
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        work = dist.all_gather(rows, own, group=self._all, async_op=True)
        assert work is not None
        self._announced = _Announced(call=call, number=number, work=work, rows=rows)
        if call != "step" or is_due or not is_full:
            with self._heartbeat.waiting("ranks"):
                self._settle()

    @contextmanager
    def until_failure(self, what: str) -> Iterator[None]:
        """Around passes through all stages: where they fail and other ranks take part, no call can follow."""
        try:
            yield
        except Exception:
            self._failed = what
            raise

    def broadcast(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return the first rank's batch where it is used; elsewhere zeros of its shapes. Collective."""
        is_source = dist.get_rank() == 0
        with self._heartbeat.waiting("ranks"):
            header = [_each_tensor(lambda x: torch.empty_like(x, device="meta"), (inputs, targets))]
            dist.broadcast_object_list(header, src=0, group=self._all)
            made = [_each_tensor(lambda x: torch.zeros(x.shape, dtype=x.dtype), value) for value in header[0]]
            for given, value, (is_user, group) in zip((inputs, targets), made, self._users, strict=True):
                for tensor in _tensors(given if is_source else value) if is_user else ():
                    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                    dist.broadcast(values, src=0, group=group)  # into `value`, whose tensors are contiguous
        return (inputs, targets) if is_source else (made[0], made[1])

    def _settle(self) -> None:
        """Read the numbers of the last call."""
        if self._announced is None:
            return
        announced, self._announced = self._announced, None
        call = f"pipe.{announced.call}"
        try:
            announced.work.wait()
        except RuntimeError as lost:
            raise RunError(
                f"{call} needs every rank: {failure_text(lost)}; if no rank reports another error, call {call} on every "
                "rank, not within `if pipe.rank == 0`"
            ) from None
        calls, sizes, of_inputs, of_targets, *sums = zip(*(x.tolist() for x in announced.rows), strict=True)
        if len(set(calls)) > 1:
            found = "; ".join(f"pipe.{_CALLS[x]} by {_ranks_of(calls, x)}" for x in dict.fromkeys(calls))
            raise UsageError(
                f"ranks call different methods at the same time: {found}; expected the same calls in the same order: call each "
                "on every rank, not within `if pipe.rank == 0`, and give every rank as many batches"
            )
        if len(set(sizes)) > 1:
            found = "; ".join(f"{x} by {_ranks_of(sizes, x)}" for x in dict.fromkeys(sizes))
            raise UsageError(f"{call} number {announced.number} got other numbers of samples: {found}; {_SAME_BATCH}")
        odd: dict[str, list[str]] = {}
        for what, column in (("inputs", of_inputs), ("targets", of_targets)):
            odd.setdefault(_odd_ones(column), []).append(what)
        odd.pop("", None)
        if odd:
            found = "; ".join(f"{' and '.join(what)} of {x}" for x, what in odd.items())
            raise UsageError(f"ranks got different batches in {call} number {announced.number}: {found}; {_SAME_BATCH}")
        for name, column in zip(self._copies, sums, strict=True):
            if drifted := _odd_ones(column):
                raise UsageError(
                    f"the copies of {name} have drifted apart before {call} number {announced.number}: values of {drifted}; expected "
                    "the same changes of gradients and weights on every rank: random numbers of one seed, pipe.clip_grad_norm_ "
                    "in place of a norm over the parameters of one rank, and the same optimizer settings on devices of one kind"
                )


def _odd_ones(digests: Sequence[int]) -> str:
    """The ranks whose digest differs from that of the first rank that has one; "" if none does."""
    first = next((rank for rank, x in enumerate(digests) if x), 0)
    odd = [rank for rank, x in enumerate(digests) if x and x != digests[first]]
    return f"{_ranks(odd)} differ from those of rank {first}" if odd else ""


def _ranks_of(values: Sequence[int], value: int) -> str:
    return _ranks([rank for rank, x in enumerate(values) if x == value])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _tensors(value: Any) -> Iterable[Tensor]:
    return (x for x in pytree.tree_leaves(value) if isinstance(x, Tensor) and x.numel())


def _is_cheap(value: Any) -> bool:
    """Whether the digest of a batch takes no time that counts: small tensors of the CPU."""
    tensors = list(_tensors(value))
    return all(x.device.type == "cpu" for x in tensors) and sum(x.nbytes for x in tensors) <= _CHEAP_BYTES


def _each_tensor(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    return pytree.tree_map_only(Tensor, change, value)


def checksum(tensor: Tensor) -> int:
    """Return the sum of a tensor's bits as whole numbers, or of a sharded one's own part; never 0."""
    part = local_tensor(tensor).detach().contiguous().reshape(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(part.element_size(), torch.int64)
    return int(part.view(whole).sum(dtype=torch.int64)) or 1


def digest(value: Any) -> int:
    """Return 64 bits of the values of a structure of tensors; never 0."""
    leaves, structure = pytree.tree_flatten(value)
    found = hashlib.blake2b(str(structure).encode(), digest_size=8)
    for x in leaves:
        if isinstance(x, Tensor):
            found.update(f"{x.dtype}{tuple(x.shape)}".encode())
            if x.numel() and x.layout == torch.strided:
                found.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(x, PLAIN):  # the text of any other object may hold its address
            found.update(repr(x).encode())
    return int.from_bytes(found.digest(), "big", signed=True) or 1
