"""Which module of a model does what it should not: the first, in the order they end, whose output is at fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def first_not_finite(model: nn.Module, run: Callable[[], Any]) -> str | None:
    """The module whose output first holds a nan or an infinity while `run` calls the model."""
    return next((name for name, value in _fingerprints(model, run) if not math.isfinite(value)), None)


def first_difference(model: nn.Module, run: Callable[[], Any]) -> str | None:
    """The module whose output first differs between two calls of `run`."""
    pairs = zip(_fingerprints(model, run), _fingerprints(model, run), strict=False)
    return next((name for (name, one), (_, other) in pairs if one != other), None)


def failing_module(model: nn.Module, error: BaseException) -> str:
    """The innermost module of the model in which an error arose; the model's class where it was in none of them."""
    names = _names(model)
    found, frame = type(model).__name__, error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            found = names[module]
        frame = frame.tb_next
    return found


def _names(model: nn.Module) -> dict[nn.Module, str]:
    """Every module as messages name it: 1.1 (Log)."""
    names = {module: name or "the model" for name, module in model.named_modules()}
    return {module: f"{name} ({type(module).__name__})" for module, name in names.items()}


def _fingerprints(model: nn.Module, run: Callable[[], Any]) -> list[tuple[str, float]]:
    """The sum of each module's output, by name, in the order in which the modules end: the innermost first."""
    found: list[tuple[str, float]] = []
    names = _names(model)

    def note(module: nn.Module, _arguments: object, output: object) -> None:
        found.append((names[module], _sum(output)))

    hooks = [module.register_forward_hook(note) for module in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _sum(output: object) -> float:
    tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    return math.fsum(float(x.detach().double().sum()) for x in tensors)
