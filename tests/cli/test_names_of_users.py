"""A user's own modules keep their names: gplan installs `gplan` and `gplan_profiler`, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = "core, profiler, runtime"
MODEL = f"""
import {NAMES}
import torch
from torch import nn

def model():
    assert all(x.OWN for x in ({NAMES}))
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

def example_inputs(n):
    return torch.randn(n, 16)

def loss(output, target):
    return ((output - target) ** 2).mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)

def batches(n):
    while True:
        yield torch.randn(n, 16), torch.randn(n, 16)
"""
SCRIPT = f"""
import {NAMES}
import gplan
import net

assert all(x.OWN for x in ({NAMES}))
pipe = gplan.pipeline(net.model, gplan.load("gplan.plan.json"), loss=net.loss)
print("loss", pipe.step(*next(net.batches(8))))
"""


@pytest.mark.slow
def test_modules_of_a_user_and_of_gplan_do_not_meet(tmp_path: Path) -> None:
    for name in NAMES.split(", "):
        (tmp_path / f"{name}.py").write_text("OWN = True\n")
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(SCRIPT)

    def in_folder(*arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    in_folder("-m", "gplan", "profile", "net.py", "--budget", "0.2", "--contention", "0", "--link", "1GB/s,5us")
    in_folder("-m", "gplan", "balance", "--k", "2", "--batch-size", "8", "--microbatches", "2")
    in_folder("-m", "gplan", "run", "--steps", "1")
    in_folder("train.py")
