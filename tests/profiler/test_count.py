"""Layers are counted as a profile counts them, without weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from gplan.errors import ModelError
from profiler.count import num_layers_of

MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))

def example_inputs(batch_size):
    return torch.randn(batch_size, 8)
"""


def test_the_layers_of_a_model_file_are_counted(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    assert num_layers_of(str(tmp_path / "model.py"), microbatch_size=4) == 5


def test_a_file_that_is_not_there_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gone"):
        num_layers_of(str(tmp_path / "gone.py"), microbatch_size=4)
