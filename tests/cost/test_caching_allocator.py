"""The caching allocator: traces worked out by hand, and laws over random ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.cost.caching_allocator import CachingAllocator

MIB = 2**20


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # what is over is too little to be split off
        (25 * MIB, 26 * MIB, 26 * MIB),
    ],
)
def test_first_allocation(num_bytes: int, allocated: int, reserved: int) -> None:
    one = CachingAllocator()
    one.allocate(num_bytes)
    assert (one.allocated_bytes, one.reserved_bytes) == (allocated, reserved)


def test_segments_are_shared() -> None:
    one = CachingAllocator()
    for _ in range(3):
        one.allocate(6 * MIB)  # 18 of 20 MiB
    assert one.reserved_bytes == 20 * MIB
    one.allocate(2 * MIB)  # exactly what is left
    assert (one.allocated_bytes, one.reserved_bytes) == (20 * MIB, 20 * MIB)
    one.allocate(512)  # of the small pool
    assert one.reserved_bytes == 22 * MIB


def test_smallest_block_that_fits_is_taken() -> None:
    one = CachingAllocator()
    large, small = one.allocate(30 * MIB), one.allocate(20 * MIB)
    one.free(large)
    one.free(small)
    assert one.allocate(15 * MIB).address == small.address
    assert one.allocate(30 * MIB).address == large.address
    assert one.reserved_bytes == 50 * MIB


def test_only_neighbours_of_one_segment_merge() -> None:
    one = CachingAllocator()
    parts = [one.allocate(6 * MIB) for _ in range(3)]
    for i in (0, 2, 1):
        one.free(parts[i])
    one.allocate(20 * MIB)  # the whole segment again
    assert one.reserved_bytes == 20 * MIB
    apart = CachingAllocator()
    for block in [apart.allocate(12 * MIB), apart.allocate(12 * MIB)]:
        apart.free(block)
    apart.allocate(24 * MIB)
    assert apart.reserved_bytes == 48 * MIB


def test_free_twice_is_refused() -> None:
    one = CachingAllocator()
    block = one.allocate(512)
    one.free(block)
    with pytest.raises(ValueError, match="free already"):
        one.free(block)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 7)), max_size=40))
def test_laws(steps: list[tuple[int, int]]) -> None:
    """Blocks in use never overlap, what is reserved is enough, and all that is freed can be had again at once."""
    one, used = CachingAllocator(), []
    for num_bytes, victim in steps:
        used.append(one.allocate(num_bytes))
        assert used[-1].num_bytes >= num_bytes
        if victim < len(used):
            one.free(used.pop(victim))
        spans = sorted((x.address, x.address + x.num_bytes) for x in used)
        assert all(x[1] <= y[0] for x, y in pairwise(spans))
        assert one.allocated_bytes == sum(x.num_bytes for x in used) <= one.reserved_bytes
    for block in used:
        one.free(block)
    assert one.allocated_bytes == 0
    reserved_bytes = one.reserved_bytes
    for num_bytes, _ in steps[:1]:
        one.allocate(num_bytes)  # from what is cached
    assert one.reserved_bytes == reserved_bytes
