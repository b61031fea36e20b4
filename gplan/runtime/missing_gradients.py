"""Signals a missing gradient to the previous stage without an extra message.

Where a loss does not use all outputs of a stage, the plain model has no gradient, and its optimizer leaves those
parameters alone. Sending zeros instead would let weight decay and momentum move them, and give NaN where a
derivative is infinite. Every boundary tensor has its message, so a missing gradient is sent as a marker: elements
whose top byte is 0xFF and whose other bytes are 0xF5, in every floating-point format a NaN with a payload that
arithmetic does not produce. Reading a marker synchronizes with a GPU. So after the first pass only tensors whose
gradient was missing in it are checked; if another tensor's gradient is missing later, zeros are sent.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

_TOP_BYTE, _OTHER_BYTE = 0xFF, 0xF5  # of every element
_TOP = -1 if sys.byteorder == "little" else 0


class MissingGradients:
    """Which tensors of one boundary may have no gradient; sender and receiver derive the same set."""

    def __init__(self) -> None:
        self._found: set[int] = set()  # by their places in the boundary
        self._is_first_pass = True

    def end_pass(self) -> None:
        """End a pass; after the first, the set is fixed."""
        self._is_first_pass = False

    def encode(self, place: int, empty: Tensor) -> Tensor:
        """Fill `empty` for a missing gradient: with the marker, or with zeros if the receiver does not check for it."""
        if not empty.numel() or not self._may_be_absent(place):
            return empty.zero_()
        self._found.add(place)
        mark = torch.full((empty.numel(), empty.itemsize), _OTHER_BYTE, dtype=torch.uint8, device=empty.device)
        mark[:, _TOP].fill_(_TOP_BYTE)
        return mark.view(empty.dtype).view(empty.shape)

    def decode(self, place: int, gradient: Tensor | None) -> Tensor | None:
        """Return the received gradient, or None for a marker."""
        if gradient is None or not self._may_be_absent(place) or not _is_mark(gradient):
            return gradient
        self._found.add(place)
        return None

    def _may_be_absent(self, place: int) -> bool:
        return self._is_first_pass or place in self._found


def _is_mark(tensor: Tensor) -> bool:
    """Check the first element; a tensor without elements cannot hold a marker."""
    first = tensor.reshape(-1)[:1].view(torch.uint8).tolist()
    if not first:
        return False
    top = first.pop(_TOP)
    return bool(top == _TOP_BYTE and all(byte == _OTHER_BYTE for byte in first))
