"""Rounds over a captured model: all layers forward, the loss, all layers backward, each timed in its context.

A layer finds the caches as its neighbours leave them, and clock drift hits all layers alike. In between, the author's
model and all layers as one stage are measured in one piece. A layer timed alone includes the cost of being cut off (a
call, a start of autograd's engine); what the layers' sum has over the one stage is that cost, and is taken off each of
them: a stage pays it once, as its overhead. Rounds go on until the spread settles.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from gplan.nouns import LayerCost, Timing, WholeModel
from profiler.chain import Chain, Tensors, call_arguments, detached, flat_tensors
from profiler.clock import Samples, Stopwatch
from profiler.load import ModelFile
from profiler.memory_pass import LayerBytes

_WARMUP_ROUNDS = 2
_LEAST_ROUNDS = 10
_MOST_ROUNDS = 60
_SETTLED_SPREAD = 0.03
_SMALL_SHARE = 0.02  # layers below this share of the time need not settle
_WHOLE_EVERY = 2  # rounds between two measurements of the whole model


class Rounds:
    """One captured model with a micro-batch of data, and the samples of its layers; the last entry is the loss."""

    def __init__(self, file: ModelFile, chain: Chain, inputs: Any, target: Any) -> None:
        self.layers: list[nn.Module] = [chain.stage(i, i + 1) for i in range(len(chain))]
        self.tensors = flat_tensors(inputs, what="the inputs")
        self._file, self._chain, self._inputs, self._target = file, chain, inputs, target
        self._forward = [Samples() for _ in range(len(chain) + 1)]
        self._backward = [Samples() for _ in range(len(chain) + 1)]
        self._whole_forward, self._whole_backward = Samples(), Samples()
        self._stage = chain.stage(0, len(chain))
        self._stage_forward, self._stage_backward, self._recompute = Samples(), Samples(), Samples()

    def sample(self, budget_s: float, report: Callable[[int, float], None]) -> None:
        """Run rounds until the spread settles or `budget_s` is spent; `report` gets the round and the share done."""
        for _ in range(_WARMUP_ROUNDS):
            self._layer_round(keep=False)
            self._whole_round(keep=False)
            self._stage_round(keep=False)
        start_s = time.monotonic()
        for index in range(_MOST_ROUNDS):
            self._layer_round(keep=True)
            if index % _WHOLE_EVERY == 0:
                self._whole_round(keep=True)
                self._stage_round(keep=True)
            spent = (time.monotonic() - start_s) / budget_s
            report(index + 1, min(1.0, max(spent, (index + 1) / _MOST_ROUNDS)))
            if index + 1 >= _LEAST_ROUNDS and (self._is_settled or spent >= 1.0):
                return

    def boundary_loss(self, outputs: Tensors) -> Tensor:
        """The loss from the tensors of the last boundary."""
        return self._loss(self._chain.model_output(outputs))

    def layer_costs(self, microbatch_size: int, sizes: tuple[LayerBytes, ...]) -> list[LayerCost]:
        """The cost of every layer and, last, of the loss; without the cost of being cut off."""
        forward_s, backward_s = self._cut_off_s()
        timings = [(f.timing(), b.timing()) for f, b in zip(self._forward, self._backward, strict=True)]
        net = [(_net(f, forward_s), _net(b, backward_s)) for f, b in timings[:-1]] + timings[-1:]
        return [
            LayerCost(microbatch_size=microbatch_size, forward=forward, backward=backward, **asdict(size))
            for (forward, backward), size in zip(net, sizes, strict=True)
        ]

    def overhead_s(self) -> float:
        """What a stage adds to each forward or backward."""
        return sum(self._cut_off_s()) / 2

    def _cut_off_s(self) -> tuple[float, float]:
        """Forward and backward seconds by which a layer timed alone is dearer than within a stage."""
        pairs = ((self._forward[:-1], self._stage_forward), (self._backward, self._stage_backward))
        sums = [(sum(x.timing().median_s for x in layers), stage.timing().median_s) for layers, stage in pairs]
        forward_s, backward_s = (max(0.0, total - stage_s) / len(self.layers) for total, stage_s in sums)
        return forward_s, backward_s

    def whole(self, microbatch_size: int) -> WholeModel:
        """The model in one piece, its loss included."""
        return WholeModel(
            microbatch_size=microbatch_size,
            forward=self._whole_forward.timing(),
            backward=self._whole_backward.timing(),
            recompute=self._recompute.timing(),
        )

    @property
    def _is_settled(self) -> bool:
        samples = self._forward + self._backward
        medians = [sum(x.clean_s) / len(x.clean_s) if x.clean_s else 0.0 for x in samples]
        least_s = _SMALL_SHARE * sum(medians)
        return all(x.spread <= _SETTLED_SPREAD for x, s in zip(samples, medians, strict=True) if s >= least_s)

    def _loss(self, output: Any) -> Tensor:
        """The file's loss; without one, the sum of all outputs, so that there is a backward to measure."""
        if self._file.gives_loss:
            return self._file.loss(output, self._target)
        tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        return torch.stack([x.sum() for x in tensors]).sum() if tensors else torch.zeros(())

    def _layer_round(self, *, keep: bool) -> None:
        tensors, passed = self.tensors, []
        for layer, samples in zip(self.layers, self._forward, strict=False):
            leaves = detached(tensors)
            tensors = _timed(samples, keep, layer, *leaves)
            passed.append((leaves, tensors))
        leaves = detached(tensors)
        loss = _timed(self._forward[-1], keep, self.boundary_loss, leaves)
        if not loss.requires_grad:
            return
        _timed(self._backward[-1], keep, loss.backward)
        for samples in self._backward[-2::-1]:
            before, outputs = passed.pop()
            pairs = [(x, y.grad) for x, y in zip(outputs, leaves, strict=True) if y.grad is not None]
            if pairs:
                _timed(samples, keep, torch.autograd.backward, [x for x, _ in pairs], [y for _, y in pairs])
            leaves = before

    def _whole_round(self, *, keep: bool) -> None:
        args, kwargs = call_arguments(self._inputs)
        loss = _timed(self._whole_forward, keep, lambda: self._loss(self._file.model(*args, **kwargs)))
        if loss.requires_grad:
            _timed(self._whole_backward, keep, loss.backward)

    def _stage_round(self, *, keep: bool) -> None:
        """All layers as one stage, first as it is, then recomputed in the backward pass."""
        start = Stopwatch()
        loss = self.boundary_loss(_timed(self._stage_forward, keep, self._stage, *self.tensors))
        if loss.requires_grad:
            _timed(self._stage_backward, keep, loss.backward)
        plain_s, plain_busy_s = start.stop()
        start = Stopwatch()
        loss = self.boundary_loss(checkpoint(self._stage, *self.tensors, use_reentrant=False))
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        wall_s, busy_s = start.stop()
        if keep:
            self._recompute.add(max(0.0, wall_s - plain_s), max(0.0, busy_s - plain_busy_s))


def _net(timing: Timing, cut_off_s: float) -> Timing:
    """Without the cost of being cut off, but at least half: the cost is a mean, and no layer is free."""
    return timing.less(min(cut_off_s, timing.low_s / 2))


def _timed(samples: Samples, keep: bool, work: Callable[..., Any], *args: Any) -> Any:
    watch = Stopwatch()
    result = work(*args)
    wall_s, busy_s = watch.stop()
    if keep:
        samples.add(wall_s, busy_s)
    return result
