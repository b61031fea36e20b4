"""One child of a sequence called once: what it gives, and what it does with the memory of what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import _disable_current_modes

from gplan.errors import ModelError
from profiler.capture.chain import Tensors, detached
from profiler.capture.forms import Form
from profiler.capture.norms import HeardCall, norms_heard
from profiler.memory.storages import storage_key
from profiler.model.author import author_line, describe


@dataclass(frozen=True, slots=True)
class Call:
    """What a child made of a value."""

    tensors: Tensors
    form: Form
    writes: bool  # into a tensor that it was given
    hands_on: bool  # memory that it was given: a tensor of it, or a view
    overlaps: bool  # two of the tensors that it gives have elements in common
    norms: tuple[HeardCall, ...]  # those of its norms that write moving averages


def called(name: str, child: nn.Module, tensors: Tensors, form: Form) -> Call:
    """Call a child with a value of this form; raises ModelError, with the author's line, where that fails."""
    given = tuple(x.clone() for x in detached(tensors))
    before = [x._version for x in given]
    try:
        with norms_heard(child) as norms:
            value = child(form.value(given))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(
            f"{name} ({type(child).__name__}) decides by the values of its input{_at(error)}, which a model without weights "
            "does not have; write it without (torch.where, torch.cond), or measure on a host with more memory"
        ) from error
    except Exception as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ModelError(
            f"{name} ({type(child).__name__}) fails on inputs of shape {shapes}: {describe(error)}"
        ) from error
    made, outputs = Form.of(value, what=output_of(name, child))
    return Call(
        outputs,
        made,
        writes=[x._version for x in given] != before,
        hands_on=any(_share_memory(x, y) for x, y in product(given, outputs)),
        overlaps=any(_overlap(x, y) for x, y in combinations(outputs, 2)),
        norms=tuple(norms),
    )


def output_of(name: str, child: nn.Module) -> str:
    """What a child gives, in an error."""
    return f"the output of {name} ({type(child).__name__})"


def check_memory(names: Sequence[str], calls: Sequence[Call]) -> None:
    """Raise ModelError where a child writes into one of two overlapping tensors:
    the other would not change after a cut."""
    maker: str | None = None  # of the tensors that overlap
    for name, call in zip(names, calls, strict=True):
        if maker is not None and call.writes:
            raise ModelError(
                f"{name} writes in place into what it is given, where {maker} gives tensors that share their memory; "
                f"between two stages each has memory of its own: let {name} write into a copy (.clone()), or {maker} "
                "give copies"
            )
        if call.overlaps:
            maker = name
        elif not call.hands_on:
            maker = None


def _at(error: Exception) -> str:
    line = author_line(error)
    return f" ({line})" if line else ""


def _share_memory(x: Tensor, y: Tensor) -> bool:
    return x.layout == y.layout == torch.strided and storage_key(x) == storage_key(y)


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have elements in common, and not only their storage, as the parts of a chunk have."""
    if not _share_memory(x, y):
        return False
    with _disable_current_modes(), torch.no_grad():
        end = max(
            1 + t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in (x, y)
        )
        is_of_x = torch.zeros(max(0, end), dtype=torch.bool)
        is_of_x.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
        return bool(is_of_x.as_strided(y.shape, y.stride(), y.storage_offset()).any())
