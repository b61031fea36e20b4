"""A mini-batch of any number of samples as passes through the pipeline, each of equal micro-batches.

A whole mini-batch is one pass of M micro-batches of the plan's size. What does not divide is run as well as it can be
without padding, since padding would enter the statistics of a batch norm: as many micro-batches of the plan's size as
there are, in one pass, and the samples left over as one smaller micro-batch in a second. With replicas every one takes an
equal share of the samples, the first ones one more where they do not divide. Gradients of all passes add up, every
sample weighted alike.

    10 samples, micro-batches of 4:   pass 0: [0..4) [4..8)      pass 1: [8..10)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from gplan.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Micro-batches of one size that go through the pipeline together."""

    first_row: int  # in the mini-batch
    num_microbatches: int
    microbatch_size: int

    @property
    def rows(self) -> slice:
        """The samples of the pass."""
        return slice(self.first_row, self.first_row + self.num_microbatches * self.microbatch_size)

    def microbatch_rows(self, microbatch: int) -> slice:
        """The samples of one micro-batch."""
        first = self.first_row + microbatch * self.microbatch_size
        return slice(first, first + self.microbatch_size)

    @property
    def first_rows(self) -> tuple[int, ...]:
        """Where each micro-batch begins in the mini-batch."""
        return tuple(self.microbatch_rows(i).start for i in range(self.num_microbatches))


def passes_of(num_rows: int, *, microbatch_size: int, first_row: int = 0) -> tuple[Pass, ...]:
    """The passes of one pipeline for `num_rows` samples; none for no samples.

    >>> [(x.num_microbatches, x.microbatch_size) for x in passes_of(10, microbatch_size=4)]
    [(2, 4), (1, 2)]
    """
    num_whole, num_left = divmod(num_rows, microbatch_size)
    whole = Pass(first_row=first_row, num_microbatches=num_whole, microbatch_size=microbatch_size)
    left = Pass(first_row=whole.rows.stop, num_microbatches=1, microbatch_size=num_left)
    return tuple(x for x in (whole, left) if x.num_microbatches and x.microbatch_size)


def share_of(num_rows: int, *, replica: int, num_replicas: int) -> range:
    """The samples of a mini-batch that one of several replicas takes.

    >>> [share_of(10, replica=r, num_replicas=3) for r in range(3)]
    [range(0, 4), range(4, 7), range(7, 10)]
    """
    size, num_larger = divmod(num_rows, num_replicas)
    first = replica * size + min(replica, num_larger)
    return range(first, first + size + (replica < num_larger))


def num_rows_of(tensors: Sequence[Tensor], *, what: str) -> int:
    """The number of samples, dimension 0 of every tensor; raises UsageError where they differ or there is none."""
    sizes = [x.shape[0] if x.dim() else None for x in tensors]
    if not sizes or sizes[0] is None or len(set(sizes)) > 1:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors) or "no tensors"
        raise UsageError(f"{what} have shapes {shapes}; expected as many samples in dimension 0 of each")
    return sizes[0]


def rows_of(value: Any, rows: slice, num_rows: int) -> Any:
    """Some samples of a structure of tensors; what has not `num_rows` in dimension 0 is no data of samples and stays whole."""

    def cut(x: Any) -> Any:
        return x[rows] if isinstance(x, Tensor) and x.dim() and x.shape[0] == num_rows else x

    return pytree.tree_map(cut, value)
