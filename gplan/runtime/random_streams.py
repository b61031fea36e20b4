"""Random numbers that are the same for every partition, schedule and engine.

Each layer that draws is seeded anew for every micro-batch from the run's seed, the step, the micro-batch's first
sample and the layer's name. So dropout does not depend on K or the cuts, a recompute repeats the forward's numbers,
and a resumed run continues as an uninterrupted one. Seeds are mixed with splitmix64 (Steele, Lea and Flood 2014,
figure 17); torch's CPU generator uses the lower 32 bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class RandomStreams:
    """Seeds the generator of one device before each layer that draws."""

    def __init__(self, run_seed: int, device: torch.device) -> None:
        self.run_seed, self.device = run_seed, device
        self._step_key = 0
        self._first_rows: Sequence[int] = ()

    def begin(self, step: int, first_rows: Sequence[int]) -> None:
        """Set the step, and for each micro-batch its first sample within the mini-batch."""
        self._step_key = splitmix64(splitmix64(self.run_seed) ^ step)
        self._first_rows = first_rows

    def seed(self, key: int, microbatch: int) -> None:
        """Seed the generator for one layer (`key` from `seed_key`) and micro-batch."""
        seed = splitmix64(splitmix64(self._step_key ^ self._first_rows[microbatch]) ^ key)
        is_on_gpu = self.device.type == "cuda"
        generator = torch.cuda.default_generators[self.device.index or 0] if is_on_gpu else torch.default_generator
        generator.manual_seed(seed)

    def preserved(self) -> AbstractContextManager[None]:
        """Restore the generators' states at the end of the block."""
        return torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])


def seed_key(name: str) -> int:
    """Return the 32-bit key of a layer's name."""
    return zlib.crc32(name.encode())


def splitmix64(number: int) -> int:
    """One step of splitmix64: a bijection on 64-bit numbers whose values look random.

    >>> hex(splitmix64(0))
    '0xe220a8397b1dcdaf'
    """
    z = (number + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
