"""The mini-batches of a run, one after the other: the same on every rank, and the same again after a resume.

Batches that are drawn from the generators of torch, Python or numpy get a stream of their own. A run that is resumed
draws again what was used before, and throws it away, so it goes on with the very batch that would have come next.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from profiler.model.data import check_batch, check_target
from profiler.model.lazy import random_state, random_state_kept
from profiler.model.load import Batch, ModelFile


class Data:
    """What the model file's `batches` gives for the mini-batch size of a plan."""

    def __init__(self, file: ModelFile, batch_size: int, *, seed: int) -> None:
        self._file, self._batch_size = file, batch_size
        self._batches = file.batches(batch_size)
        with random_state_kept():
            _seed_all(seed)
            self._go_on = random_state()
        self._peeked: list[Batch] = []
        self.position = 0  # batches given so far

    def peek(self) -> Batch:
        """The batch that comes next."""
        if not self._peeked:
            self._peeked.append(self._drawn())
        return self._peeked[0]

    def take(self) -> Batch:
        """The next batch: inputs and target."""
        batch = self.peek()
        self._peeked.clear()
        self.position += 1
        return batch

    def skip_to(self, position: int) -> None:
        """Draw and drop batches until `position` of them have been given."""
        while self.position < position:
            self.take()

    def _drawn(self) -> tuple[Any, Any]:
        size, name = self._batch_size, self._file.name
        with random_state_kept():
            self._go_on()
            inputs, target = next(self._batches)
            self._go_on = random_state()
        check_batch(inputs, size, what=f"the inputs that batches({size}) of {name} gives")
        check_target(target, size, what=f"the targets that batches({size}) of {name} gives")
        return inputs, target


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
