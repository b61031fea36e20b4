"""A model file or a model in memory, with its options; the number of layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gplan.core.errors import UsageError
from gplan_profiler.model.given_model import GivenModel

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
