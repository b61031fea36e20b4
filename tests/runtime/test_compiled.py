"""Models with torch.compile inside are profiled and trained as the code that it was made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gplan
from gplan.runtime.run.run_options import RunOptions
from gplan_profiler.model.load import ModelFile, model_in_memory
from tests.model_files import load_model_file
from tests.runtime.plans import measured, plan_for, run_virtually

WIDTH = 8


def refuse(*_: Any) -> Any:
    """A backend that shows that something is compiled."""
    raise AssertionError("gplan compiled a part of the model")


compiled = torch.compile(backend=refuse)


@compiled
def activation(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(x @ weight) * torch.sigmoid(x)


@compiled
def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class CallsCompiled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + activation(self.norm(x), self.linear.weight)


class CompiledForward(Block):
    @compiled
    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Listed(nn.Module):
    def __init__(self, *blocks: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend=refuse)
    return module


FORMS: dict[str, Callable[[], Any]] = {
    "a function in a sequence": lambda: nn.Sequential(CallsCompiled(), CallsCompiled()),
    "a function in a traced model": lambda: Listed(CallsCompiled(), CallsCompiled()),
    "forward": lambda: Listed(CompiledForward(), CompiledForward()),
    "blocks": lambda: Listed(*(compiled(Block()) for _ in range(2))),
    "blocks in place": lambda: nn.Sequential(*(in_place(Block()) for _ in range(2))),
    "the model": lambda: compiled(Listed(Block(), Block())),
    "a sequence": lambda: compiled(nn.Sequential(Block(), Block())),
    "the model in place": lambda: in_place(Listed(Block(), Block())),
}


def file_of(model: nn.Module) -> ModelFile:
    def batches(batch_size: int) -> Any:
        generator = torch.Generator().manual_seed(0)
        while True:
            x = torch.randn(batch_size, WIDTH, generator=generator)
            yield x, x.flip(1)

    return model_in_memory(model, loss=loss, optimizer=torch.optim.SGD, batches=batches)


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS.keys())
def test_compiled_model_is_profiled_and_trained(make: Callable[[], Any]) -> None:
    file = file_of(make())
    profile = measured(file, 2, "layer")
    assert any("torch.compile has no effect" in x for x in profile.notes)
    plan = gplan.balance(profile, num_devices=2, num_microbatches=4)
    assert len(plan.layer_names) == 2
    run = run_virtually(file, plan, RunOptions(num_steps=1, check=True))
    assert run.check is not None
    assert run.check.passed


MODEL_FILE = """
import torch
from torch import nn
def once(*layers): return torch.compile(nn.Sequential(*layers))
def twice(): return torch.compile(once(nn.Linear(8, 8), nn.Linear(8, 4)))
def with_inputs(): return twice(), torch.ones(2, 8)
ready = torch.compile(twice())
build = torch.compile(torch.compile(twice))
"""


@pytest.mark.parametrize("name", ["twice", "with_inputs", "ready", "build"])
def test_model_compiled_twice_is_the_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "doubled.py").write_text(MODEL_FILE)
    file = load_model_file(f"{tmp_path}/doubled.py:{name}")
    assert [type(x) for x in file.model.children()] == [nn.Linear, nn.Linear]
    assert any("torch.compile has no effect" in x for x in file.notes)


def test_a_model_that_is_not_compiled_has_no_note() -> None:
    assert not any("torch.compile" in x for x in measured(file_of(Listed(Block())), 2, "layer").notes)


def test_pipeline_of_a_compiled_model_in_a_users_script() -> None:
    model = Listed(Block(), Block())
    plan = plan_for(file_of(model), num_devices=2)
    pipe = gplan.pipeline(compiled(model), plan, loss=loss, inputs=torch.randn(2, WIDTH))
    assert {name for name, _ in pipe.named_parameters()} == {name for name, _ in model.named_parameters()}
    x = torch.randn(8, WIDTH)
    found = pipe.step(x, x.flip(1))
    expected = F.mse_loss(model(x), x.flip(1))
    torch.testing.assert_close(found.float(), expected.detach())
    torch.testing.assert_close(pipe.eval_step(x, x.flip(1)).float(), expected.detach())
    with pytest.raises(Exception, match="gplan compiled"):  # outside of gplan, compiled code is compiled
        loss(x, x)
