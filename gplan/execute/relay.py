"""A made-up model whose stages compute for some milliseconds and pass on tensors of very different sizes.

`gplan/execute/engine_cost.py` runs it to see what the engine takes beside its stages. As real layers do, they go through
several times the memory of a core's own caches, with operations of several kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SENT_BYTES = (2**12, 2**17, 2**21, 2**23, 2**19, 2**15)
"""Over every second cut, from the first one on; over the others as much as over the first.
Neither end waits for much."""

NUM_STAGES = 2 * len(SENT_BYTES)
_WIDTH = 512  # floats; no cut passes on fewer
_ROWS = 64
_COPIES = 8  # of the rows: a mebibyte


class Relay(nn.Module):
    """What comes in is folded to one row, worked on, and repeated to the size of what goes out."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.repeats = num_bytes // (4 * _WIDTH)
        self.work = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.GELU())
        self.after = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[1, n] -> [1, repeats * width], n a multiple of the width."""
        row = x.view(-1, _WIDTH).mean(0)
        worked = F.dropout(self.work(row.expand(_ROWS, _WIDTH)), 0.1)
        wide = F.gelu(torch.cat([worked] * _COPIES).softmax(1))
        out: Tensor = self.after(wide[:_ROWS]).mean(0) + wide.mean(0)
        return out.repeat(1, self.repeats)


def model() -> nn.Module:
    """One layer per stage."""
    sizes = [SENT_BYTES[i // 2] if i % 2 == 0 else SENT_BYTES[0] for i in range(NUM_STAGES)]
    return nn.Sequential(*map(Relay, sizes))


def batches(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Nothing that could be learned."""
    while True:
        yield torch.zeros(batch_size, _WIDTH), torch.zeros(batch_size)


def loss(output: Tensor, _target: Tensor) -> Tensor:
    """Any scalar."""
    return output.mean()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The cheapest."""
    return torch.optim.SGD(parameters, lr=0.0)
