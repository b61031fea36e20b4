"""Model files, opened and built at once."""

from __future__ import annotations

from collections.abc import Mapping

from gplan_profiler.model.load import ModelFile, open_model_file
from gplan_profiler.model.model_reference import SettingValue


def load_model_file(
    reference: str,
    *,
    settings: Mapping[str, SettingValue] | None = None,
    input_shapes: str | None = None,
    seed: int = 0,
    lazy: bool = False,
) -> ModelFile:
    return open_model_file(reference, settings=settings, input_shapes=input_shapes).load(seed=seed, lazy=lazy)
