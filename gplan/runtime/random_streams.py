"""Random numbers that depend on what is computed, not on where or when.

Each layer that draws is seeded anew for every micro-batch, by the run's seed, the step, the place of the micro-batch in
the mini-batch, and the layer's name. So dropout is the same for every K, every cut, schedule and engine, a recompute
draws what the forward drew, and a run that is resumed goes on as it would have. Seeds are mixed by splitmix64
(Steele, Lea and Flood 2014, figure 17); torch's CPU generator uses the lower 32 bits of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class RandomStreams:
    """Seeds the generator of one device for whatever draws next."""

    def __init__(self, run_seed: int, device: torch.device) -> None:
        self.run_seed, self.device = run_seed, device
        self._step_key = 0
        self._first_rows: Sequence[int] = ()

    def begin(self, step: int, first_rows: Sequence[int]) -> None:
        """From here on draws are those of a step, for micro-batches that begin at these samples of its mini-batch."""
        self._step_key = splitmix64(splitmix64(self.run_seed) ^ step)
        self._first_rows = first_rows

    def seed(self, key: int, microbatch: int) -> None:
        """The next draw is the first one of the layer with this key (see `key_of`), for a micro-batch."""
        seed = splitmix64(splitmix64(self._step_key ^ self._first_rows[microbatch]) ^ key)
        generator_of(self.device).manual_seed(seed)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Afterwards the generators are what they were before."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            yield


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that operations on a device draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def seed_key(name: str) -> int:
    """What stands for a layer's name in seeds."""
    return zlib.crc32(name.encode())


def splitmix64(number: int) -> int:
    """One step of splitmix64: 64 bits that look random and are all different for different numbers.

    >>> hex(mixed(0))
    '0xe220a8397b1dcdaf'
    """
    z = (number + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
