"""The parts that a stage's memory is made of; `gplan/memory.py` says which of them are held when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Bytes = TypeVar("Bytes", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes(Generic[Bytes]):
    """The parts that a stage's memory is made of: of one stage (int), or of many candidate stages (arrays)."""

    weight: Bytes
    gradient: Bytes
    optimizer: Bytes
    stash: Bytes  # per micro-batch whose activations are all kept
    checkpoint: Bytes  # per micro-batch that will be recomputed
    again: Bytes  # of the one being recomputed: its layers' stash anew, and but for the last stage its checkpoint
    pending: Bytes  # per micro-batch between the halves of its backward, above the stash
    sent: Bytes  # per micro-batch that is done: what was sent for it stays until the step ends
    forward_workspace: Bytes
    backward_workspace: Bytes
    recompute_workspace: Bytes  # of a forward that keeps only its checkpoint
    again_workspace: Bytes  # of a whole backward that recomputes
    optimizer_workspace: Bytes
    buffer: Bytes
