"""Which parameters and buffers belong to which stage, and under which names they are saved.

A tensor belongs to every stage that has a layer which uses it; what no layer uses belongs to the first stage, so that
nothing is lost when a model is saved. Names are those of the model; a tied tensor is saved under all its names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gplan.errors import FileError, UsageError
from gplan.execute.captured import Captured, named_state
from gplan.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of a model's state."""

    used_by_stage: tuple[tuple[str, ...], ...]  # parameters and buffers, each by its first name, in the model's order
    unused: tuple[str, ...]  # by any layer
    saved: Mapping[str, str]  # every key of the model's state dict, and the first name of what it holds

    def of(self, stages: Collection[int]) -> set[str]:
        """What some stages hold."""
        used = {name for stage in stages for name in self.used_by_stage[stage]}
        return used.union(self.unused) if 0 in stages else used

    def first_stage(self, name: str) -> int:
        """The first stage that holds a name."""
        return next((i for i, names in enumerate(self.used_by_stage) if name in names), 0)

    def shared(self) -> dict[str, tuple[int, ...]]:
        """What several stages hold, with those stages."""
        holders: dict[str, list[int]] = {}
        for stage, names in enumerate(self.used_by_stage):
            for name in names:
                holders.setdefault(name, []).append(stage)
        return {name: tuple(stages) for name, stages in holders.items() if len(stages) > 1}


def names_of(model: nn.Module, captured: Captured, num_stages: int) -> Names:
    """Who holds what, by the capture of a model in training."""
    first = {id(tensor): name for name, tensor in named_state(model).items()}
    used = [_used(captured, stage, first) for stage in range(num_stages)]
    everywhere = set().union(*used)
    return Names(
        used_by_stage=tuple(tuple(x for x in first.values() if x in names) for names in used),
        unused=tuple(x for x in first.values() if x not in everywhere),
        saved={key: first[id(x)] for key, x in model.state_dict(keep_vars=True).items() if id(x) in first},
    )


def _used(captured: Captured, stage: int, first: Mapping[int, str]) -> set[str]:
    tensors = [x for layer in captured.layers(stage) for x in captured.chain.state(layer).values()]
    return {first[id(x)] for x in tensors if id(x) in first}


def state_dict(saved: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a model's state dict that these tensors, by their first names, are."""
    return {key: tensors[name].detach() for key, name in saved.items() if name in tensors}


def load_state_dict(own: Mapping[str, Tensor], given: Mapping[str, Tensor], *, known: Collection[str]) -> None:
    """Copy the values of a state dict, of the whole model or of a part of it, into one's own tensors.

    Raises FileError for keys that are missing, that the model does not know, or of another shape.
    """
    if not isinstance(given, Mapping):
        raise UsageError(f"the state is a {type(given).__name__}; expected a state dict: tensors by their names")
    odd = [key for key in own.keys() & given.keys() if not isinstance(given[key], Tensor)]
    if odd:
        raise FileError(f"the state dict holds a {type(given[odd[0]]).__name__} as {odd[0]}; expected tensors")
    missing, unknown = own.keys() - given.keys(), given.keys() - set(known)
    wrong = [key for key in own.keys() & given.keys() if own[key].shape != given[key].shape]
    for what, keys in (("lacks", missing), ("holds unknown", unknown), ("has another shape for", wrong)):
        if keys:
            shown = ", ".join(sorted(keys)[:3])
            raise FileError(f"the state dict {what} {counted(len(keys), 'key')} ({shown}); expected those of the model")
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(given[key])
