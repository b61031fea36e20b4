"""Traces of the allocator and the storage recorder: blocks, peaks and windows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import MemTracker
from torch.nn import functional as F

from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import Tensors, flat_tensors
from gplan_profiler.memory.allocations import (
    AllocationEvent,
    AllocationTrace,
    StorageRecorder,
    now_ns,
    optimizer_state_bytes,
    storage_bytes,
    storage_key,
    traced_allocations,
)
from gplan_profiler.memory.layer_memory import (
    LayerBytes,
    allocate_gradients,
    layer_bytes,
    layers_apart,
    measure_bytes,
    pass_through,
    tied_uses,
    with_sums,
)
from tests.model_files import load_model_file

KIB = 1024


def test_a_sparse_buffer_counts_with_its_values() -> None:
    heads = torch.eye(4).to_sparse()
    assert storage_bytes([heads, heads, torch.zeros(3)]) == 4 * 4 + 3 * 4


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


@pytest.mark.parametrize("off_ns", [-20_000, 20_000])
def test_a_clock_that_differs_from_the_allocators_puts_no_event_on_the_wrong_side(
    monkeypatch: pytest.MonkeyPatch, off_ns: int
) -> None:
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + off_ns)
    marks = []
    with traced_allocations() as trace:
        for num_bytes in range(1000, 1020):
            marks.append(now_ns())
            block = torch.empty(num_bytes, dtype=torch.uint8)
            marks.append(now_ns())
            del block
        marks.append(now_ns())
    expected = [sign * num_bytes for num_bytes in range(1000, 1020) for sign in (1, -1)]
    assert [event.num_bytes for event in trace.events] == expected
    for start, end, event in zip(marks[:-1], marks[1:], trace.events, strict=True):
        assert start <= event.time_ns < end


def node(*children: SimpleNamespace, tag: object = _EventType.TorchOp, **fields: object) -> SimpleNamespace:
    """A node of the profiler's tree."""
    own = {"start_time_ns": fields.pop("time_ns", 0), "name": fields.pop("name", "aten::empty")}
    return SimpleNamespace(children=children, tag=tag, extra_fields=SimpleNamespace(**fields), **own)


def block(time_ns: int, ptr: int, alloc_size: int, device: str) -> SimpleNamespace:
    """An allocation as the profiler records it; with a negative size, the end of one."""
    return node(tag=_EventType.Allocation, time_ns=time_ns, ptr=ptr, alloc_size=alloc_size, device=torch.device(device))


TREE = [
    node(block(40, 7, -512, "cpu"), block(10, 7, 512, "cpu")),
    node(node(block(30, 8, 1024, "cpu"), block(20, 7, 64, "cuda:0"))),
]

HISTORY = [
    {"action": action, "addr": address, "size": size, "time_us": time_us}
    for action, address, size, time_us in [
        ("segment_alloc", 4096, 2**21, 10),
        ("alloc", 4096, 700, 11),
        ("segment_alloc", 2**22, 2**23, 12),
        ("alloc", 2**22, 2**23, 13),
        ("free_requested", 4096, 700, 14),
        ("free_completed", 4096, 700, 15),
        ("segment_free", 4096, 2**21, 16),
        ("snapshot", 0, 0, 17),
    ]
]


def test_a_peak_can_leave_out_what_was_given_before() -> None:
    events = [(1, 1, 10), (2, 2, 5), (3, 3, 7), (4, 2, -5), (5, 4, 2), (6, 1, -10)]
    trace = AllocationTrace(tuple(AllocationEvent(*x) for x in events))
    assert trace.peak_bytes(3, 7) == 22
    assert trace.peak_bytes(3, 7, without=(2, 3)) == 19
    assert trace.peak_bytes(3, 7, without=(1, 3)) == 9
    given_ns, freed_ns, num_bytes = trace.blocks
    assert (given_ns.tolist(), freed_ns[:2].tolist(), num_bytes.tolist()) == ([1, 2, 3, 5], [6, 4], [10, 5, 7, 2])


def test_the_blocks_of_a_cpu_come_from_the_profiler_in_order() -> None:
    trace = AllocationTrace()
    trace.fill_from_tree(TREE)
    assert trace.events == tuple(AllocationEvent(*x) for x in [(10, 7, 512), (30, 8, 1024), (40, 7, -512)])


def test_the_blocks_of_a_gpu_come_from_its_allocator() -> None:
    trace = AllocationTrace()
    trace.fill_from_history(HISTORY, reserved_bytes=1000)
    expected = [(11_000, 4096, 1024), (13_000, 2**22, 2**23), (14_000, 4096, -1024)]
    assert trace.events == tuple(AllocationEvent(*x) for x in expected)
    assert trace.peak_reserved_bytes == 1000 + 2**21 + 2**23
    empty = AllocationTrace()
    empty.fill_from_history([], reserved_bytes=1000)
    assert empty.peak_reserved_bytes == 1000


def test_a_cpu_reserves_nothing() -> None:
    with traced_allocations() as trace:
        kept = torch.empty(1024)
    assert (sum(event.num_bytes for event in trace.events), trace.peak_reserved_bytes) == (kept.nbytes, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_trace_matches_allocator_statistics() -> None:
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


EXAMPLES = Path(__file__).parent.parent.parent / "examples"
MODELS: dict[str, dict[str, Any]] = {
    "transformer_lm.py": {"num_blocks": 2, "width": 64},
    "gpt2_hf.py": {"num_blocks": 2, "width": 64},
    "resnet.py": {},
    "unet.py": {},
}
OF_CONVOLUTIONS = {"resnet.py", "unet.py"}
SUMS_BY_THREAD = 8192  # bytes by which runs differ: partial sums of norms, as many as threads had work


def recorded(layers: list[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor]) -> tuple[LayerBytes, ...]:
    tied = tied_uses(layers)
    calls = layers_apart(layers, tied)
    with StorageRecorder() as recorder:
        passage = pass_through(calls, inputs, loss, now=recorder.now, address_of=storage_key)
    return with_sums(layer_bytes(recorder.trace(), passage), tied)


def test_births_and_deaths_are_those_of_the_storages() -> None:
    before = torch.zeros(100)
    with StorageRecorder() as recorder:
        kept = before + 1
        middle = recorder.now()
        gone = torch.zeros(50)
        view = kept.view(10, 10)[2:]
        del gone
        kept.add_(before)
        later = recorder.now()
    trace = recorder.trace()
    assert trace.alive(0, later, later) == {storage_key(view): 400}
    assert trace.peak_bytes() == 600
    assert trace.peak_bytes(0, middle) == 400


def test_deaths_after_the_block_are_nobodys_business() -> None:
    with StorageRecorder() as recorder:
        kept = torch.zeros(4)
    del kept
    assert [event.num_bytes for event in recorder.trace().events] == [16]


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest) -> tuple[str, tuple[LayerBytes, ...], tuple[LayerBytes, ...]]:
    """The allocator's record and the recorder, of a real model on a CPU."""
    if request.param == "gpt2_hf.py":
        pytest.importorskip("transformers")
    file = load_model_file(str(EXAMPLES / request.param), settings=MODELS[request.param])
    inputs, target = next(file.batches(2))
    chain = capture(file.model, inputs)
    allocate_gradients(file.model)
    layers = [chain.stage(layer, layer + 1) for layer in range(len(chain))]

    def loss(tensors: Tensors) -> Tensor:
        return file.loss(chain.model_output(tensors), target)

    tensors = flat_tensors(inputs, what="the inputs")
    return request.param, measure_bytes(layers, tensors, loss), recorded(layers, tensors, loss)


def test_stash_and_output_match_the_allocator(both: tuple[str, Any, Any]) -> None:
    _, allocator, recorder = both
    for measured, found in zip(allocator, recorder, strict=True):
        assert found.stash_bytes == pytest.approx(measured.stash_bytes, rel=0.01, abs=64)
        assert found.output == measured.output


def test_workspaces_match_the_allocator(both: tuple[str, Any, Any]) -> None:
    name, allocator, recorder = both
    for measured, found in zip(allocator[:-1], recorder[:-1], strict=True):  # a loss may take another path under a mode
        for of_found, of_measured in (
            (found.forward_workspace_bytes, measured.forward_workspace_bytes),
            (found.backward_workspace_bytes, measured.backward_workspace_bytes),
        ):
            assert of_found <= 1.01 * of_measured + SUMS_BY_THREAD
            if name not in OF_CONVOLUTIONS:
                assert of_found == pytest.approx(of_measured, rel=0.01, abs=SUMS_BY_THREAD)


@pytest.mark.parametrize("activation", [nn.GELU, nn.Sigmoid])
def test_the_peak_is_that_of_torchs_memory_tracker(activation: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(64, 256), activation(), nn.LayerNorm(256), nn.Linear(256, 10))
    x, target = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
    allocate_gradients(model)

    def step() -> None:
        F.cross_entropy(model(x), target).backward()

    tracker = MemTracker()
    tracker.track_external(model, x, target)
    held = sum(t.nbytes for p in model.parameters() for t in (p, p.grad)) + x.nbytes + target.nbytes
    with tracker:
        step()
    with StorageRecorder() as recorder:
        step()
    total = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert recorder.trace().peak_bytes() == total - held


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_storage_is_counted_once_however_many_tensors_see_it(device: str) -> None:
    base = torch.zeros(100, device=device)
    assert storage_bytes([base, base[10:], base.view(10, 10), torch.zeros(1, device=device)]) == 404


def test_fake_tensors_have_storages_of_their_own() -> None:
    with FakeTensorMode():
        one, other = torch.zeros(4), torch.zeros(4)
        assert storage_key(one) == storage_key(one.view(2, 2)) != storage_key(other)


def test_optimizer_state_bytes() -> None:
    parameter = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.Adam([parameter])
    assert optimizer_state_bytes(optimizer) == 0
    parameter.grad = torch.ones(1000)
    optimizer.step()
    assert optimizer_state_bytes(optimizer) == 2 * 4000 + 4
