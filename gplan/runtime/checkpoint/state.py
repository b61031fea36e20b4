"""What a rank saves in a checkpoint, and an optimizer's state by parameter name, so that it loads under any other plan.

    model        every parameter and persistent buffer by its names in the model
    optimizers   [{"state": {parameter: {key: value}}}]
    ranks        [record] of every rank that saved: param groups, schedulers, random state
    progress     the caller's values
    gplan        format, digest of the model, step, classes of optimizers and schedulers

Optimizers are read with `state_dict()` and set with `load_state_dict()`, so overrides are respected. torch's own
conversion (distributed.checkpoint.state_dict) is not used: it steps an optimizer without state, adds empty entries
to a stateless one, and supports neither empty groups nor groups that differ between ranks. A group's hyperparameters
belong to each of its parameters. Unnamed parameters without elements stand for "none on this stage" and are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gplan.core.errors import FileError, UsageError

FORMAT = "gplan.checkpoint/1"

PlainValue: TypeAlias = int | float | str


class Scheduler(Protocol):
    """A learning-rate scheduler, or anything else with a state of plain values."""

    def state_dict(self) -> dict[str, Any]:
        """Return a state that can be pickled."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The live state of one rank."""

    model: Mapping[str, Tensor]  # by the keys of the model's state dict; a tied tensor under all of them
    parameters: Mapping[str, nn.Parameter]  # those that are trained, each under one name, the same under every plan
    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[Scheduler] = ()
    stages: Sequence[int] = ()  # for messages


class Header(TypedDict):
    """A checkpoint's description of itself."""

    format: str
    digest: str
    step: int
    optimizers: list[str]
    schedulers: list[str]


class RankRecord(TypedDict):
    """A rank's state other than tensors of parameters."""

    groups: list[list[Group]]  # of every optimizer
    schedulers: list[dict[str, Any]]
    random: Tensor


def class_names(things: Sequence[object]) -> list[str]:
    """Return the class names of optimizers or schedulers."""
    return [type(thing).__name__ for thing in things]


Group: TypeAlias = dict[str, Any]
"""A param group as in `Optimizer.state_dict()`, with parameter names under "params"."""

_PARAMETER_KEYS = frozenset({"params", "param_names"})  # differ between stages; all other keys are hyperparameters
_SPEED_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable"})  # the result is the same


class OptimizerState(NamedTuple):
    """The state of one rank's optimizer."""

    entries: Mapping[str, Mapping[str, object]]  # by parameter, then by the optimizer's own key
    groups: list[Group]


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Return the live state of an optimizer by parameter name, without copying.

    Raises UsageError for state that cannot be divided among stages, and for parameters without a name.
    """
    _check_divisible(optimizer)
    content = optimizer.state_dict()
    packed: list[Group] = content["param_groups"]
    names = group_names(optimizer, parameters)
    by_number = _numbered(packed, names)
    state = {by_number[number]: entries for number, entries in content["state"].items() if number in by_number}
    groups = [
        {"params": [name for name in row if name is not None], **_values(group)}
        for group, row in zip(packed, names, strict=True)
    ]
    return OptimizerState(state, groups)


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Mapping[str, object]],
    ranks: Sequence[Sequence[Group]],
) -> list[str]:
    """Set an optimizer's state and the hyperparameters of its groups, saved under any plan; return what they replace.

    `ranks` are the groups of every rank that saved. Every tensor keeps its dtype, also where torch would convert it
    to its parameter's. Raises FileError if the saved groups do not fit.
    """
    names = group_names(optimizer, parameters)
    groups = optimizer.state_dict()["param_groups"]
    by_name = {name: group for saved in ranks for group in saved for name in group["params"]}
    by_number = _numbered(groups, names)
    saved_values = [_saved_values(index, row, by_name, ranks) for index, row in enumerate(names)]
    replaced = []
    for group, saved in zip(groups, saved_values, strict=True):
        scheduled = {"lr"} if "initial_lr" in saved else set()  # what a scheduler changes is no mistake
        scheduled |= {"betas", "momentum"} if "max_momentum" in saved else set()
        keys = sorted(group.keys() & saved.keys() - _PARAMETER_KEYS - _SPEED_KEYS - scheduled)
        odd = [key for key in keys if not equal_values(group[key], saved[key])]
        replaced += [f"{key} {saved[key]!r}, not {group[key]!r}" for key in odd]
    optimizer.load_state_dict(
        {
            "state": {number: dict(state[name]) for number, name in by_number.items() if state.get(name)},
            "param_groups": [{**group, **saved} for group, saved in zip(groups, saved_values, strict=True)],
        }
    )
    for name in by_number.values():
        for key, value in state.get(name, {}).items():
            loaded = optimizer.state[parameters[name]]
            if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)
    return replaced


def group_names(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> tuple[tuple[str | None, ...], ...]:
    """Return the parameter names of each group; None for a placeholder."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for x in (x for group in optimizer.param_groups for x in group["params"]):
        if id(x) not in names and x.numel() > 0:
            raise UsageError(
                f"{type(optimizer).__name__} holds a parameter of shape {tuple(x.shape)} that this stage does not "
                "train; make the optimizer from the pipeline's own parameters"
            )
    return tuple(tuple(names.get(id(x)) for x in group["params"]) for group in optimizer.param_groups)


def _numbered(groups: Sequence[Group], names: Sequence[Sequence[str | None]]) -> dict[int, str]:
    """Return the names of an optimizer's parameters by their numbers in its state dict, without placeholders."""
    pairs = (zip(group["params"], row, strict=True) for group, row in zip(groups, names, strict=True))
    return {number: name for row in pairs for number, name in row if name is not None}


def equal_values(one: object, other: object) -> bool:
    """Whether two plain values, which may contain tensors, are equal; NaN equals NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal_values(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(equal_values(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _check_divisible(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    advice = "use one that treats each parameter by itself, such as AdamW or SGD"
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(f"{kind} keeps one state for all parameters, which stages cannot divide; {advice}")
    odd = next((key for key in optimizer.state if not isinstance(key, Tensor)), None)
    if odd is not None:
        raise UsageError(f"{kind} keeps state that belongs to no parameter ({odd!r}); {advice}")
    key = next((key for entries in optimizer.state.values() for key in entries if not isinstance(key, str)), None)
    if key is not None:
        raise UsageError(f"{kind} keeps state under {key!r}, which is no text and cannot be saved; {advice}")


def _values(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in _PARAMETER_KEYS}


def _saved_values(
    index: int, names: Sequence[str | None], by_name: Mapping[str, Group], ranks: Sequence[Sequence[Group]]
) -> Group:
    """Return the hyperparameters for a group: those of its parameters, or of the same index if it has none."""
    own = [name for name in names if name is not None]
    if not own:
        return next((_values(saved[index]) for saved in ranks if index < len(saved)), {})
    first = _values(by_name[own[0]])
    for name in own[1:]:
        other = _values(by_name[name])
        key = next(
            (x for x in sorted(first.keys() | other.keys()) if not equal_values(first.get(x), other.get(x))), None
        )
        if key is not None:
            raise FileError(
                f"group {index} of the optimizer holds {own[0]} and {name}, which were in groups with {key} {first.get(key)!r} "
                f"and {other.get(key)!r}; group the parameters as the run that saved did"
            )
    return first
