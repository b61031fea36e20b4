"""1F1B: after K - s warm-up forwards, stage s alternates one backward and one forward (PipeDream-Flush,
Narayanan et al. 2021, section 2.2).

    device 0 | 0 1 2 . . . . 0 0 3 1 1 . 2 2 . 3 3
    device 1 | . 0 1 . . 0 0 2 1 1 3 2 2 . 3 3 . .      (K = 3, M = 4, a backward takes twice a forward)
    device 2 | . . 0 0 0 1 1 1 2 2 2 3 3 3 . . . .

At most min(M, K - s) micro-batches are in flight on stage s; the bubble of equal stages is GPipe's.
"""

from __future__ import annotations

from gplan.nouns import Action, ActionKind, Schedule


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B's order for K stages and M micro-batches.

    >>> [str(action) for action in one_f_one_b(2, 3).orders[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    return Schedule(
        name="1f1b",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        orders=tuple(_order(stage, num_stages, num_microbatches) for stage in range(num_stages)),
    )


def _order(stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    num_warmup = min(num_stages - stage, num_microbatches)
    order = [Action(stage, ActionKind.FORWARD, m) for m in range(num_warmup)]
    for microbatch in range(num_microbatches):
        order.append(Action(stage, ActionKind.BACKWARD, microbatch))
        if microbatch + num_warmup < num_microbatches:
            order.append(Action(stage, ActionKind.FORWARD, microbatch + num_warmup))
    return tuple(order)
