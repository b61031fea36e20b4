"""Where a pipeline's model comes from, and how a process gets the weights of its own stages only.

A function that builds the model, or a model file, is called without weights to see its layers. The weights are then read
from a file, or the first rank builds the whole model from the seed, as the plain code would, and sends each rank what its
stages use. A model in memory is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from gplan.core.errors import FileError, ModelError, UsageError
from gplan.core.precision import AS_MADE, Precision
from gplan.runtime.capture_cache import named_tensors
from gplan.runtime.checkpoint.collective import RankGroup
from gplan.runtime.process_group import RankLayout
from gplan.runtime.stage_state import copy_unregistered, same_places, unregistered_tensors
from gplan_profiler.capture.sequence import as_sequential
from gplan_profiler.host.host_info import large_blocks_returned
from gplan_profiler.model.lazy_build import random_state_kept
from gplan_profiler.model.load import ModelFile, ModelTooLargeError, OpenedFile, model_in_memory, open_model_file
from gplan_profiler.model.materialise import is_meta_or_fake, on_meta, with_attributes
from gplan_profiler.model.model_reference import SettingValue
from gplan_profiler.model.precision import MASTER_DTYPE, in_precision
from gplan_profiler.model.weight_files import read_weights

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

    def seeded(self, seed: int) -> ModelSource:
        """The source with another seed: a model that was built from this one's is built again."""
        if seed == self.seed or self.opened is None:
            return replace(self, seed=seed)
        file = self.opened.load(seed=seed, lazy=self.file.is_lazy)
        return replace(self, file=in_precision(file, self.file.precision), stored=file.model, seed=seed)

    def build_whole(self) -> ModelSource:
        """Build the whole model in memory; for code that cannot be captured without weights."""
        assert self.opened is not None
        whole = self.opened.load(seed=self.seed)
        return replace(self, file=in_precision(whole, self.file.precision), stored=whole.model)

    def values(
        self, wanted: Sequence[Sequence[str]], device: torch.device, ranks: RankLayout | None
    ) -> dict[str, Tensor]:
        """Return this process's parameters and buffers, on the device; trained ones as master weights, if there are any.

        `wanted` has the names that each device of the plan uses; one row for a process alone. Values are right on the
        first replica only. Collective. Raises ModelError or FileError if there are no values for them.
        """
        names = wanted[0 if ranks is None else ranks.device]
        if self.weights is None:
            found = self._built(wanted, ranks) if self.file.is_lazy else named_tensors(self.stored)
        else:
            saved = _saved_names(self.file.model)
            read = self._read(names, saved, self.weights)
            if self._draws_unsaved(saved):  # random ones are drawn after the weights, as in the plain model
                found = {**self._built([[x for x in row if x not in saved] for row in wanted], ranks), **read}
            else:
                found = {**named_tensors(self.stored), **read}
        state, has_masters = named_tensors(self.file.model), self.file.precision.master_weights
        return {name: _as_in_model(state[name], found[name], device, name, has_masters) for name in names}

    def _built(self, wanted: Sequence[Sequence[str]], ranks: RankLayout | None) -> dict[str, Tensor]:
        """Build the model from the seed on the first rank, which sends the others of the first replica their tensors.

        Tensors that modules hold without registering them are set too, in place.
        """
        assert self.opened is not None
        opened, is_first = self.opened, ranks is None or dist.get_rank() == 0
        built: dict[str, Tensor] = {}

        def build() -> dict[str, Tensor]:
            if not is_first:
                return {}
            try:
                with random_state_kept():
                    model = opened.load(seed=self.seed).model
            except ModelTooLargeError as error:
                raise ModelTooLargeError(
                    f"{error}; to train a model that this host cannot hold once, give its weights in a file (--weights)"
                ) from error
            built.update(named_tensors(model))
            for name in dict.fromkeys(x for row in wanted for x in row):
                _check_has_values(name, built[name])
            return unregistered_tensors(model)

        with large_blocks_returned():
            group = RankGroup(group=None if ranks is None else dist.group.WORLD)
            copy_unregistered(group.run_on_all(build)[0], into=self.file.model)
            if ranks is None:
                return built
            if not is_first:
                like = named_tensors(self.stored)
                built = {x: torch.empty_like(on_meta(like[x]), device="cpu") for x in wanted[ranks.device]}
            for receiver in range(1, ranks.num_devices) if ranks.replica == 0 else ():
                if ranks.device in (0, receiver):
                    for name in wanted[receiver]:
                        _send(built[name], receiver, ranks)
            return {name: built[name] for name in wanted[ranks.device]}

    def _read(self, names: Collection[str], saved: Mapping[str, list[str]], weights: Path) -> Mapping[str, Tensor]:
        """Read saved tensors from the file; buffers that are not saved keep the values that the code gave them."""
        state = named_tensors(self.file.model)
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
        return found

    def _draws_unsaved(self, saved: Collection[str]) -> bool:
        """Whether tensors that are not saved depend on the seed."""
        if not self.is_rebuildable:
            return False
        assert self.opened is not None
        other = self.opened.load(seed=self.seed + 1, lazy=True).model
        pairs = same_places(unregistered_tensors(other), unregistered_tensors(self.stored))
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
    if isinstance(model, str):
        opened = open_model_file(model, settings=settings)
    elif callable(model):
        name = getattr(model, "__name__", type(model).__name__)
        opened = OpenedFile(
            name=name, target=model, settings={}, functions=given, input_shapes=None, loss_reduction=None
        )
    else:
        raise UsageError(
            f"the model is a {type(model).__name__}; expected an nn.Module, a function that builds one, or model.py:NAME"
        )
    try:
        file = opened.load(seed=seed, lazy=True)
    except ModelError:
        file = opened.load(seed=seed)
    return ModelSource(file=in_precision(file, precision), opened=opened, seed=seed, stored=file.model, weights=path)


def _saved_names(model: nn.Module) -> dict[str, list[str]]:
    """Return for every parameter and persistent buffer, by first name, all of its names in a state dict."""
    first = {id(tensor): name for name, tensor in named_tensors(model).items()}
    found: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            found.setdefault(first[id(tensor)], []).append(name)
    return found


def _check_has_values(name: str, value: Tensor) -> None:
    if is_meta_or_fake(value):
        raise ModelError(f"{name} has no values; build the model with values, or pass weights that hold {name}")


def _send(tensor: Tensor, receiver: int, ranks: RankLayout) -> None:
    """Send a tensor's values from the first device to another one, which receives them into its own tensor."""
    if not tensor.numel():
        return
    tensor = tensor.detach()
    values = tensor.cpu().contiguous().reshape(-1)
    message = values.view(torch.uint8)  # bytes, which gloo can send whatever the dtype
    if ranks.device == 0:
        dist.send(message, ranks.rank_of(receiver), group=ranks.on_cpu)
    else:
        dist.recv(message, ranks.rank_of(0), group=ranks.on_cpu)
        tensor.copy_(values.view_as(tensor))


def _as_in_model(expected: Tensor, value: Tensor, device: torch.device, name: str, is_master: bool) -> Tensor:
    """Return the value as a parameter or buffer of the model's dtype, or as a master weight, on the device."""
    _check_has_values(name, value)
    if not isinstance(expected, nn.Parameter):
        return value.to(device=device, dtype=expected.dtype)
    dtype = MASTER_DTYPE if is_master and expected.requires_grad else expected.dtype
    if isinstance(value, nn.Parameter) and value.device == device and value.dtype == dtype:
        return value
    made = nn.Parameter(value.detach().to(device=device, dtype=dtype), requires_grad=expected.requires_grad)
    return with_attributes(made, expected)
