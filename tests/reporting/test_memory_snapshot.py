"""The memory snapshot of a plan, read by torch's own tools."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import accumulate

from torch.cuda import _memory_viz

from gplan.core import Profile
from gplan.cost.caching_allocator import CachingAllocator
from gplan.cost.reserved_bytes import replayed
from gplan.reporting.memory_snapshot import memory_snapshot
from gplan.strategy_search.planner import balance
from gplan_profiler.analytic.decoder_config import Widths, load_decoder
from gplan_profiler.analytic.decoder_profile import DecoderProfile
from gplan_profiler.analytic.hardware import load_hardware

SIGNS = {"alloc": 1, "free_completed": -1}


def computed() -> Profile:
    made = DecoderProfile(
        name="llama3-8b", decoder=load_decoder("llama3-8b", {"num_hidden_layers": 8}),
        widths=Widths(tensor=2, sequence_length=2048), hardware=load_hardware("h100"),
    )  # fmt: skip
    return made.profile((1,))


def test_torch_reads_the_snapshot() -> None:
    profile = computed()
    plan = balance(profile, num_devices=2, num_microbatches=8, schedule="1f1b")
    content = memory_snapshot(plan, profile)
    assert content is not None
    snapshot = pickle.loads(content)
    allocators = replayed(plan, profile, CachingAllocator)
    reserved = sum(x.reserved_bytes for x in allocators)
    assert sum(x["total_size"] for x in snapshot["segments"]) == reserved
    for x in snapshot["segments"]:
        assert sum(y["size"] for y in x["blocks"]) == x["total_size"]
    for events, allocator in zip(snapshot["device_traces"], allocators, strict=True):
        levels = accumulate(SIGNS.get(x["action"], 0) * x["size"] for x in events)
        assert max(levels) == allocator.most_allocated_bytes
        assert sum(x["size"] for x in events if x["action"] == "segment_alloc") == allocator.reserved_bytes
    assert f"segments: {len(snapshot['segments'])}" in _memory_viz.segsum(snapshot)  # type: ignore[no-untyped-call]
    assert "cudaMalloc" in _memory_viz.trace(snapshot)  # type: ignore[no-untyped-call]
    names = {x["frames"][0]["name"] for events in snapshot["device_traces"] for x in events}
    assert "model.layers.0, forward of micro-batch 1" in names
    assert {"weights, gradients and master weights", "optimizer", "received by stage 1 for micro-batch 0"} <= names


def test_no_snapshot_without_tensors_of_layers() -> None:
    profile = computed()
    plan = balance(profile, num_devices=2, num_microbatches=8, schedule="1f1b")
    bare = replace(
        profile,
        layers=tuple(replace(x, costs=tuple(replace(y, num_forward_times=0) for y in x.costs)) for x in profile.layers),
    )
    assert memory_snapshot(plan, bare) is None
