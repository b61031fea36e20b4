"""Modules are alike exactly if they compute the same on the same shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gplan_profiler.capture.authored_layers import module_key
from tests.profiler.models import ConvNet


class Scaled(nn.Module):
    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale
        self.inner = nn.Linear(2, 2)


def test_two_networks_built_alike_are_alike() -> None:
    assert module_key(ConvNet()) == module_key(ConvNet())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Linear(2, 3), nn.Linear(3, 2)),
        (nn.Linear(2, 3), nn.Linear(2, 3, bias=False)),
        (nn.Linear(2, 3), nn.Linear(2, 3, dtype=torch.float64)),
        (nn.Dropout(0.1), nn.Dropout(0.2)),
        (Scaled(1), Scaled(True)),
        (Scaled([1, 2]), Scaled([1, 3])),
        (Scaled({"a": 1}), Scaled({"a": 2})),
        (Scaled(object()), Scaled(object())),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU(), nn.ReLU())),
        (nn.ReLU().eval(), nn.ReLU()),
    ],
)
def test_a_difference_in_what_is_computed_is_told(one: nn.Module, other: nn.Module) -> None:
    assert module_key(one) != module_key(other)


def test_what_is_not_plain_must_be_the_very_same_object() -> None:
    shared = object()
    assert module_key(Scaled(shared)) == module_key(Scaled(shared))


def test_frozen_weights_tell_a_layer_from_a_trained_one() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert module_key(frozen) != module_key(nn.Linear(2, 2))


def test_a_hook_belongs_to_one_module_only() -> None:
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)
    assert module_key(hooked) != module_key(nn.ReLU())
