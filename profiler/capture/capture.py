"""A model and its inputs to a chain of layers: an nn.Sequential is cut between its children, all else is exported."""

from __future__ import annotations

from typing import get_args

from torch import nn

from gplan.core import Granularity
from gplan.core.errors import ModelError, UsageError
from profiler.capture.chain import Chain
from profiler.capture.export import exported
from profiler.capture.sequence import SequentialChain


def capture(model: nn.Module, inputs: object, *, granularity: Granularity = "layer", training: bool = True) -> Chain:
    """The layers of `model`, put in training or evaluation mode, for inputs of one micro-batch.

    A model that is in training mode already stays as it is: its author may have put parts in evaluation mode.
    `inputs` is what the model is called with: a tensor, a tuple (several arguments) or a dict (by name). The chain
    holds for inputs of exactly these shapes. With granularity "op" a layer is one operation of an exported model, with
    what costs nothing beside it; an nn.Sequential is exported for that too. Raises ModelError, with the author's line,
    where capture is impossible, UsageError for another granularity.
    """
    if granularity not in get_args(Granularity):
        raise UsageError(
            f"granularity {granularity!r} is not known; expected one of {', '.join(get_args(Granularity))}"
        )
    if model.training != training:
        model.train(training)
    is_sequence = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    if is_sequence and granularity == "layer":
        return SequentialChain(model, inputs)  # type: ignore[arg-type]
    try:
        return exported(model, inputs, granularity=granularity)
    except ModelError as error:
        if not is_sequence:
            raise
        raise ModelError(
            f"{error}. Layers that are operations come from an exported model alone: without --granularity op this "
            "nn.Sequential is cut between its children as it is"
        ) from error
