"""How many layers a model file has: captured without weights, and nothing is measured."""

from __future__ import annotations

from profiler.capture.capture import capture
from profiler.model.data import sample_batch
from profiler.model.load import load_model_file


def num_layers_of(model: str, *, microbatch_size: int) -> int:
    """As many as a profile by layers has; raises ModelError for a model that cannot be loaded or captured so."""
    file = load_model_file(model, lazy=True)
    inputs, _ = sample_batch(file, microbatch_size)
    return len(capture(file.model, inputs))
