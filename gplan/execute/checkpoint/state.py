"""What a rank gives to a checkpoint and gets from one, and how that is laid out.

model        every parameter and persistent buffer by its names in the model
optimizers   [{"state": {parameter: {key: value}}}]
ranks        [record] of every rank that saved: param groups, schedulers, random state
progress     what the caller wants to know again
gplan        format, digest of the model, step, kinds of optimizers and schedulers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer

from gplan.execute.checkpoint.optimizer_state import Group

FORMAT = "gplan.checkpoint/1"

Plain: TypeAlias = int | float | str


class Scheduler(Protocol):
    """A learning-rate scheduler, or whatever else has a state of plain values."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, which can be pickled."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take that state back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The live state of one rank."""

    model: Mapping[str, Tensor]  # by the keys of the model's state dict; a tied tensor under all of them
    parameters: Mapping[str, nn.Parameter]  # those that are trained, each under one name, the same under every plan
    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[Scheduler] = ()
    stages: Sequence[int] = ()  # for messages


class Header(TypedDict):
    """What a checkpoint says of itself."""

    format: str
    digest: str
    step: int
    optimizers: list[str]
    schedulers: list[str]


class Record(TypedDict):
    """What of a rank's state is no tensor of a parameter."""

    groups: list[list[Group]]  # of every optimizer
    schedulers: list[dict[str, Any]]
    random: Tensor


def kinds(things: Sequence[object]) -> list[str]:
    """The names of the classes of optimizers or schedulers."""
    return [type(thing).__name__ for thing in things]
