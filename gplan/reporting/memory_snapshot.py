"""What the allocators do in a step of a plan, as a memory snapshot of torch: for pytorch.org/memory_viz.

A device of the plan is one of the snapshot. A block is named by the layer, action and micro-batch that it is for. Events have
no times: the viewer draws them one after the other.

Source: pytorch/pytorch, torch/cuda/_memory_viz.py (`_profile_to_snapshot`, `trace_plot`), which reads such files too.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from gplan.core import Plan, Profile
from gplan.cost.caching_allocator import Block, CachingAllocator
from gplan.cost.reserved_bytes import replayed

SNAPSHOT = "memory-snapshot.pickle"

_Record = dict[str, Any]


@dataclass(slots=True)
class _Recorded(CachingAllocator):
    """An allocator that records what it does, in torch's words."""

    events: list[_Record] = field(default_factory=list)
    segments: dict[int, int] = field(default_factory=dict)  # bytes by address
    blocks: dict[int, _Record] = field(default_factory=dict)  # in use, by address

    def allocate(self, num_bytes: int) -> Block:
        before = self.reserved_bytes
        block = CachingAllocator.allocate(self, num_bytes)
        if self.reserved_bytes > before:
            self.segments[block.address] = self.reserved_bytes - before
            self._record("segment_alloc", block.address, self.reserved_bytes - before)
        self.blocks[block.address] = self._record("alloc", block.address, block.num_bytes)
        return block

    def free(self, block: Block) -> None:
        del self.blocks[block.address]
        for action in ("free_requested", "free_completed"):
            self._record(action, block.address, block.num_bytes)
        CachingAllocator.free(self, block)

    def _record(self, action: str, address: int, num_bytes: int) -> _Record:
        frames = [{"name": self.doing, "filename": "", "line": 0}]
        made = {"action": action, "addr": address, "size": num_bytes, "stream": 0, "frames": frames}
        self.events.append(made)
        return made

    def state(self, device: int) -> list[_Record]:
        """The segments at the end, each with its blocks in order."""
        found = []
        for start, size in sorted(self.segments.items()):
            blocks, end, active = list[_Record](), start, 0
            for address in sorted(x for x in self.blocks if start <= x < start + size):
                made = self.blocks[address]
                blocks += [_free(address - end)] if address > end else []
                blocks.append({**_free(made["size"]), "state": "active_allocated", "frames": made["frames"]})
                end, active = address + made["size"], active + made["size"]
            blocks += [_free(start + size - end)] if start + size > end else []
            sizes = {"total_size": size, "allocated_size": active, "active_size": active}
            found.append({"device": device, "address": start, "stream": 0, **sizes, "blocks": blocks})
        return found


def _free(num_bytes: int) -> _Record:
    return {"size": num_bytes, "requested_size": num_bytes, "state": "inactive"}


def memory_snapshot(plan: Plan, profile: Profile) -> bytes | None:
    """The pickled snapshot of two steps; None where the profile has no tensors of layers.

    >>> torch.cuda._memory_viz.trace_plot(pickle.loads(memory_snapshot(plan, profile)))  # doctest: +SKIP
    """
    devices = replayed(plan, profile, _Recorded)
    if not devices:
        return None
    segments = [x for device, allocator in enumerate(devices) for x in allocator.state(device)]
    return pickle.dumps({"segments": segments, "device_traces": [x.events for x in devices]}, protocol=4)
