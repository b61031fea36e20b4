"""1F1B and its relatives: after some warm-up forwards a device alternates one forward and one backward.

In the pictures a cell is the time of a forward and shows the micro-batch; a backward takes two cells.

1F1B (PipeDream-Flush; Narayanan et al. 2021, section 2.2), K = 3, M = 4:

    device 0 | 0 1 2 . . . . 0 0 3 1 1 . 2 2 . 3 3
    device 1 | . 0 1 . . 0 0 2 1 1 3 2 2 . 3 3 . .
    device 2 | . . 0 0 0 1 1 1 2 2 2 3 3 3 . . . .

    order      K - s forwards, then B and F in turns
    in flight  min(M, K - s) micro-batches on stage s
    bubble     (K-1)/(M+K-1) for equal stages, as GPipe
    transfers  of c each way make every micro-batch 2c (K-1)/K longer in the long run

1F1B with a cap of n starts at most n forwards on a stage before its first backward; K = 3, M = 4, n = 2:

    device 0 | 0 1 . . . . . 0 0 2 . . . 1 1 3 . . . 2 2 . 3 3
    device 1 | . 0 1 . . 0 0 . . . 2 1 1 . . . 3 2 2 . 3 3 . .
    device 2 | . . 0 0 0 1 1 1 . . . 2 2 2 . . . 3 3 3 . . . .

    order      min(n, K - s) forwards, then B and F in turns
    in flight  min(M, n, K - s) micro-batches on stage s: less memory, and a larger bubble where n < K

Eager 1F1B (Zhuang et al. 2022, "On Optimizing the Communication of Model Parallelism") starts more forwards, so that
what a device computes next has arrived while it computes something else:

    device 0 | 0 1 2 3 . . . 0 0 . 1 1 . 2 2 . 3 3
    device 1 | . 0 1 2 . 0 0 3 1 1 . 2 2 . 3 3 . .
    device 2 | . . 0 0 0 1 1 1 2 2 2 3 3 3 . . . .

    order      2 (K - s) - 1 forwards, then B and F in turns
    in flight  min(M, 2 (K - s) - 1) micro-batches on stage s
    bubble     that of 1F1B for equal stages; where they differ it may be more or less
    transfers  cost nothing in the long run while 2c is at most F + B

Interleaved 1F1B (Narayanan et al. 2021, section 2.2, figure 4) gives each device v chunks, stage s on device s mod K;
K = 2, v = 2, M = 4, each device's second chunk in letters:

    device 0 | 0 1 a b 2 . a a 3 b b c 0 0 d 1 1 . c c . d d 2 2 3 3
    device 1 | . 0 1 a a a b b b 2 0 0 3 1 1 c c c d d d 2 2 3 3 . .

    order      micro-batches in groups of K, each group through chunk after chunk (backwards from the last chunk);
               2 (K - d - 1) + (v - 1) K forwards on device d, then F and B in turns
    in flight  at most 2 (K - d - 1) + (v - 1) K + 1 pairs of micro-batch and chunk on device d: on the first as much as
               K (1 + (K-1)/(Kv)) micro-batches of all its chunks, where 1F1B has K
    bubble     (K-1)/(vM+K-1) for equal stages, where K divides M
    transfers  v times as many as in 1F1B

Where K does not divide M, the order is that of the next multiple without the micro-batches that are not there. One
chunk a device is 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable

from gplan.core import Action, ActionKind

NUM_WARMUP: dict[str, Callable[[int], int]] = {"1f1b": lambda left: left, "eager-1f1b": lambda left: 2 * left - 1}
"""Forwards on a stage before its first backward, by how many stages are left from it on (K - s)."""


def one_f_one_b(
    num_devices: int, num_microbatches: int, *, schedule: str = "1f1b", most_in_flight: int | None = None
) -> list[list[Action]]:
    """The orders of 1F1B or eager 1F1B for K devices and M micro-batches, of which a stage has at most so many in flight.

    >>> [str(action) for action in one_f_one_b(2, 3)[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    >>> [str(action) for action in one_f_one_b(3, 3, most_in_flight=1)[0]]
    ['0F0', '0B0', '0F1', '0B1', '0F2', '0B2']
    >>> " ".join(str(action) for action in one_f_one_b(2, 4, schedule="eager-1f1b")[0])
    '0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3'
    """
    orders = []
    for stage in range(num_devices):
        forwards = [Action(stage, ActionKind.FORWARD, m) for m in range(num_microbatches)]
        backwards = [Action(stage, ActionKind.BACKWARD, m) for m in range(num_microbatches)]
        num_before = min(NUM_WARMUP[schedule](num_devices - stage), most_in_flight or num_microbatches)
        orders.append(in_turns(backwards, forwards, num_before=num_before))
    return orders


def num_interleaved_warmup(num_devices: int, num_chunks: int, *, device: int) -> int:
    """Forwards of interleaved 1F1B on a device before its first backward."""
    if num_chunks == 1:
        return NUM_WARMUP["1f1b"](num_devices - device)
    return 2 * (num_devices - device - 1) + (num_chunks - 1) * num_devices + 1


def interleaved_1f1b(num_devices: int, num_microbatches: int, num_chunks: int) -> list[list[Action]]:
    """The orders of interleaved 1F1B for K devices of v chunks and M micro-batches; with one chunk it is 1F1B.

    >>> " ".join(str(action) for action in interleaved_1f1b(2, 2, 2)[1])
    '1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1'
    """
    orders = []
    for device in range(num_devices):
        stages = range(device, num_devices * num_chunks, num_devices)
        groups = range(0, num_microbatches, num_devices)
        forwards = [
            Action(stage, ActionKind.FORWARD, m)
            for group in groups for stage in stages for m in range(group, group + num_devices)
        ]  # fmt: skip
        backwards = [
            Action(stage, ActionKind.BACKWARD, m)
            for group in groups for stage in reversed(stages) for m in range(group, group + num_devices)
        ]  # fmt: skip
        num_before = num_interleaved_warmup(num_devices, num_chunks, device=device)
        order = in_turns(backwards, forwards, num_before=num_before)
        orders.append([action for action in order if action.microbatch < num_microbatches])
    return orders


def in_turns(first: list[Action], other: list[Action], *, num_before: int) -> list[Action]:
    """Some of the others before, then one of the first and one of the others in turns, as long as there are any."""
    order = other[:num_before]
    for number, action in enumerate(first):
        order.append(action)
        order += other[num_before + number : num_before + number + 1]
    return order
