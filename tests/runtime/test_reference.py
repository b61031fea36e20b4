"""`--check` compares models with the same weights, whatever generator draws them, or names the cause."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gplan.core.errors import ModelError, UsageError
from gplan.runtime.model_source import open_source
from gplan.runtime.run.launch import run_virtual_engine
from gplan.runtime.run.run_options import RunOptions
from gplan_profiler.model.load import open_model_file
from tests.model_files import load_model_file
from tests.runtime.forked import run_forked
from tests.runtime.plans import unmeasured_plan

FILE = """
import random

import numpy as np
import torch
from torch import nn

shared = np.random.default_rng(0)


def layer(draw):
    made = nn.Linear(8, 8)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[draw() for _ in range(8)] for _ in range(8)]))
    return made


def model(by="numpy"):
    draw = {
        "numpy": lambda: np.random.normal(0, 0.3),
        "random": lambda: random.gauss(0, 0.3),
        "own seed": np.random.default_rng(3).normal,
        "no seed": np.random.default_rng().normal,
        "shared": shared.normal,
        "system": random.SystemRandom().random,
        "torch's own": lambda: torch.rand((), generator=torch.Generator().manual_seed(torch.seed())).item(),
    }[by]
    return nn.Sequential(*(layer(draw) for _ in range(4)))


def loss(output, target):
    return nn.functional.mse_loss(output, target)


def batches(batch_size):
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(batch_size, 8, generator=generator), torch.randn(batch_size, 8, generator=generator)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "model.py"
    file.write_text(FILE)
    return str(file)


REPEATING, OTHERS = ("numpy", "random", "own seed"), ("no seed", "shared", "system", "torch's own")


@pytest.mark.parametrize("by", REPEATING)
def test_weights_drawn_by_another_generator(by: str, path: str) -> None:
    plan = unmeasured_plan(load_model_file(path, settings={"by": by}), num_devices=2)
    options = RunOptions(num_steps=2, check=True, seed=5)
    runs = [run_forked(path, plan, options, settings={"by": by})]
    for seed in (5, 6):
        source = open_source(path, settings={"by": by}, seed=seed)
        runs.append(
            run_virtual_engine(source, plan, RunOptions(num_steps=2, check=True, seed=seed), report=lambda *_: None)
        )
    assert all(run.check is not None and run.check.passed for run in runs)
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-6)


@pytest.mark.parametrize("by", OTHERS)
def test_builds_that_do_not_repeat(by: str, path: str) -> None:
    plan = unmeasured_plan(load_model_file(path, settings={"by": by}), num_devices=2)
    with pytest.raises(
        ModelError, match=r"two builds of .*model.py from one seed have different weights \(0.weight, 1.*draw them"
    ):
        run_virtual_engine(open_source(path, settings={"by": by}), plan, RunOptions(check=True), report=lambda *_: None)


@pytest.mark.parametrize(
    ("layer", "outcome"), [("nn.BatchNorm1d(8)", "batch norm"), ("nn.Dropout(0.5)", "1 (Dropout) draws random")]
)
def test_model_made_in_evaluation_mode_is_trained_and_checked_in_training_mode(
    layer: str, outcome: str, path: str
) -> None:
    made = f"return nn.Sequential(nn.Linear(8, 8), {layer}, nn.Linear(8, 8), nn.Linear(8, 8)).eval()\n"
    Path(path).write_text(FILE.replace("return nn.Sequential(*(layer(draw) for _ in range(4)))\n", made))
    plan = unmeasured_plan(load_model_file(path), num_devices=2)
    options = RunOptions(num_steps=2, check=True)
    try:
        check = run_virtual_engine(open_source(path), plan, options, report=lambda *_: None).check
        assert check is not None and check.passed and check.whole_batch is not None
        found = check.whole_batch.reason
    except UsageError as error:
        found = str(error)
    assert found.startswith(outcome)


def test_build_restores_random_state(path: str) -> None:
    def drawn() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), np.random.random()

    def after(build: bool) -> tuple[float, float, float]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        if build:
            for is_lazy in (True, False):
                opened.load(seed=4, lazy=is_lazy)
        return drawn()

    opened = open_model_file(path)
    assert after(build=True) == after(build=False)


def test_builds_of_two_seeds(path: str) -> None:
    def weight(seed: int, by: str) -> Tensor:
        return load_model_file(path, settings={"by": by}, seed=seed).model.get_parameter("0.weight")

    for by in ("numpy", "random"):
        assert torch.equal(weight(1, by), weight(1, by))
        assert not torch.equal(weight(1, by), weight(2, by))
