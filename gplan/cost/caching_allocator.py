"""What PyTorch's caching allocator for CUDA reserves of the device, for a sequence of allocations and frees.

Sizes are rounded up to 512 bytes. Up to 1 MiB come from segments of 2 MiB (the small pool), up to 10 MiB from segments of
20 MiB, larger ones from a segment of their own, rounded up to 2 MiB (the large pool). The smallest free block that is
large enough is taken, the lowest address first; what it has more is split off where that is at least 512 bytes (small
pool) or over 1 MiB (large pool). Free neighbours of one segment are merged; segments are never merged and never returned
to the device. Source: pytorch/pytorch, c10/cuda/CUDACachingAllocator.cpp. Left out: that cached segments go back where no
memory is left, expandable segments, and streams, whose blocks are freed late where several use them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

_ROUND = 512
_SMALL = 2**20  # the most of the small pool
_LARGE = 10 * 2**20  # from here on a segment of its own
_SMALL_SEGMENT = 2 * 2**20
_LARGE_SEGMENT = 20 * 2**20


def _rounded(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


@dataclass(slots=True, eq=False)
class Block:
    """A range of a segment."""

    num_bytes: int
    address: int
    is_small: bool
    is_free: bool = False
    before: Block | None = None  # neighbours in the segment
    after: Block | None = None


@dataclass(slots=True)
class CachingAllocator:
    """The allocator's state; `reserved_bytes` is what it has of the device, `allocated_bytes` what it has handed out."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    most_allocated_bytes: int = 0
    doing: str = ""  # what the next blocks are for, to who reads a record of them
    _free: dict[bool, list[tuple[int, int, Block]]] = field(default_factory=lambda: {True: [], False: []})
    _next_address: int = 0

    def allocate(self, num_bytes: int) -> Block:
        """A block of at least so many bytes."""
        size = max(_ROUND, _rounded(num_bytes, _ROUND))
        is_small = size <= _SMALL
        free = self._free[is_small]
        place = bisect_left(free, (size, -1))
        block = free.pop(place)[2] if place < len(free) else self._new(size, is_small)
        rest = block.num_bytes - size
        if rest >= _ROUND if is_small else rest > _SMALL:
            self._split(block, size)
        block.is_free = False
        self.allocated_bytes += block.num_bytes
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, merged with free neighbours."""
        if block.is_free:
            raise ValueError(f"the block at {block.address} is free already; expected one that is in use")
        self.allocated_bytes -= block.num_bytes
        if block.after and block.after.is_free:
            self._merge(block, block.after)
        if block.before and block.before.is_free:
            block = block.before
            self._take_out(block)
            assert block.after is not None
            self._merge(block, block.after, in_use=True)
        self._put_back(block)

    def _put_back(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.num_bytes, block.address, block))

    def _take_out(self, block: Block) -> None:
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.num_bytes, block.address))]

    def _merge(self, block: Block, after: Block, *, in_use: bool = False) -> None:
        """Join a block with the one behind it."""
        if not in_use:
            self._take_out(after)
        block.num_bytes += after.num_bytes
        block.after = after.after
        if block.after:
            block.after.before = block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.num_bytes - size, block.address + size, block.is_small, before=block, after=block.after)
        if block.after:
            block.after.before = rest
        block.after, block.num_bytes = rest, size
        self._put_back(rest)

    def _new(self, size: int, is_small: bool) -> Block:
        """A segment of memory that was not reserved before."""
        segment = _SMALL_SEGMENT if is_small else max(_LARGE_SEGMENT, size)
        segment = _rounded(segment if size < _LARGE else size, _SMALL_SEGMENT)
        self.reserved_bytes += segment
        self._next_address += segment
        return Block(segment, self._next_address - segment, is_small)
