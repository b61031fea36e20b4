"""Zero-bubble schedules: a backward in two halves, of which only the first is awaited by the stage before
(Qi et al. 2024, "Zero Bubble Pipeline Parallelism").

I makes the gradients of a stage's inputs, W those of its weights. Ws are put where a device would wait. In the pictures
each of F, I and W takes one cell.

ZB-H1 (section 2.1), K = 3, M = 4:

    device 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    device 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    device 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    order      1F1B's with I for B; stage s runs the W of micro-batch m - s after the I of m
    in flight  min(M, K) micro-batches from F to W on every stage, as on the first stage of 1F1B
    bubble     (K-1)/(3M+K-1) for equal stages with F = I = W and M >= K, a third of 1F1B's for large M;
               in general a device waits (K-1)(F + I - min(F, I, W)), where 1F1B has (K-1)(F + I + W)

ZB-V (section 6) gives device d the stages d and 2K-1-d, so that a micro-batch turns round on the last device and ends
where it began; K = 2, M = 4, each device's first stage in small letters:

    device 0 | f0 f1 f2 F0 I0 W0 F1 I1 W1 f3 i0 w0 F2 I2 W2 i1 w1 F3 I3 W3 i2 w2 i3 w3 .
    device 1 | .  f0 F0 f1 F1 I0 W0 f2 i0 w0 F2 I1 W1 f3 i1 w1 F3 I2 W2 i2 I3 i3 w2 W3 w3

    order      2 (K - d) - 1 times f, d times F f, K - d times F I W, then f i w F I W in turns; at the end Is before Ws
    in flight  2K pairs of micro-batch and chunk from F to W on every device, at most: K micro-batches of both its
               chunks, as on the first stage of 1F1B
    bubble     (K-1)/(6M+K-1) for equal stages with F = I = W and M >= 2K-1: no device waits but before its first
               and after its last action; with other times devices wait longer, but no longer as M grows

With fewer micro-batches the order is the one for 2K-1 without those that are not there.
"""

from __future__ import annotations

from collections import Counter

from gplan.core import Action, ActionKind
from gplan.schedules.one_f_one_b import NUM_WARMUP, in_turns

_F, _I, _W = ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT


def zb_h1(num_devices: int, num_microbatches: int) -> list[list[Action]]:
    """The orders of ZB-H1 for K devices and M micro-batches.

    >>> " ".join(str(action) for action in zb_h1(2, 3)[1])
    '1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2'
    """
    orders = []
    for stage in range(num_devices):
        forwards, inputs, weights = ([Action(stage, kind, m) for m in range(num_microbatches)] for kind in (_F, _I, _W))
        order = []
        for action in in_turns(inputs, forwards, num_before=NUM_WARMUP["1f1b"](num_devices - stage)):
            order.append(action)
            if action.kind is _I and action.microbatch >= stage:
                order.append(weights[action.microbatch - stage])
        orders.append(order + weights[max(0, num_microbatches - stage) :])
    return orders


def zb_v(num_devices: int, num_microbatches: int) -> list[list[Action]]:
    """The orders of ZB-V for K devices and M micro-batches; each device holds two stages.

    >>> " ".join(str(action) for action in zb_v(1, 2)[0])
    '0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1'
    """
    return [_v_order(device, num_devices, num_microbatches) for device in range(num_devices)]


def _v_order(device: int, num_devices: int, num_microbatches: int) -> list[Action]:
    """What one device does on which of its stages; each takes the micro-batches as they come,
    as long as there are any."""
    near, far = device, 2 * num_devices - 1 - device
    before, after = device, num_devices - device
    num_steady = max(num_microbatches, 2 * num_devices - 1) - num_devices
    turns = [
        *[(near, _F)] * (2 * after - 1),
        *[(far, _F), (near, _F)] * before,
        *[(far, _F), (far, _I), (far, _W)] * after,
        *[(near, _F), (near, _I), (near, _W), (far, _F), (far, _I), (far, _W)] * num_steady,
        *[(near, _I), (far, _I)] * before,
        *[(near, _I), (near, _W)] * after,
        *[(far, _W)] * before,
        *[(near, _W)] * before,
    ]
    counts: Counter[tuple[int, ActionKind]] = Counter()
    order = []
    for stage, kind in turns:
        order.append(Action(stage, kind, counts[stage, kind]))
        counts[stage, kind] += 1
    return [action for action in order if action.microbatch < num_microbatches]
