"""A model as the caller gives it, a file or objects in memory, loaded with or without its weights.

A model file is first built without weights, which takes almost no memory. It is built with weights only where
`memory_budget.headroom` finds that measuring it in one piece fits; otherwise it is measured layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from gplan.core import Precision
from gplan.core.errors import ModelError, UsageError
from gplan.core.units import bytes_text
from gplan_profiler.capture.sequence import as_sequential
from gplan_profiler.model.compiled import uncompiled
from gplan_profiler.model.lazy_build import random_state_kept
from gplan_profiler.model.load import ModelFile, ModelTooLargeError, model_in_memory, open_model_file
from gplan_profiler.model.memory_budget import headroom
from gplan_profiler.model.model_reference import SettingValue
from gplan_profiler.model.precision import in_precision

_BUILDS_LAZILY = "measured layer by layer: the model file itself builds the model without weights"


def check_nothing_beside(file: str, functions: Mapping[str, Any]) -> None:
    """Raise UsageError for a function that is passed although the model file must define it; None: not passed."""
    named = [name for name, value in functions.items() if value is not None]
    if named:
        raise UsageError(f"{named[0]} was given beside the model file {file}; define it in the file instead")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenModel:
    """A model file or a model in memory, with its options; raises UsageError for options of the other kind."""

    model: str | nn.Module | Sequence[nn.Module]
    settings: Mapping[str, SettingValue] = field(default_factory=dict)  # of a file
    input_shapes: str | None = None
    seed: int = 0
    functions: Mapping[str, Any] = field(default_factory=dict)  # by name, as a file would define them; None: not given
    precision: Precision = field(default_factory=Precision)

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
        """The model without weights; a model in memory with its own."""
        if isinstance(self.model, str):
            opened = open_model_file(self.model, settings=self.settings, input_shapes=self.input_shapes)
            return in_precision(opened.load(seed=self.seed, lazy=True), self.precision)
        model = self.model if isinstance(self.model, nn.Module) else as_sequential(self.model)
        return in_precision(model_in_memory(model, **self.functions), self.precision)

    @uncompiled()
    def load_for_measuring(self, *, batch_size: int = 1, device: str = "cpu", num_copies: int = 1) -> ModelFile:
        """The model with weights where `num_copies` of it fit in memory while it is measured, else a lazy one with a note.

        `batch_size` is that of the largest micro-batch to be measured. A real model has the weights that
        `OpenedFile.load` gives it with the same seed. Raises what that raises, and ModelTooLargeError for a
        model that neither fits nor can be built without weights.
        """
        if not isinstance(self.model, str):
            return self.load()
        opened = open_model_file(self.model, settings=self.settings, input_shapes=self.input_shapes)
        with random_state_kept():
            try:
                lazy = in_precision(opened.load(seed=self.seed, lazy=True), self.precision)
            except ModelError:
                lazy = None
            if lazy is not None and lazy.is_lazy:
                needed, available = headroom(lazy, batch_size=batch_size, device=device, num_copies=num_copies)
        if lazy is None or not lazy.is_lazy:
            return in_precision(opened.load(seed=self.seed), self.precision)
        if needed <= available:
            with suppress(ModelTooLargeError):
                real = in_precision(opened.load(seed=self.seed), self.precision)
                return replace(real, notes=(*real.notes, _BUILDS_LAZILY)) if real.is_lazy else real
        note = (
            f"measured layer by layer, without the model as a whole: that would take {bytes_text(needed)}, and "
            f"{bytes_text(available)} are free"
        )
        return replace(lazy, notes=(*lazy.notes, note))
