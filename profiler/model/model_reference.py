"""What a profile is made of: a reference to a model file, or objects at hand with what such a file would define."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gplan.core.errors import UsageError
from profiler.capture.sequence import as_sequential
from profiler.model.load import ModelFile, load_model_file, model_in_memory
from profiler.model.locate import Setting
from profiler.model.memory_budget import load_for_measuring


def check_nothing_beside(file: str, functions: Mapping[str, Any]) -> None:
    """Raise UsageError where a function is given that the model file is to define; None: not given."""
    named = [name for name, value in functions.items() if value is not None]
    if named:
        raise UsageError(f"{named[0]} was given beside the model file {file}; define it in the file instead")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenModel:
    """A model as a caller gives it; raises UsageError for what goes with the other kind alone."""

    model: str | nn.Module | Sequence[nn.Module]
    settings: Mapping[str, Setting]  # of a file
    input_shapes: str | None
    seed: int
    functions: Mapping[str, Any]  # by name, what a file would define beside the model; None: not given

    def __post_init__(self) -> None:
        if isinstance(self.model, str):
            check_nothing_beside(self.model, self.functions)
            return
        if self.settings:
            raise UsageError(
                f"settings {sorted(self.settings)} were given with a model in memory; build it with them instead"
            )
        if self.input_shapes is not None:
            raise UsageError(
                f"input_shapes {self.input_shapes!r} were given with a model in memory; give inputs instead, tensors or a "
                "function of the batch size"
            )

    def load(self) -> ModelFile:
        """The model without its weights; one in memory as it is."""
        if not isinstance(self.model, str):
            return self._in_memory(self.model)
        return load_model_file(
            self.model, settings=self.settings, input_shapes=self.input_shapes, seed=self.seed, lazy=True
        )

    def load_for_measuring(self, *, batch_size: int, device: str, num_copies: int) -> ModelFile:
        """The model with its weights where so many copies fit in memory while it is measured, else without."""
        if not isinstance(self.model, str):
            return self._in_memory(self.model)
        return load_for_measuring(
            self.model,
            settings=self.settings,
            input_shapes=self.input_shapes,
            seed=self.seed,
            batch_size=batch_size,
            device=device,
            num_copies=num_copies,
        )

    def _in_memory(self, model: nn.Module | Sequence[nn.Module]) -> ModelFile:
        return model_in_memory(model if isinstance(model, nn.Module) else as_sequential(list(model)), **self.functions)
