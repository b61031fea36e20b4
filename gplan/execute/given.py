"""What a user's script hands over, checked before anything is computed: then every rank says the same, and none waits.

Inputs may differ from the usual ones in shape (a shorter sequence, a smaller batch): each shape has a capture of its
own. A floating dtype that differs is refused, since weights of another one would not take it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gplan.errors import UsageError
from gplan.execute.batches import num_rows_of
from gplan.nouns import Plan
from profiler.capture.chain import call_arguments
from profiler.capture.likeness import PLAIN


def num_samples(inputs: Any, *, usual: Any) -> int:
    """How many samples some inputs hold; `usual` are those that the model is known to take.

    Raises UsageError for what are no tensors with samples in dimension 0, and for another floating dtype.
    """
    tensors = _tensors(inputs, what="the inputs")
    if not tensors:
        raise UsageError(
            f"the inputs are a {type(inputs).__name__} without a tensor; expected tensors: torch.as_tensor(...) makes them"
        )
    found = num_rows_of(tensors, what="the inputs")
    if found == 0:
        raise UsageError("the inputs hold no samples; expected at least one")
    if not _is_like(inputs, usual):
        _check_dtypes(_by_place(inputs), _by_place(usual))
    return found


def check_targets(targets: Any, expected: int) -> None:
    """Raise UsageError for targets that are no tensors, or of another number of samples than the inputs.

    A tensor without dimensions is one for all samples, and what is plain, such as None or a number, too.
    """
    for tensor in _tensors(targets, what="the targets"):
        if tensor.dim() and tensor.shape[0] != expected:
            raise UsageError(
                f"the targets have shape {tuple(tensor.shape)}, the inputs {expected} samples; expected as many in dimension 0 "
                "of both (what is the same for all samples belongs in the loss function)"
            )


def check_training(scale: float, *, trained: Collection[str], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise UsageError where a step could give no gradients, or not those that the stages were made for.

    `trained` names what needed a gradient when they were made, `parameters` is what this process holds.
    """
    if not torch.is_grad_enabled():
        raise UsageError(
            "step was called within torch.no_grad(), which forbids gradients; call it outside, or eval_step"
        )
    if not math.isfinite(scale) or scale == 0.0:
        raise UsageError(f"scale is {scale}; expected a finite number other than 0, such as 1/n for n steps")
    changed = [name for name, x in parameters.items() if x.requires_grad != (name in trained)]
    if changed:
        now = "frozen" if changed[0] in trained else "no longer frozen"
        raise UsageError(
            f"{changed[0]} is {now} since the pipeline was made, which other stages cannot know; freeze parameters in the "
            "model before it is handed over, or make the pipeline again"
        )
    if not trained:
        raise UsageError("every parameter of the model is frozen; expected one that needs a gradient, or use eval_step")


def check_options(plan: object, *, loss: object, seed: object, timeout_s: float) -> None:
    """Raise UsageError for arguments of `gplan.pipeline` that are of another kind than expected."""
    if not isinstance(plan, Plan):
        raise UsageError(
            f"the plan is a {type(plan).__name__}; expected a Plan: gplan.load('plan.json'), or what gplan.balance returns"
        )
    if loss is not None and not callable(loss):
        raise UsageError(f"the loss is a {type(loss).__name__}; expected a function: loss(output, target)")
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UsageError(f"seed is {seed!r}; expected a whole number from 0 to 2^63 - 1")
    if not timeout_s > 0:
        raise UsageError(f"timeout_s is {timeout_s}; expected more than 0 seconds")


def _tensors(value: Any, *, what: str) -> list[Tensor]:
    leaves = pytree.tree_leaves(value)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            remedy = "dict(...) makes it one" if isinstance(leaf, Mapping) else "torch.as_tensor(...) makes one"
            raise UsageError(
                f"{what} hold a {type(leaf).__name__}; expected tensors, alone or in tuples, lists or dicts: {remedy}"
            )
        if isinstance(leaf, Tensor) and leaf.is_meta:
            raise UsageError(
                f"{what} hold a tensor on the meta device, which has no values; expected one on the CPU or a GPU"
            )
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _is_like(inputs: Any, usual: Any) -> bool:
    """Whether structure and dtypes are the same, as in most steps; sooner found than where each tensor stands."""
    (leaves, structure), (usual_leaves, usual_structure) = pytree.tree_flatten(inputs), pytree.tree_flatten(usual)
    dtypes, usual_dtypes = ([getattr(x, "dtype", None) for x in found] for found in (leaves, usual_leaves))
    return bool(structure == usual_structure and dtypes == usual_dtypes)


def _by_place(inputs: Any) -> dict[str, Tensor]:
    """The tensors of a call's arguments, by where they stand in it."""
    paths, _ = pytree.tree_flatten_with_path(call_arguments(inputs))
    return {pytree.keystr(path): x for path, x in paths if isinstance(x, Tensor)}


def _check_dtypes(found: Mapping[str, Tensor], usual: Mapping[str, Tensor]) -> None:
    for place in found.keys() & usual.keys():
        got, expected = found[place].dtype, usual[place].dtype
        if got != expected and (got.is_floating_point or expected.is_floating_point):
            raise UsageError(
                f"the inputs have dtype {got}; expected {expected}, as in the plan: x.to({expected}), or, for a model of "
                "that dtype, gplan.pipeline(..., inputs=x)"
            )
