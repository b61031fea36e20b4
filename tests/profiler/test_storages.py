"""Storages: told apart with and without memory, counted once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from profiler.memory.allocations import optimizer_state_bytes, storage_bytes, storage_key


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_storage_is_counted_once_however_many_tensors_see_it(device: str) -> None:
    base = torch.zeros(100, device=device)
    assert storage_bytes([base, base[10:], base.view(10, 10), torch.zeros(1, device=device)]) == 404


def test_fake_tensors_have_storages_of_their_own() -> None:
    with FakeTensorMode():
        one, other = torch.zeros(4), torch.zeros(4)
        assert storage_key(one) == storage_key(one.view(2, 2)) != storage_key(other)


def test_the_state_of_adam_is_two_moments_and_a_count_for_each_parameter() -> None:
    parameter = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.Adam([parameter])
    assert optimizer_state_bytes(optimizer) == 0
    parameter.grad = torch.ones(1000)
    optimizer.step()
    assert optimizer_state_bytes(optimizer) == 2 * 4000 + 4
