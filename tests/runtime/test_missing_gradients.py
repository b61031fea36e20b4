"""A missing gradient differs from every gradient, including NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gplan.runtime.torch_engine import MissingGradients

FORMATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def nans(dtype: torch.dtype) -> list[Tensor]:
    """NaNs from values, arithmetic and other formats; some have all bits set."""
    infinite = torch.full((3,), torch.inf, dtype=dtype)
    ones = torch.full((3 * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
    converted = [torch.full((3,), torch.nan, dtype=other).to(dtype) for other in FORMATS]
    return [
        torch.full((3,), torch.nan, dtype=dtype),
        infinite - infinite,
        infinite * 0,
        -(infinite * 0),
        ones,
        *converted,
    ]


@pytest.mark.parametrize("dtype", FORMATS)
def test_nan_is_not_a_marker(dtype: torch.dtype) -> None:
    for gradient in nans(dtype):
        assert gradient.isnan().all()
        assert MissingGradients().decode(0, gradient) is gradient


@pytest.mark.parametrize("dtype", FORMATS)
def test_marker_is_nan(dtype: torch.dtype) -> None:
    mark = MissingGradients().encode(0, torch.empty(2, 3, dtype=dtype))
    assert mark.shape == (2, 3) and mark.dtype == dtype and bool(mark.isnan().all())
    assert MissingGradients().decode(0, mark) is None


def test_late_missing_gradient_is_zeros() -> None:
    own = MissingGradients()
    own.encode(0, torch.empty(2))
    own.end_pass()
    assert own.encode(0, torch.empty(2)).isnan().all()
    assert torch.equal(own.encode(1, torch.empty(2)), torch.zeros(2))
