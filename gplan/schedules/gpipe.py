"""GPipe: every device runs all forwards, then all backwards, the last micro-batch first (Huang et al. 2019, figure 2c).

    device 0 | 0 1 2 3 . . . . . . 3 3 2 2 1 1 0 0
    device 1 | . 0 1 2 3 . . . . 3 3 2 2 1 1 0 0 .      (K = 3, M = 4, a backward takes twice a forward)
    device 2 | . . 0 1 2 3 3 3 2 2 1 1 0 0 . . . .

All M micro-batches are in flight on every stage. The bubble is (K-1)/(M+K-1) for equal stages. Running the backwards
from the last micro-batch on lets "except-last" recompute keep the one activation that is used at once.
"""

from __future__ import annotations

from gplan.nouns import Action, ActionKind, Schedule


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """GPipe's order for K stages and M micro-batches.

    >>> [str(action) for action in gpipe(2, 2).orders[1]]
    ['1F0', '1F1', '1B1', '1B0']
    """
    return Schedule(
        name="gpipe",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        orders=tuple(_order(stage, num_microbatches) for stage in range(num_stages)),
    )


def _order(stage: int, num_microbatches: int) -> tuple[Action, ...]:
    microbatches = range(num_microbatches)
    forwards = [Action(stage, ActionKind.FORWARD, m) for m in microbatches]
    backwards = [Action(stage, ActionKind.BACKWARD, m) for m in reversed(microbatches)]
    return (*forwards, *backwards)
