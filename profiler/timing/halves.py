"""A layer's backward pass in its two halves, as zero-bubble schedules run it: input gradients, then weight gradients.

Uses torch.distributed.pipelining's own functions, which its schedules call, so that the same work is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from profiler.capture.chain import Tensors


def backward_of_inputs(
    layer: nn.Module, inputs: Tensors, outputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[dict[str, Any]]:
    """The first half: gradients arrive at the inputs; returns what the second half needs."""
    wanted = [x for x in inputs if x.requires_grad]
    _, groups = stage_backward_input(list(outputs), list(gradients), wanted, layer.parameters())
    return groups


def backward_of_weights(layer: nn.Module, groups: list[dict[str, Any]]) -> None:
    """The second half: gradients are added to those of the parameters."""
    stage_backward_weight(layer.parameters(), groups)
