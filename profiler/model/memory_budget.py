"""Whether a model fits in memory while it is measured, and how it is then loaded.

Measured in one piece, a model needs its weights, their gradients and, at different times, what one step keeps for its
backward pass or the optimizer's copies of some parameters. It is first built without weights, which costs next to
nothing; only one that fits is built for real. What operations need for a moment is covered by a reserve.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gplan.core.errors import ModelError
from gplan.core.units import bytes_text
from profiler.capture.chain import call_arguments, untouched
from profiler.memory.allocations import storage_bytes, storage_key
from profiler.model.available_memory import available_bytes
from profiler.model.data import sample_batch
from profiler.model.lazy_build import fake_mode_of, random_state_kept
from profiler.model.load import ModelFile, ModelTooLargeError, OpenedFile, open_model_file
from profiler.model.locate import Setting
from profiler.timing.optimizer_step import MOST_COPIED_BYTES

_OPTIMIZER_COPIES = 5  # of each: the parameter, its gradient, two moments, and a temporary of the step
_RESERVE = 1.15
_BUILDS_LAZILY = "measured layer by layer: the model file itself builds the model without weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """What measuring a model in one piece takes, and what there is."""

    needed_bytes: int
    available_bytes: int

    @property
    def suffices(self) -> bool:
        """Whether the model fits."""
        return self.needed_bytes <= self.available_bytes


def load_for_measuring(
    reference: str,
    *,
    settings: Mapping[str, Setting] | None = None,
    input_shapes: str | None = None,
    seed: int = 0,
    batch_size: int = 1,
    device: str = "cpu",
    num_copies: int = 1,
) -> ModelFile:
    """The file with a real model where that fits in memory `num_copies` times, else with a lazy one and a note why.

    `batch_size` is that of the largest micro-batch to be measured. The real model has the weights that
    `load_model_file` gives it with the same seed. Raises what `load_model_file` raises, and ModelTooLargeError for a
    model that neither fits nor can be built without weights.
    """
    opened = open_model_file(reference, settings=settings, input_shapes=input_shapes)
    with random_state_kept():
        lazy = _lazily(opened, seed)
        if lazy is not None and lazy.is_lazy:
            room = headroom(lazy, batch_size=batch_size, device=device, num_copies=num_copies)
    if lazy is None or not lazy.is_lazy:
        return opened.load(seed=seed)
    if room.suffices:
        with suppress(ModelTooLargeError):
            real = opened.load(seed=seed)
            return replace(real, notes=(*real.notes, _BUILDS_LAZILY)) if real.is_lazy else real
    return replace(lazy, notes=(*lazy.notes, _why_lazy(room)))


def headroom(file: ModelFile, *, batch_size: int, device: str = "cpu", num_copies: int = 1) -> Headroom:
    """Whether measuring all of a lazy file's model in one piece fits on the device, and building it on the host.

    `num_copies` is the number of processes that measure at once, each with weights of its own.
    """
    available = min(available_bytes(), available_bytes(device))
    weights = weight_bytes(file)
    trained = sum(x.nbytes for x in file.model.parameters() if x.requires_grad)
    least = weights + trained + _OPTIMIZER_COPIES * min(trained, MOST_COPIED_BYTES)
    most = max(least, weights + trained + saved_bytes(file, batch_size)) if least <= available else least
    return Headroom(needed_bytes=int(_RESERVE * num_copies * most), available_bytes=available)


def weight_bytes(file: ModelFile) -> int:
    """Bytes of the model's parameters and buffers, shared ones once, whether they have memory or not."""
    return storage_bytes([*file.model.parameters(), *file.model.buffers()])


def saved_bytes(file: ModelFile, batch_size: int) -> int:
    """Bytes that a lazy file's model keeps from a forward for its backward pass; 0 where that shows only with weights.

    The model runs on fake tensors, without memory. What operations keep is counted by storage, weights left out.
    """
    mode = fake_mode_of(file.model)
    if mode is None:
        return 0
    own = {storage_key(x) for x in (*file.model.parameters(), *file.model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[storage_key(tensor)] = tensor
        return tensor

    with untouched(file.model):
        try:
            args, kwargs = call_arguments(sample_batch(file, batch_size)[0])
            with mode, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                args, kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
                file.model(*args, **kwargs)
        except Exception:  # the model decides by values, or its inputs are wrong: whoever measures it will say so
            return 0
    return storage_bytes(x for key, x in kept.items() if key not in own)


def _lazily(opened: OpenedFile, seed: int) -> ModelFile | None:
    try:
        return opened.load(seed=seed, lazy=True)
    except ModelError:
        return None


def _why_lazy(room: Headroom) -> str:
    return (
        f"measured layer by layer, without the model as a whole: that would take {bytes_text(room.needed_bytes)}, and "
        f"{bytes_text(room.available_bytes)} are free"
    )
