"""One training step as a story of events in time: devices that work, messages that arrive.
The simulator is checked by it.

It knows what an action waits for, how long it takes and what it sends from here alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from gplan.core import Action, ActionKind, StageCost

FORWARD, BACKWARD, INPUT, WEIGHT, OPTIMIZER = (ActionKind(letter) for letter in "FBIWO")


@dataclass
class Step:
    """A step that is under way; `spans` says when each action started and ended,
    `sent` when its output arrived elsewhere."""

    orders: Sequence[Sequence[Action]]
    costs: Sequence[StageCost]
    recomputed: set[int]  # micro-batches
    spans: dict[Action, tuple[float, float]] = field(default_factory=dict)
    sent: dict[Action, tuple[int, int, float, float]] = field(default_factory=dict)  # source, target, start, end

    def __post_init__(self) -> None:
        self.device_of = {x.stage: device for device, order in enumerate(self.orders) for x in order}
        self.here: set[tuple[str, int, int]] = set()  # activations and gradients that a stage has received
        self.events: list[tuple[float, int, int, tuple[str, int, int] | None]] = []
        self.numbers = count()
        self.cables: dict[tuple[int, int], float] = {}  # until when each is busy with what was sent before
        self.left = [list(order) for order in self.orders]
        self.working = [False] * len(self.orders)

    def run(self) -> Step:
        """Until nothing happens any more."""
        for device in range(len(self.orders)):
            self.start_next(device, 0.0)
        while self.events:
            now_s, _, device, arrived = heapq.heappop(self.events)
            if arrived is None:
                self.working[device] = False
            else:
                self.here.add(arrived)
            self.start_next(device, now_s)
        assert not any(self.left), "a device waits forever"
        return self

    def start_next(self, device: int, now_s: float) -> None:
        """Start what comes next on a device that is idle, if what it waits for is there."""
        if self.working[device] or not self.left[device] or not self.can_start(self.left[device][0]):
            return
        action = self.left[device].pop(0)
        end_s = now_s + self.takes_s(action)
        self.spans[action] = now_s, end_s
        self.working[device] = True
        self.tell(end_s, device, None)
        self.send(action, device, end_s)
        if not self.left[device]:
            self.update(device, end_s)

    def can_start(self, action: Action) -> bool:
        if action.kind is FORWARD:
            return action.stage == 0 or ("activations", action.stage, action.microbatch) in self.here
        is_last = action.stage == len(self.costs) - 1
        return action.kind is WEIGHT or is_last or ("gradients", action.stage, action.microbatch) in self.here

    def takes_s(self, action: Action) -> float:
        cost = self.costs[action.stage]
        again_s = cost.recompute_s if action.microbatch in self.recomputed else 0.0
        if action.kind is FORWARD:
            return cost.forward_s
        whole_s = cost.backward_s + again_s
        if action.stage == 0:
            return 0.0 if action.kind is INPUT else whole_s
        halves_s = {INPUT: (cost.input_gradient_s or 0.0) + again_s, WEIGHT: cost.weight_gradient_s or 0.0}
        return whole_s if action.kind is BACKWARD else halves_s[action.kind]

    def send(self, action: Action, device: int, end_s: float) -> None:
        """To the stage after a forward, to the stage before a backward or its first half;
        at once if that is here too."""
        stage = action.stage + (1 if action.kind is FORWARD else -1)
        if action.kind is WEIGHT or not 0 <= stage < len(self.costs):
            return
        target = self.device_of[stage]
        cost = self.costs[min(stage, action.stage)]
        seconds = cost.activation_s if action.kind is FORWARD else cost.gradient_s
        arrival_s = end_s
        if target != device:
            arrival_s = self.cables[device, target] = max(end_s, self.cables.get((device, target), 0.0)) + seconds
            self.sent[action] = device, target, end_s, arrival_s
        self.tell(
            arrival_s, target, ("activations" if action.kind is FORWARD else "gradients", stage, action.microbatch)
        )

    def update(self, device: int, now_s: float) -> None:
        """The weights of the device's stages, one stage after the other."""
        for stage in sorted(stage for stage, at in self.device_of.items() if at == device):
            start_s = now_s + self.costs[stage].all_reduce_s
            end_s = start_s + self.costs[stage].optimizer_s
            self.spans[Action(stage, OPTIMIZER, 0)] = start_s, end_s
            now_s = end_s

    def tell(self, at_s: float, device: int, what: tuple[str, int, int] | None) -> None:
        heapq.heappush(self.events, (at_s, next(self.numbers), device, what))
