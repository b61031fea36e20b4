"""A model and its inputs to a chain of layers: an nn.Sequential is cut between its children, all else is exported."""

from __future__ import annotations

from torch import nn

from profiler.capture.chain import Chain
from profiler.capture.export import ExportedChain
from profiler.capture.sequence import SequentialChain


def capture(model: nn.Module, inputs: object) -> Chain:
    """The layers of `model`, put in training mode, for inputs of one micro-batch.

    `inputs` is what the model is called with: a tensor, a tuple (several arguments) or a dict (by name). The chain
    holds for inputs of exactly these shapes. Raises ModelError, with the author's line, where capture is impossible.
    """
    model.train()
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return SequentialChain(model, inputs)
    return ExportedChain(model, inputs)
