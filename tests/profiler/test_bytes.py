"""The allocator's record: what was held, by whom it was given, and nothing else disturbed."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from torch._C._profiler import _EventType

from profiler.memory.allocations import AllocationEvent, AllocationTrace, now_ns, traced_allocations

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


def node(*children: SimpleNamespace, tag: object = _EventType.TorchOp, **fields: object) -> SimpleNamespace:
    """A node of the profiler's tree."""
    time_ns = fields.pop("time_ns", 0)
    return SimpleNamespace(children=children, tag=tag, start_time_ns=time_ns, extra_fields=SimpleNamespace(**fields))


def block(time_ns: int, ptr: int, alloc_size: int, device: str, total_reserved: int = 0) -> SimpleNamespace:
    """An allocation as the profiler records it; with a negative size, the end of one."""
    return node(
        tag=_EventType.Allocation, time_ns=time_ns, ptr=ptr, alloc_size=alloc_size, device=torch.device(device),
        total_reserved=total_reserved,
    )  # fmt: skip


TREE = [
    node(block(40, 7, -512, "cuda:0", 2**21), block(10, 7, 512, "cuda:0", 2**21)),
    node(node(block(30, 8, 1024, "cuda:0", 2**22), block(20, 7, 64, "cpu"), block(25, 8, 2048, "cuda:1", 2**24))),
]


def test_a_peak_can_leave_out_what_was_given_before() -> None:
    events = [(1, 1, 10), (2, 2, 5), (3, 3, 7), (4, 2, -5), (5, 4, 2), (6, 1, -10)]
    trace = AllocationTrace(tuple(AllocationEvent(*x) for x in events))
    assert trace.peak_bytes(3, 7) == 22
    assert trace.peak_bytes(3, 7, without=(2, 3)) == 19
    assert trace.peak_bytes(3, 7, without=(1, 3)) == 9
    given_ns, freed_ns, num_bytes = trace.blocks()
    assert (given_ns.tolist(), freed_ns[:2].tolist(), num_bytes.tolist()) == ([1, 2, 3, 5], [6, 4], [10, 5, 7, 2])


@pytest.mark.parametrize(
    ("device", "events", "reserved_bytes"),
    [
        ("cuda:0", [(10, 7, 512), (30, 8, 1024), (40, 7, -512)], 2**22),
        ("cuda:1", [(25, 8, 2048)], 2**24),
        ("cpu", [(20, 7, 64)], 0),
    ],
)
def test_a_record_holds_the_blocks_of_its_own_device_in_order(
    device: str, events: list[tuple[int, int, int]], reserved_bytes: int
) -> None:
    trace = AllocationTrace()
    trace.fill(TREE, torch.device(device))
    assert trace.events == tuple(AllocationEvent(*event) for event in events)
    assert trace.peak_reserved_bytes == reserved_bytes


def test_a_cpu_reserves_nothing() -> None:
    with traced_allocations() as trace:
        kept = torch.empty(1024)
    assert (sum(event.num_bytes for event in trace.events), trace.peak_reserved_bytes) == (kept.nbytes, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_allocator_is_recorded_as_its_own_statistics_have_it() -> None:
    layer = torch.nn.Linear(512, 512, device="cuda")
    inputs = torch.randn(256, 512, device="cuda")
    layer(inputs).sum().backward()  # libraries take their workspaces
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with traced_allocations("cuda") as trace:
        layer(inputs).relu().sum().backward()
    assert trace.peak_bytes() == torch.cuda.max_memory_allocated() - before
    assert trace.peak_reserved_bytes == torch.cuda.max_memory_reserved()


def test_what_is_said_to_standard_error_meanwhile_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    old = torch.zeros(100_000)
    with traced_allocations():
        os.write(2, b"a warning of somebody else\n")
        del old
    assert capfd.readouterr().err == "a warning of somebody else\n"
