"""Models and batches other than tensor in, tensor out: both engines train them as the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest

from gplan.runtime.run.run_options import RunOptions
from tests.model_files import load_model_file
from tests.runtime.forked import run_forked
from tests.runtime.plans import run_virtually, unmeasured_plan

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)

def rows(*shape):
    return torch.randn(*shape, generator=GENERATOR)

GENERATOR = torch.Generator().manual_seed(0)
"""

ODD = {
    "a first stage without parameters or gradients": """
def model():
    return nn.Sequential(nn.Flatten(), nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
def loss(output, target):
    return F.cross_entropy(output, target)
def batches(n):
    while True:
        yield rows(n, 3, 4), torch.arange(n) % 3
""",
    "a last stage without parameters": """
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Softmax(1))
def loss(output, target):
    return ((output - target) ** 2).mean()
def batches(n):
    while True:
        yield rows(n, 4), rows(n, 4)
""",
    "frozen first layers": """
def model():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    net[0].requires_grad_(False)
    return net
def loss(output, target):
    return ((output - target) ** 2).mean()
def batches(n):
    while True:
        yield rows(n, 4), rows(n, 2)
""",
    "inputs by name, in another order than the signature's": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 2)
    def forward(self, tokens, scale, shift=None):
        x = self.embed(tokens).mean(1) * scale
        x = torch.tanh(self.mix(x))
        return self.out(x) + shift
model = Net
def loss(output, target):
    return ((output - target) ** 2).mean()
def batches(n):
    while True:
        yield {"shift": rows(n, 2), "tokens": torch.randint(0, 7, (n, 3), generator=GENERATOR), "scale": rows(n, 1)}, rows(n, 2)
""",
    "two inputs, nested outputs with a repeated tensor and None": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    def forward(self, x, mask):
        for layer in self.layers:
            x = torch.where(mask, torch.tanh(layer(x)), x)
        return {"x": x, "again": (x, None), "mask": mask}
model = Net
def loss(output, target):
    return ((output["x"] + output["again"][0]) * output["mask"] - target).pow(2).mean()
def batches(n):
    while True:
        yield (rows(n, 4), rows(n, 4) > 0), rows(n, 4)
""",
    "a loss that is a sum, and batches that end": """
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
def loss(output, target):
    return 0.01 * ((output - target) ** 2).sum()
def batches(n):
    return [(rows(n, 4), rows(n, 4))]
""",
    "a loss that needs no target": """
def model():
    return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
def loss(output, target):
    assert target is None
    return output.pow(2).mean()
def batches(n):
    while True:
        yield rows(n, 4), None
""",
    "activations in place right after a cut": """
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.LeakyReLU(inplace=True))
def loss(output, target):
    return ((output - target) ** 2).mean()
def batches(n):
    while True:
        yield rows(n, 4), rows(n, 4)
""",
    "tensors that children hand on, exchange and leave out": """
class Pair(nn.Module):
    def __init__(self, exchanges):
        super().__init__()
        self.layer, self.exchanges = nn.Linear(4, 4), exchanges
    def forward(self, value):
        x, kept = value if isinstance(value, tuple) else (value, value * 2)
        made = torch.tanh(self.layer(x)) + kept.mean(1, keepdim=True)
        return (kept, made) if self.exchanges else (made, kept)
class Last(nn.Linear):
    def forward(self, value):
        return super().forward(value[1])
def model():
    return nn.Sequential(*(Pair(x) for x in (False, False, True, False, False)), Last(4, 2))
def loss(output, target):
    return ((output - target) ** 2).mean()
def batches(n):
    while True:
        yield rows(n, 4), rows(n, 2)
""",
    "a weight that three layers share": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        for layer in self.layers[1:]:
            layer.weight = self.layers[0].weight
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x
model = Net
def loss(output, target):
    return ((output - target) ** 2).mean()
def batches(n):
    while True:
        yield rows(n, 4), rows(n, 4)
""",
}


@pytest.fixture
def reference(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A model file with the parametrized body."""
    path = tmp_path / "odd.py"
    path.write_text(HEAD + ODD[request.param])
    return str(path)


@pytest.mark.parametrize(("num_devices", "recompute"), [(1, "always"), (2, "always"), (3, "never")])
@pytest.mark.parametrize("reference", sorted(ODD), indirect=True)
def test_virtual_engine(reference: str, num_devices: int, recompute: str) -> None:
    plan = unmeasured_plan(load_model_file(reference), num_devices=num_devices, num_microbatches=3, recompute=recompute)
    run = run_virtually(load_model_file(reference), plan, RunOptions(num_steps=1, check=True))
    assert run.check is not None
    assert run.check.passed, run.check


@pytest.mark.parametrize("reference", sorted(ODD), indirect=True)
def test_torch_engine(reference: str) -> None:
    plan = unmeasured_plan(
        load_model_file(reference), num_devices=3, num_microbatches=2, schedule="1f1b", recompute="except-last"
    )
    run = run_forked(reference, plan, RunOptions(num_steps=1, check=True, timeout_s=60.0))
    assert run.check is not None
    assert run.check.passed, run.check


def test_torch_engine_one_stage_one_microbatch(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(HEAD + ODD["a last stage without parameters"])
    plan = unmeasured_plan(load_model_file(str(path)), num_devices=1, num_microbatches=1)
    run = run_forked(str(path), plan, RunOptions(num_steps=2, check=True))
    assert run.check is not None
    assert run.check.passed, run.check
    assert run.plan.prediction.ideal_bubble == pytest.approx(0.0, abs=1e-12)
