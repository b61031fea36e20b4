"""Fake kernels for operators that torch runs for more dtypes than its own fake kernels accept.

torch._grouped_mm (the product of experts' weights with the tokens routed to each) computes float32, bfloat16 and float16
on a CPU, but its fake kernel refuses all but bfloat16 (torch 2.13), so that no mixture of experts could be traced as it
runs. The shapes follow the layouts in the documentation of torch.nn.functional.grouped_mm. torch._ctc_loss, with the
lengths of its samples as tensors, has no fake kernel at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNED_BYTES = 16  # rows of a result begin at multiples of this


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor like the result: one group for each expert, which is a range of rows, of columns, or of the inner size."""
    if a.dim() == 3 and b.dim() == 3:
        size = [a.shape[0], a.shape[1], b.shape[2]]
    elif a.dim() == b.dim():
        assert offs is not None, "two matrices are multiplied in groups that end at offs"
        size = [offs.shape[0], a.shape[0], b.shape[1]]
    else:
        size = [a.shape[-2], b.shape[-1]]
    made = a.new_empty(size, dtype=out_dtype or a.dtype)
    per_row = _ALIGNED_BYTES // made.element_size()
    row = (size[-1] + per_row - 1) // per_row * per_row
    return made if row == size[-1] else made.new_empty_strided(size, [size[-2] * row, row, 1][-len(size) :])


torch.library.register_fake("aten::_grouped_mm", _grouped_mm, allow_override=True)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Tensors like the losses of the samples, and like the backward's workspace, whose last size depends on the targets."""
    num_steps, num_samples = log_probs.shape[:2]
    return log_probs.new_empty([num_samples]), log_probs.new_empty([num_samples, num_steps, 1])


torch.library.register_fake("aten::_ctc_loss.Tensor", _ctc_loss, allow_override=True)
