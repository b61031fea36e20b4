"""Model files whose layers can run in several orders, and one whose layers cannot."""

from __future__ import annotations

from pathlib import Path

_HEAD = """
import torch
from torch import nn

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)

def loss(output, target):
    return ((output - target) ** 2).mean()

def rows(*shape):
    return torch.randn(*shape, generator=GENERATOR)

GENERATOR = torch.Generator().manual_seed(0)
"""

# Two towers, written turn by turn: a.0, b.0, a.1, b.1, head.
_TOWERS = """
class Floor(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.mix, self.drop = nn.Linear(8, 8), nn.Dropout(dropout)
    def forward(self, x):
        return self.drop(torch.tanh(self.mix(x)))

class Towers(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.a = nn.ModuleList(Floor(dropout) for _ in range(2))
        self.b = nn.ModuleList(Floor(dropout) for _ in range(2))
        self.head = nn.Linear(16, 3)
    def forward(self, x, y):
        for a, b in zip(self.a, self.b):
            x, y = a(x), b(y)
        return self.head(torch.cat([x, y], 1))

def model(dropout=0.0):
    return Towers(dropout)

def batches(n):
    while True:
        yield (rows(n, 8), rows(n, 8)), rows(n, 3)
"""

# Each skip of the U has a layer of its own: down.0, side.0, down.1, side.1, bottom, up.0, up.1.
_SIDES = """
class Conv(nn.Module):
    def __init__(self, i, j, stride=1):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(i, j, 3, stride, 1), nn.BatchNorm2d(j), nn.ReLU(inplace=True)
    def forward(self, x):
        return self.relu(self.norm(self.conv(x)))

class Sides(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([Conv(1, 4), Conv(4, 4, 2)])
        self.side = nn.ModuleList([Conv(4, 4), Conv(4, 4)])
        self.bottom = Conv(4, 4)
        self.up = nn.ModuleList([Conv(8, 4), nn.Conv2d(8, 1, 1)])
    def forward(self, x):
        x = self.down[0](x)
        high = self.side[0](x)
        x = self.down[1](x)
        low = self.side[1](x)
        x = self.up[0](torch.cat([self.bottom(x), low], 1))
        x = nn.functional.interpolate(x, scale_factor=2)
        return self.up[1](torch.cat([x, high], 1))

model = Sides

def batches(n):
    while True:
        yield rows(n, 1, 8, 8), rows(n, 1, 8, 8)
"""

# One order alone: 0, 1, 2.
_ROW = """
def model():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

def batches(n):
    while True:
        yield rows(n, 8), rows(n, 8)
"""

MODELS = {"towers": _TOWERS, "sides": _SIDES, "row": _ROW}


def branched_file(folder: Path, name: str) -> str:
    """Write the model file of that name into a folder; return its path."""
    path = folder / f"{name}.py"
    path.write_text(_HEAD + MODELS[name])
    return str(path)
