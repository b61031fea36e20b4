"""GPipe and its form with several chunks a device: all forwards, then all backwards, the last micro-batch first.

In the pictures a cell is the time of a forward and shows the micro-batch; a backward takes two cells.

GPipe (Huang et al. 2019, figure 2c), K = 3, M = 4:

    device 0 | 0 1 2 3 . . . . . . 3 3 2 2 1 1 0 0
    device 1 | . 0 1 2 3 . . . 3 3 2 2 1 1 0 0 . .
    device 2 | . . 0 1 2 3 3 3 2 2 1 1 0 0 . . . .

    order      F0 .. F(M-1), then B(M-1) .. B0
    in flight  M micro-batches on every stage
    bubble     (K-1)/(M+K-1) for equal stages

Running the backwards from the last micro-batch on lets "except-last" recompute keep the one activation that is used at
once.

Looped BFS (Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism"), stage s on device s mod K; K = 2, v = 2, M = 2,
each device's second chunk in letters:

    device 0 | 0 1 a b . . . b b a a 1 1 0 0
    device 1 | . 0 1 a b b b a a 1 1 0 0 . .

    order      the forwards of all micro-batches chunk by chunk, then the backwards in reverse
    in flight  M micro-batches on every stage
    bubble     (K-1)/(vM+K-1) for equal stages and M >= K
"""

from __future__ import annotations

from gplan.core import Action, ActionKind


def looped_bfs(num_devices: int, num_microbatches: int, num_chunks: int) -> list[list[Action]]:
    """The orders of looped BFS for K devices of v chunks and M micro-batches; with one chunk those of GPipe.

    >>> " ".join(str(action) for action in looped_bfs(2, 2, 1)[1])
    '1F0 1F1 1B1 1B0'
    >>> " ".join(str(action) for action in looped_bfs(1, 2, 2)[0])
    '0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0'
    """
    microbatches, orders = range(num_microbatches), []
    for device in range(num_devices):
        stages = range(device, num_devices * num_chunks, num_devices)
        forwards = [Action(stage, ActionKind.FORWARD, m) for stage in stages for m in microbatches]
        backwards = [Action(x.stage, ActionKind.BACKWARD, x.microbatch) for x in reversed(forwards)]
        orders.append(forwards + backwards)
    return orders
