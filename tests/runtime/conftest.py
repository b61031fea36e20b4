"""Pipelines take their seed from torch: every test begins with the one that its plain model is built with."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
