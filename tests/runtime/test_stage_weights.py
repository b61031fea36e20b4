"""Four processes read their stages from a file under an enforced memory limit that is less than half of the model."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

import gplan
from gplan.runtime.model_source import open_source
from gplan_profiler.host.host_info import device_share
from gplan_profiler.model.load import ModelTooLargeError
from tests.model_files import load_model_file
from tests.runtime.forked import forking
from tests.runtime.plans import plain_losses
from tests.runtime.ranks import on_ranks

# In every rank (gplan sets RANK) the limit is 0.98 times the weights, beyond what the libraries take: less than half of
# the weights and their gradients, and too little to build the model even once. The limit counts thread stacks too.
FILE = """
import os, resource
import torch, torch._dynamo, torch.export._trace, torch.profiler
import torch.distributed.checkpoint, torch.distributed.pipelining, torch.fx.experimental.symbolic_shapes
from torch import nn

WIDTH, DEPTH = 1536, 16
WEIGHT_BYTES = DEPTH * 4 * WIDTH * WIDTH * 4

if "RANK" in os.environ:
    used = 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(0.98 * WEIGHT_BYTES),) * 2)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def model():
    return Net()

def loss(output, target):
    return ((output - target) ** 2).mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)

def batches(n):
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(n, WIDTH, generator=generator), torch.randn(n, WIDTH, generator=generator)
"""


def is_too_large(path: str) -> bool:
    """Whether a rank cannot build the whole model, and gets the remedy."""
    os.environ["RANK"] = "0"
    source = open_source(path)
    with pytest.raises(ModelTooLargeError, match="cannot hold once, give its weights in a file"):
        source.values([[]], torch.device("cpu"), None)
    return True


def train_both_ways(path: str) -> None:
    """In a process that has only imported the libraries: what it holds, its ranks can use beyond their limit."""
    assert on_ranks(1, lambda _rank: is_too_large(path)) == [True]
    profile = gplan.profile(path, microbatch_sizes=[2], device="meta", hardware="cpu")
    plan = gplan.balance(profile, num_devices=4, num_microbatches=2)
    weights = Path(path).with_name("weights.pt")
    on_ranks(1, lambda _rank: torch.save(load_model_file(path).model.state_dict(), weights))
    with forking():
        run = gplan.run(plan, num_steps=2, weights=weights)
    with device_share(1):
        losses = plain_losses(load_model_file(path), plan, num_steps=2)
    assert max(abs(x / y - 1) for x, y in zip(run.losses, losses, strict=True)) < 1e-5


def test_no_process_holds_half_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "big.py"
    path.write_text(FILE)
    process = multiprocessing.get_context("spawn").Process(target=train_both_ways, args=(str(path),))
    process.start()
    process.join(240)
    process.kill()
    assert process.exitcode == 0
