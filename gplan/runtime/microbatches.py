"""Divides a mini-batch of any number of samples into passes of equal micro-batches.

A full mini-batch is one pass of M micro-batches of the plan's size. Any other is divided into as few micro-batches
as that size allows, as equal as possible: those of the larger size go through in one pass, those smaller by one
sample in a second. Nothing is padded, as padding would enter batch-norm statistics. Each replica takes an equal
share of the samples, the first ones one more if they do not divide. Gradients of all passes add up, all samples
weighted equally.

    10 samples, micro-batches of at most 4:   pass 0: [0..4)      pass 1: [4..7) [7..10)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gplan.core.errors import UsageError
from gplan_profiler.torch_compat import pytree


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Micro-batches of one size that go through the pipeline together."""

    first_row: int  # in the mini-batch
    num_microbatches: int
    microbatch_size: int

    @property
    def num_rows(self) -> int:
        """Number of samples."""
        return self.num_microbatches * self.microbatch_size

    @property
    def rows(self) -> slice:
        """The pass's samples within the mini-batch."""
        return slice(self.first_row, self.first_row + self.num_rows)

    def microbatch_rows(self, microbatch: int) -> slice:
        """The samples of one micro-batch."""
        first = self.first_row + microbatch * self.microbatch_size
        return slice(first, first + self.microbatch_size)

    @property
    def first_rows(self) -> tuple[int, ...]:
        """The first sample of each micro-batch."""
        return tuple(self.microbatch_rows(i).start for i in range(self.num_microbatches))


def split_into_passes(
    num_rows: int, *, microbatch_size: int, most_microbatches: int, first_row: int = 0
) -> tuple[Pass, ...]:
    """Return the passes of one pipeline for `num_rows` samples, each of at most `most_microbatches` micro-batches.

    >>> [(x.num_microbatches, x.microbatch_size) for x in split_into_passes(30, microbatch_size=4, most_microbatches=3)]
    [(3, 4), (3, 4), (2, 3)]
    """
    num_microbatches = -(-num_rows // microbatch_size)
    size, num_larger = divmod(num_rows, max(1, num_microbatches))
    found: list[Pass] = []
    for number, rows in ((num_larger, size + 1), (num_microbatches - num_larger, size)):
        for done in range(0, number, most_microbatches):
            count = min(most_microbatches, number - done)
            found.append(Pass(first_row=first_row, num_microbatches=count, microbatch_size=rows))
            first_row = found[-1].rows.stop
    return tuple(found)


def replica_rows(num_rows: int, *, replica: int, num_replicas: int) -> range:
    """Return the samples of a mini-batch that one replica takes.

    >>> [replica_rows(10, replica=r, num_replicas=3) for r in range(3)]
    [range(0, 4), range(4, 7), range(7, 10)]
    """
    size, num_larger = divmod(num_rows, num_replicas)
    first = replica * size + min(replica, num_larger)
    return range(first, first + size + (replica < num_larger))


def count_rows(tensors: Sequence[Tensor], *, what: str) -> int:
    """Return the number of samples: dimension 0 of every tensor. Raises UsageError if they differ or there is none."""
    sizes = [x.shape[0] if x.dim() else None for x in tensors]
    if not sizes or sizes[0] is None or len(set(sizes)) > 1:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors) or "no tensors"
        raise UsageError(f"{what} have shapes {shapes}; expected as many samples in dimension 0 of each")
    return sizes[0]


def take_rows(value: Any, rows: slice, num_rows: int) -> Any:
    """Cut samples out of a structure of tensors; values without `num_rows` in dimension 0 are kept whole."""

    def cut(x: Any) -> Any:
        return x[rows] if isinstance(x, Tensor) and x.dim() and x.shape[0] == num_rows else x

    return cut(value) if isinstance(value, Tensor) else pytree.tree_map(cut, value)  # tree_map is slow for one tensor


def concat_outputs(parts: Sequence[tuple[Any, int]]) -> Any:
    """Join outputs, each given with its number of samples; values that are not per sample come from the first one."""
    flat = [pytree.tree_flatten(output) for output, _ in parts]
    sizes = [num_rows for _, num_rows in parts]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined: list[Any] = []
    for values in columns:
        first = values[0]
        if not isinstance(first, Tensor):
            joined.append(first)
        elif all(x.dim() and x.shape[0] == size for x, size in zip(values, sizes, strict=True)):
            joined.append(torch.cat(values))
        else:
            joined.append(first.clone())  # a copy, as the engine reuses its buffers
    return pytree.tree_unflatten(joined, flat[0][1])
