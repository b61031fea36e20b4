"""The allocator's record: what was held, by whom it was given, and nothing else disturbed."""

from __future__ import annotations

import os

import pytest
import torch

from profiler.bytes import now_ns, storage_bytes, traced_allocations

KIB = 1024


def test_the_peak_and_what_is_alive_are_the_allocators() -> None:
    old = torch.zeros(1000)
    with traced_allocations() as trace:
        start = now_ns()
        kept = torch.empty(4 * KIB, dtype=torch.uint8)
        gone = torch.empty(16 * KIB, dtype=torch.uint8)
        middle = now_ns()
        del gone, old
        torch.empty(8 * KIB, dtype=torch.uint8)
        end = now_ns()
    assert trace.peak_bytes() == 20 * KIB
    assert trace.peak_bytes(middle, end) == 20 * KIB  # the level at its start
    assert trace.alive(start, end, end) == {kept.data_ptr(): 4 * KIB}
    assert sorted(trace.alive(start, end, middle).values()) == [4 * KIB, 16 * KIB]


def test_a_storage_is_counted_once_however_many_tensors_see_it() -> None:
    base = torch.zeros(100)
    assert storage_bytes([base, base[10:], base.view(10, 10), torch.zeros(1)]) == 404


def test_what_is_said_to_standard_error_meanwhile_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    old = torch.zeros(100_000)
    with traced_allocations():
        os.write(2, b"a warning of somebody else\n")
        del old
    assert capfd.readouterr().err == "a warning of somebody else\n"
