"""One stage as a module: its layers, recomputed in the backward pass where the plan says so.

Recompute is torch's non-reentrant checkpoint: the forward keeps only its inputs, the random state is replayed, and the
buffers that a forward updates (batch norm's statistics) are not updated a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gplan.nouns import RecomputeMode
from gplan.simulator import is_recomputed


class StageModule(nn.Module):
    """The layers of a stage; `microbatch` says which micro-batch the next forward belongs to."""

    _CHECKPOINT: ClassVar[dict[str, Any]] = {"use_reentrant": False, "preserve_rng_state": True}

    def __init__(self, layers: nn.Module, *, num_microbatches: int, recompute: RecomputeMode) -> None:
        super().__init__()
        self.layers = layers
        self.microbatch = 0
        self._num_microbatches = num_microbatches
        self._recompute = recompute

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Boundary tensors in, boundary tensors out."""
        again = is_recomputed(self.microbatch, num_microbatches=self._num_microbatches, recompute=self._recompute)
        run = partial(checkpoint, self.layers, **self._CHECKPOINT, context_fn=self._contexts) if again else self.layers
        outputs: tuple[Tensor, ...] = run(*tensors)
        return outputs

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _kept_buffers(self.layers)


@contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    """Buffers are afterwards what they were; written past autograd, which may have saved them."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, kept in before:
            buffer.data.copy_(kept)
