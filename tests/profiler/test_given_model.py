"""A model file or a model in memory, with its options; the number of layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gplan
from gplan.core.errors import ModelError, UsageError
from profiler.model.given_model import GivenModel, num_layers_of

FILE = """
from torch import nn, randn

def model(width=4):
    return nn.Linear(width, width)

def example_inputs(batch_size, width=4):
    return randn(batch_size, width)
"""


def loss(output: torch.Tensor, _target: object) -> torch.Tensor:
    return output.sum()


def test_functions_beside_a_model_file_belong_into_the_file() -> None:
    with pytest.raises(UsageError, match=r"loss was given beside the model file model.py; define it in the file"):
        GivenModel(model="model.py", functions={"inputs": None, "loss": loss})


def test_settings_of_a_model_in_memory_come_too_late() -> None:
    with pytest.raises(UsageError, match=r"settings \['width'\] were given with a model in memory; build it with them"):
        GivenModel(model=nn.Linear(2, 2), settings={"width": 3})


def test_shapes_of_inputs_beside_a_model_in_memory_are_refused() -> None:
    with pytest.raises(UsageError, match=r"input_shapes '2' were given with a model in memory; give inputs instead"):
        GivenModel(model=nn.Linear(2, 2), input_shapes="2")


def test_file_is_loaded_with_weights_only_for_measuring(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    source = GivenModel(model=str(tmp_path / "mine.py"), settings={"width": 3})
    light, whole = source.load(), source.load_for_measuring(batch_size=2, device="cpu", num_copies=1)
    assert [tuple(next(file.model.parameters()).shape) for file in (light, whole)] == [(3, 3), (3, 3)]
    assert (light.is_lazy, whole.is_lazy) == (True, False)


def test_a_list_of_modules_becomes_one_model() -> None:
    made = GivenModel(
        model=[nn.Linear(2, 3), nn.Linear(3, 4)], functions={"inputs": lambda size: torch.randn(size, 2), "loss": loss}
    )
    assert [tuple(x.shape) for x in made.load().model.parameters()] == [(3, 2), (3,), (4, 3), (4,)]


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
