"""Ten architectures in two stages, each chosen for what is different about it; more are in reports/architectures."""

from __future__ import annotations

import architecture_models
import pytest

from gplan.runtime.run.run_options import RunOptions
from tests.model_files import load_model_file
from tests.runtime.plans import run_virtually, unmeasured_plan

DIFFERENT = {
    "albert": "one block's weights at every depth",
    "gemma3text": "two kinds of masks, and a tied head that is scaled",
    "mamba": "a scan over time, with convolutions",
    "one encoder, two inputs": "the same layers twice, with a skip from the first call",
    "swin": "windows that are shifted, and merged between blocks",
    "clip": "two towers, and a loss over the pairs of a batch",
    "wav2vec2": "convolutions over samples, and a CTC loss with lengths",
    "LSTM over time": "a recurrent kernel",
    "sparse embeddings": "sparse gradients",
    "complex activations": "complex numbers between the stages",
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_gradients_are_those_of_the_plain_model(name: str) -> None:
    file = load_model_file(architecture_models.__file__, settings={"name": name})
    run = run_virtually(
        file, unmeasured_plan(file, num_devices=2, schedule="1f1b"), RunOptions(num_steps=1, check=True)
    )
    assert run.check is not None and run.check.max_relative_error < 1e-5, run.check
