"""Layers are counted as a profile counts them, without weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import gplan
from gplan.core.errors import ModelError
from profiler.model.given_model import num_layers_of

SEQUENCE = """
import torch
from torch import nn

def model():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))

def example_inputs(batch_size):
    return torch.randn(batch_size, 8)
"""


TRACED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        y = torch.relu(self.first(x))
        return self.head(self.second(y) + x)

def model():
    return Model()

def example_inputs(batch_size):
    return torch.randn(batch_size, 8)

def loss(output, target):
    return output.sum()
"""


def test_the_layers_of_a_model_file_are_counted(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(SEQUENCE)
    assert num_layers_of(str(tmp_path / "model.py"), microbatch_size=4) == 5


def test_a_traced_model_has_as_many_layers_as_its_profile(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(TRACED)
    profile = gplan.profile(str(file), microbatch_sizes=[4], device="meta", hardware="h100")
    assert num_layers_of(str(file), microbatch_size=4) == len(profile.layers) > 1


def test_a_file_that_is_not_there_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gone"):
        num_layers_of(str(tmp_path / "gone.py"), microbatch_size=4)
