"""Gradients that are not there, told to the stage before without a message of their own.

Where a loss makes no use of what a stage hands on, the plain model has no gradient: its optimizer leaves those
parameters alone. Zeros in its place would let weight decay and momentum move them, and turn into NaN where a derivative
is infinite. Every tensor of a boundary has its message, so one that has no gradient is sent a mark: elements whose top
byte is 0xFF and whose other bytes are 0xF5. In each of the floating-point formats that is a NaN with a payload of its
own, which arithmetic does not give: its NaNs have the top bit of the payload alone, or all bits. Reading a mark would
hold up a GPU, so in later passes only those tensors are looked at that were without a gradient in the first one; of the
others a gradient that is missing is sent as zeros.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

_TOP_BYTE, _OTHER_BYTE = 0xFF, 0xF5  # of every element
_TOP = -1 if sys.byteorder == "little" else 0


class MissingGradients:
    """Which tensors of a boundary may have no gradient; both of its ends come to the same."""

    def __init__(self) -> None:
        self._found: set[int] = set()  # by their places in the boundary
        self._is_first_pass = True

    def end_pass(self) -> None:
        """From here on no tensors are added."""
        self._is_first_pass = False

    def encode(self, place: int, empty: Tensor) -> Tensor:
        """What is sent for a gradient that is not there: `empty` as a mark, or as zeros where nobody looks for one."""
        if not empty.numel() or not self._may_be_absent(place):
            return empty.zero_()
        self._found.add(place)
        mark = torch.full((empty.numel(), empty.itemsize), _OTHER_BYTE, dtype=torch.uint8, device=empty.device)
        mark[:, _TOP].fill_(_TOP_BYTE)
        return mark.view(empty.dtype).view(empty.shape)

    def decode(self, place: int, gradient: Tensor | None) -> Tensor | None:
        """What was received, or None for a mark."""
        if gradient is None or not self._may_be_absent(place) or not _is_mark(gradient):
            return gradient
        self._found.add(place)
        return None

    def _may_be_absent(self, place: int) -> bool:
        return self._is_first_pass or place in self._found


def _is_mark(tensor: Tensor) -> bool:
    """By its first element; a tensor of no elements cannot be marked."""
    first = tensor.reshape(-1)[:1].view(torch.uint8).tolist()
    if not first:
        return False
    top = first.pop(_TOP)
    return bool(top == _TOP_BYTE and all(byte == _OTHER_BYTE for byte in first))
