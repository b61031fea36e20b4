"""Where a pipeline's model comes from, and how a process gets the weights of its own stages only.

A function that builds the model, or a model file, is called without weights to see its layers. A stage's weights are
then built as the whole model would be from the same seed, or read from a file. A model in memory is used as it is.
Code that cannot be built in part, such as `from_pretrained`, is built whole in every process, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from gplan.core.errors import FileError, ModelError, UsageError
from gplan.core.precision import AS_MADE, Precision
from gplan.runtime.capture_cache import named_tensors
from gplan.runtime.stage_state import copy_unregistered, unregistered_pairs
from profiler.capture.sequence import as_sequential
from profiler.model.load import ModelFile, OpenedFile, model_in_memory, open_model_file
from profiler.model.materialise import is_meta_or_fake
from profiler.model.model_reference import SettingValue
from profiler.model.precision import MASTER_DTYPE, in_precision
from profiler.model.weight_files import read_weights

ModelLike: TypeAlias = nn.Module | Sequence[nn.Module] | Callable[[], nn.Module] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model, with or without weights, and where its weights come from."""

    file: ModelFile  # in the precision of the training
    opened: OpenedFile | None  # None: the model was handed over as it is
    seed: int
    stored: nn.Module  # the model as it was made, in its own precision
    weights: Path | None = None  # a file, or a folder of files

    @property
    def is_rebuildable(self) -> bool:
        """Whether the model was built without weights and can be built with them."""
        return self.file.is_lazy and self.opened is not None

    def build_whole(self) -> ModelSource:
        """Build the whole model in memory; for code that cannot be captured without weights."""
        assert self.opened is not None
        whole = self.opened.load(seed=self.seed)
        return replace(self, file=in_precision(whole, self.file.precision), stored=whole.model)

    def values(self, names: Collection[str], device: torch.device) -> dict[str, Tensor]:
        """Return the parameters and buffers of these names, on the device; trained ones as master weights, if there are any.

        Raises ModelError or FileError if there are no values for them.
        """
        found = self._values(names)
        state, has_masters = named_tensors(self.file.model), self.file.precision.master_weights
        return {name: _as_in_model(state[name], found[name], device, name, has_masters) for name in names}

    def _values(self, names: Collection[str]) -> Mapping[str, Tensor]:
        state = named_tensors(self.file.model)
        if self.weights is not None:
            return self._read(state, names, self.weights)
        if not self.file.is_lazy:
            return named_tensors(self.stored)
        parameters = {name for name, _ in self.file.model.named_parameters()}
        return self._built(parameters.intersection(names))

    def _built(self, parameters: Collection[str]) -> Mapping[str, Tensor]:
        """Build the model's buffers and these parameters from the seed.

        Tensors that modules hold without registering them are set too, in place.
        """
        assert self.opened is not None
        try:
            model = self.opened.load_part(seed=self.seed, keep=parameters)
        except ModelError as error:
            warnings.warn(f"{error}; every process builds it whole and keeps its own stage", stacklevel=2)
            model = self.build_whole().file.model
        copy_unregistered(model, into=self.file.model)
        return named_tensors(model)

    def _read(self, state: Mapping[str, Tensor], names: Collection[str], weights: Path) -> Mapping[str, Tensor]:
        """Read saved tensors from the file; buffers that are not saved keep the values that the code gave them.

        Random ones among those are built again after the weights, as the plain model draws its weights first.
        """
        saved = _saved_names(self.file.model)
        lost = [name for name in self.file.lost if name not in saved]
        if lost:
            raise UsageError(
                f"{self.file.name} was built without its weights, whereby {lost[0]} lost its values, and it is not saved with "
                "them; pass the function that builds the model, not on the meta device, or leave weights=... out and give "
                "them to pipe.load_state_dict"
            )
        wanted = {name: saved[name] for name in names if name in saved}
        read = read_weights(weights, [x for aliases in wanted.values() for x in aliases[:1]], what=self.file.name)
        found = {name: read[aliases[0]] for name, aliases in wanted.items()}
        for name, tensor in found.items():
            if tensor.shape != state[name].shape:
                raise FileError(
                    f"{weights} holds {name} of shape {tuple(tensor.shape)}; {self.file.name} has shape "
                    f"{tuple(state[name].shape)}: these are weights of another model"
                )
        made = self._built(()) if self._draws_unsaved(saved) else named_tensors(self.stored)
        return {**{name: made[name] for name in names}, **found}

    def _draws_unsaved(self, saved: Collection[str]) -> bool:
        """Whether tensors that are not saved depend on the seed."""
        if not self.is_rebuildable:
            return False
        assert self.opened is not None
        other = self.opened.load(seed=self.seed + 1, lazy=True).model
        pairs = [*unregistered_pairs(other, self.stored)]
        state, others = named_tensors(self.stored), named_tensors(other)
        pairs += [(others[name], state[name]) for name in state.keys() & others.keys() if name not in saved]
        return any(not torch.equal(x, y) for x, y in pairs if not (is_meta_or_fake(x) or is_meta_or_fake(y)))


def open_source(
    model: ModelLike,
    *,
    settings: Mapping[str, SettingValue] | None = None,
    functions: Mapping[str, Callable[..., Any] | None] | None = None,
    seed: int = 0,
    weights: str | Path | None = None,
    precision: Precision = AS_MADE,
) -> ModelSource:
    """Return a source for an nn.Module, a function that builds one, or a reference to a model file.

    Raises UsageError for a module on the meta device without `weights`, ModelError for a file that cannot be loaded.
    """
    path = None if weights is None else Path(weights)
    given = {name: x for name, x in (functions or {}).items() if x is not None}
    if isinstance(model, list | tuple):
        model = as_sequential(model)
    if isinstance(model, nn.Module):
        if isinstance(model, DistributedDataParallel) or any(isinstance(x, FSDPModule) for x in model.modules()):
            raise UsageError(
                f"the model is wrapped for replicas already ({type(model).__name__}); pass the model itself: the plan says "
                "how many replicas there are and what they divide"
            )
        file = model_in_memory(
            model, loss=given.get("loss"), optimizer=given.get("optimizer"), batches=given.get("batches")
        )
        if path is None and any(is_meta_or_fake(x) for x in named_tensors(file.model).values()):
            raise UsageError(
                f"the {type(model).__name__} is on the meta device and has no values; pass the function that builds it "
                "(then each process makes its own stage, as the whole model would be from the seed), or weights=FILE"
            )
        return ModelSource(file=in_precision(file, precision), opened=None, seed=seed, stored=file.model, weights=path)
    opened = open_model_file(model, settings=settings) if isinstance(model, str) else _opened(model, given)  # type: ignore[arg-type]
    try:
        file = opened.load(seed=seed, lazy=True)
    except ModelError:
        file = opened.load(seed=seed)
    return ModelSource(file=in_precision(file, precision), opened=opened, seed=seed, stored=file.model, weights=path)


def _opened(build: Callable[[], nn.Module], functions: Mapping[str, Callable[..., Any]]) -> OpenedFile:
    if not callable(build):
        raise UsageError(
            f"the model is a {type(build).__name__}; expected an nn.Module, a function that builds one, or model.py:NAME"
        )
    return OpenedFile(
        name=getattr(build, "__name__", type(build).__name__),
        target=build,
        settings={},
        functions=functions,
        input_shapes=None,
        loss_reduction=None,
    )


def _saved_names(model: nn.Module) -> dict[str, list[str]]:
    """Return for every parameter and persistent buffer, by first name, all of its names in a state dict."""
    first = {id(tensor): name for name, tensor in named_tensors(model).items()}
    found: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            found.setdefault(first[id(tensor)], []).append(name)
    return found


def _as_in_model(expected: Tensor, value: Tensor, device: torch.device, name: str, is_master: bool) -> Tensor:
    """Return the value as a parameter or buffer of the model's dtype, or as a master weight, on the device."""
    if is_meta_or_fake(value):
        raise ModelError(f"{name} has no values; build the model with values, or pass weights that hold {name}")
    if not isinstance(expected, nn.Parameter):
        return value.to(device=device, dtype=expected.dtype)
    dtype = MASTER_DTYPE if is_master and expected.requires_grad else expected.dtype
    if isinstance(value, nn.Parameter) and value.device == device and value.dtype == dtype:
        return value
    moved = value.detach().to(device=device, dtype=dtype)
    return nn.Parameter(moved, requires_grad=expected.requires_grad)
