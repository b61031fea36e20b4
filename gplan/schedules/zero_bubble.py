"""Zero-bubble schedules: a backward in two halves, of which only the first is awaited by the stage before (Qi et al. 2023,
"Zero Bubble Pipeline Parallelism").

I makes the gradients of a stage's inputs, W those of its weights. Ws are put where a device would wait.

ZB-H1 (section 2.1, figure 3), K = 3, M = 4, each of F, I and W takes as long:

    device 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 .. I2 W2 I3 W3
    device 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    device 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    order      1F1B's with I for B; stage s runs the W of micro-batch m - s after the I of m
    in flight  at most min(M, K) micro-batches from F to W on every stage, as on the first stage of 1F1B
    bubble     (K-1)/(3M+K-1) for equal stages with F = I = W and M >= K, a third of 1F1B's; (K-1)(F+I-W) in general

ZB-V (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3) gives device d the stages d and 2K-1-d, so
that a micro-batch turns round on the last device and ends where it began; K = 2, stages 2 and 3 in capitals (M = 4):

    device 0 | f0 f1 f2 F0 I0 W0 F1 I1 W1 i0 w0 f3 ...
    device 1 | .  f0 F0 f1 F1 I0 W0 f2 i0 w0 F2 I1 ...

    order      2 (K - d) - 1 forwards f, d times F f, K - d times F I W, then f i w F I W in turns; at the end Is before Ws
    in flight  at most 2 K pairs of micro-batch and chunk from F to W on a device: K micro-batches of a whole stage
    bubble     (K-1)/(6M+K-1) for equal stages with F = I = W and M >= 2K; no device waits but before its first and after
               its last action

With fewer micro-batches than that the order is the one for 2K without those that are not there.
"""

from __future__ import annotations

from collections import Counter

from gplan.nouns import Action, ActionKind
from gplan.schedules.one_f_one_b import in_turns

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
        for action in in_turns(inputs, forwards, num_before=num_devices - stage):
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
    num_run = max(num_microbatches, 2 * num_devices)
    orders = [_VOrder(device, num_devices, num_run).made() for device in range(num_devices)]
    return [[action for action in order if action.microbatch < num_microbatches] for order in orders]


class _VOrder:
    """The order of one device of ZB-V: each kind of action on each chunk takes the micro-batches as they come."""

    def __init__(self, device: int, num_devices: int, num_microbatches: int) -> None:
        self._device, self._num_devices, self._num_microbatches = device, num_devices, num_microbatches
        self._stages = device, 2 * num_devices - 1 - device
        self._counts: Counter[tuple[int, ActionKind]] = Counter()
        self._order: list[Action] = []

    def made(self) -> list[Action]:
        """All actions."""
        near, far = 0, 1
        before, after = self._device, self._num_devices - self._device
        self._add(2 * after - 1, (near, _F))
        self._add(before, (far, _F), (near, _F))
        self._add(after, (far, _F), (far, _I), (far, _W))
        steady = (near, _F), (near, _I), (near, _W), (far, _F), (far, _I), (far, _W)
        self._add(self._num_microbatches - self._device - after, *steady)
        self._add(before, (near, _I), (far, _I))
        self._add(after, (near, _I), (near, _W))
        self._add(self._num_microbatches, (near, _W), (far, _W))
        return self._order

    def _add(self, times: int, *each: tuple[int, ActionKind]) -> None:
        """So many times each of these, for the next micro-batch that there is."""
        for _ in range(times):
            for chunk, kind in each:
                microbatch = self._counts[chunk, kind]
                if microbatch < self._num_microbatches:
                    self._counts[chunk, kind] += 1
                    self._order.append(Action(self._stages[chunk], kind, microbatch))
