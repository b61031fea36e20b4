"""The state of a process's stages: parameters, gradient norm, state dicts, checkpoints.

A tensor belongs to every stage with a layer that uses it; one that no layer uses belongs to the first stage. Names
are those of the model; a tied tensor is saved under all its names.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from gplan.core.errors import FileError, UsageError
from gplan.core.units import counted, some_names
from gplan.runtime.agreement import Agreement
from gplan.runtime.capture_cache import CapturedModel, named_tensors
from gplan.runtime.checkpoint.loading import LoadedCheckpoint, checkpoint_exists, load_checkpoint
from gplan.runtime.checkpoint.saving import save_checkpoint
from gplan.runtime.checkpoint.state import PlainValue, RankState, Scheduler
from gplan.runtime.gradient_clipping import clip_over_all_ranks
from gplan.runtime.gradient_sync import gradient_norm
from gplan.runtime.process_group import RankLayout
from gplan.runtime.random_streams import RandomStreams
from gplan.runtime.sharded_tensors import divided_like, full_tensor, local_gradients, local_tensor
from gplan_profiler.host.heartbeat import Heartbeat
from gplan_profiler.model.materialise import is_meta_or_fake
from gplan_profiler.torch_compat import pytree

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # parameters, buffers, hooks


def unregistered_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in memory that modules hold as plain attributes, also in lists and dicts, by their place.

    Such tensors (`self.scale = torch.randn(4)`) become constants of a capture.
    """
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        attributes = {name: value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}
        leaves, _ = pytree.tree_flatten_with_path(attributes)
        tensors = {f"{path}{pytree.keystr(place)}": x for place, x in leaves if isinstance(x, Tensor)}
        found |= {place: x for place, x in tensors.items() if x.layout == torch.strided and not is_meta_or_fake(x)}
    return found


def copy_unregistered(values: Mapping[str, Tensor], *, into: nn.Module) -> None:
    """Copy unregistered tensors of a plain build, by their place, into a build without weights.

    That draws fewer random numbers, so its own may differ.
    """
    for real, tensor in same_places(values, unregistered_tensors(into)):
        if not torch.equal(real, tensor):
            tensor.untyped_storage().copy_(real.untyped_storage())  # which can be shorter than an expanded tensor


def same_places(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of two builds that have the same place and layout."""
    pairs = ((one[place], other[place]) for place in one.keys() & other.keys())
    return [(x, y) for x, y in pairs if _layout(x) == _layout(y)]


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.untyped_storage().nbytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateNames:
    """The names of a model's state, by stage."""

    used_by_stage: tuple[tuple[str, ...], ...]  # first names of parameters and buffers, in the model's order
    unused: tuple[str, ...]  # used by no layer
    saved: Mapping[str, str]  # key of the model's state dict -> first name of its tensor

    def on_stages(self, stages: Collection[int]) -> set[str]:
        """Return the names on some stages."""
        used = {name for stage in stages for name in self.used_by_stage[stage]}
        return used.union(self.unused) if 0 in stages else used

    def first_stage(self, name: str) -> int:
        """Return the first stage that has a name."""
        return next((i for i, names in enumerate(self.used_by_stage) if name in names), 0)

    def shared(self) -> dict[str, tuple[int, ...]]:
        """Return the names on several stages, with those stages."""
        holders: dict[str, list[int]] = {}
        for stage, names in enumerate(self.used_by_stage):
            for name in names:
                holders.setdefault(name, []).append(stage)
        return {name: tuple(stages) for name, stages in holders.items() if len(stages) > 1}


def state_names(model: nn.Module, captured: CapturedModel, num_stages: int) -> StateNames:
    """Assign a model's state to stages, by its capture in training."""
    first = {id(tensor): name for name, tensor in named_tensors(model).items()}
    used = list[set[str]]()
    for stage in range(num_stages):
        tensors = [x for layer in captured.layers(stage) for x in captured.chain.state(layer).values()]
        used.append({first[id(x)] for x in tensors if id(x) in first})
    everywhere = set().union(*used)
    return StateNames(
        used_by_stage=tuple(tuple(x for x in first.values() if x in names) for names in used),
        unused=tuple(x for x in first.values() if x not in everywhere),
        saved={key: first[id(x)] for key, x in model.state_dict(keep_vars=True).items() if id(x) in first},
    )


_BATCH_SIZE = "gplan.batch_size"


class StageState:
    """The parameters and buffers of some stages, under the model's own names."""

    def __init__(
        self,
        names: StateNames,
        tensors: Mapping[str, Tensor],
        *,
        digest: str,
        batch_size: int,
        ranks: RankLayout | None,
        random_streams: RandomStreams,
        heartbeat: Heartbeat,
        agreement: Agreement,
    ) -> None:
        """`tensors` are those of this process by first name, `digest` is the model's, `batch_size` the plan's."""
        self.ranks, self.heartbeat, self._agreement = ranks, heartbeat, agreement
        self.num_steps = 0
        self._names, self._tensors = names, tensors
        self._digest, self._batch_size, self._random_streams = digest, batch_size, random_streams
        self._copies = [  # of tied parameters, which count in the gradient norm on the first rank that has them
            x for name, x in self.named_parameters() if ranks and names.first_stage(name) not in ranks.stages
        ]
        if ranks is not None:
            clip_over_all_ranks(self)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters on this process by name; a tied one once."""
        return ((name, x) for name, x in self._tensors.items() if isinstance(x, nn.Parameter))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters on this process, for an optimizer.

        Without any, one of no elements is returned, as torch's optimizers refuse an empty list.
        """
        found = [x for _, x in self.named_parameters()]
        yield from found or [nn.Parameter(torch.empty(0, device=self.device))]

    def clip_grad_norm_(self, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all stages so that their total norm is at most `max_norm`; return the norm before.

        A tied parameter counts once, as in the plain model. Collective. torch.nn.utils.clip_grad_norm_(pipe.parameters(),
        max_norm) does the same.
        """
        own = [x for _, x in self.named_parameters() if x.grad is not None]
        norm = self.gradient_norm([x.grad for x in own if x.grad is not None], norm_type)
        clip_grads_with_norm_(list(local_gradients(own)), max_norm, norm)
        return norm

    def has_gradients(self, gradients: Collection[Tensor]) -> bool:
        """Whether some of `gradients` belong to this process's parameters; also if neither has any."""
        own = {id(x.grad) for _, x in self.named_parameters() if x.grad is not None}
        return any(id(x) in own for x in gradients) if own else not gradients

    def gradient_norm(self, gradients: Iterable[Tensor], norm_type: float) -> Tensor:
        """Return the norm of the gradients that all ranks give, those of a tied parameter once. Collective."""
        self._agreement.begin("clip_grad_norm_")
        copies = {id(x.grad) for x in self._copies}
        counted = [x for x in gradients if id(x) not in copies]
        return gradient_norm(counted, norm_type, device=self.device, ranks=self.ranks)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this process's part of the model's state dict, under the model's keys; all of it if alone.

        Parameters that replicas divide are DTensors.
        """
        return {key: self._tensors[name].detach() for key, name in self._names.saved.items() if name in self._tensors}

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the model's whole state dict, on the CPU of global rank 0; empty on other ranks. Collective."""
        self._agreement.begin("full_state_dict")
        if self.ranks is None:
            return {key: x.to("cpu", copy=True) for key, x in self.state_dict().items()}
        own = {key: full_tensor(x).cpu() for key, x in self.state_dict().items()}
        parts: list[dict[str, Tensor] | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own if self.ranks.replica == 0 else {}, parts)
        merged = {key: x for part in parts or () if part for key, x in part.items()}
        return {key: merged[key] for key in self._names.saved if key in merged}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state dict of the model, the whole or this process's part.

        Raises FileError for keys that are missing, unknown or of another shape.
        """
        if not isinstance(state, Mapping):
            raise UsageError(f"the state is a {type(state).__name__}; expected a state dict: tensors by their names")
        own = self.state_dict()
        common = own.keys() & state.keys()
        odd = [key for key in common if not isinstance(state[key], Tensor)]
        if odd:
            raise FileError(f"the state dict holds a {type(state[odd[0]]).__name__} as {odd[0]}; expected tensors")
        missing, unknown = own.keys() - state.keys(), state.keys() - self._names.saved.keys()
        wrong = [key for key in common if own[key].shape != state[key].shape]
        for what, keys in (("lacks", missing), ("holds unknown", unknown), ("has another shape for", wrong)):
            if keys:
                raise FileError(
                    f"the state dict {what} {counted(len(keys), 'key')} ({some_names(sorted(keys))}); expected those of the model"
                )
        with torch.no_grad():
            for key, tensor in own.items():
                local_tensor(tensor).copy_(local_tensor(divided_like(state[key], tensor)))

    def save(
        self,
        directory: str | Path,
        *,
        optimizer: Optimizer | None = None,
        scheduler: Scheduler | None = None,
        progress: Mapping[str, PlainValue] | None = None,
    ) -> Path:
        """Write a checkpoint, `directory`/step-N, that any plan for the same model can resume from. Collective.

        It holds parameters, buffers, the states of optimizer, scheduler and torch's generator, the number of steps,
        and `progress` (plain values, such as the position in the data). It is written completely or not at all.
        Raises RunError on every rank if it cannot be written; earlier checkpoints stay as they are.
        """
        self.heartbeat.enter_action("saving")
        self._agreement.begin("save")
        known = {
            "gplan.steps": self.num_steps,
            "gplan.seed": self._random_streams.run_seed,
            _BATCH_SIZE: self._batch_size,
        }
        return save_checkpoint(
            Path(directory),
            self._state(optimizer, scheduler),
            step=self.num_steps,
            progress={**(progress or {}), **known},
            digest=self._digest,
            group=dist.group.WORLD if self.ranks is not None else None,
        )

    def load(
        self,
        path: str | Path,
        *,
        optimizer: Optimizer | None = None,
        scheduler: Scheduler | None = None,
        must_exist: bool = True,
    ) -> dict[str, PlainValue]:
        """Resume from a checkpoint, or from the newest complete one in a folder, saved with this or another plan.

        Parameters, buffers, optimizer and scheduler are set in place, and random numbers continue. Returns the saved
        `progress`. Warns if newer checkpoints are damaged, if the optimizer's learning rate or other values were different,
        which the checkpoint replaces, or if the mini-batch size was. Raises FileError
        if there is no complete checkpoint of this model; with `must_exist=False`, if there is none at all, nothing
        changes and the result is empty.
        """
        loaded = self.restore(path, optimizer=optimizer, scheduler=scheduler, must_exist=must_exist)
        if loaded is None:
            return {}
        was, now = loaded.batch_size, self._batch_size
        notes = [loaded.note] if loaded.note else []
        if was is not None and was != now:
            num_steps = self.num_steps
            samples = counted(num_steps * abs(now - was), "sample")
            what = f"{samples} are skipped" if now > was else f"{samples} come again"
            notes.append(
                f"{loaded.path} was saved with mini-batches of {was} samples, the plan has {now}: after {num_steps} steps it has "
                f"used {num_steps * was} samples; data that are counted in steps go on after {num_steps * now}, so that {what}"
            )
        if notes and (self.ranks is None or dist.get_rank() == 0):
            warnings.warn("; ".join(notes), stacklevel=2)
        return loaded.progress

    def restore(
        self, path: str | Path, *, optimizer: Optimizer | None, scheduler: Scheduler | None, must_exist: bool = True
    ) -> LoadedCheckpoint | None:
        """Like `load`, but return warnings with the checkpoint."""
        self.heartbeat.enter_action("restoring")
        self._agreement.begin("load")
        group = dist.group.WORLD if self.ranks is not None else None
        if not must_exist and not checkpoint_exists(Path(path), group=group):
            return None
        loaded = load_checkpoint(Path(path), self._state(optimizer, scheduler), digest=self._digest, group=group)
        self.num_steps = int(loaded.progress.pop("gplan.steps"))
        self._random_streams.run_seed = int(loaded.progress.pop("gplan.seed"))
        size = loaded.progress.pop(_BATCH_SIZE, None)
        return replace(loaded, batch_size=None if size is None else int(size))

    def _state(self, optimizer: Optimizer | None, scheduler: Scheduler | None) -> RankState:
        return RankState(
            model=self.state_dict(),
            parameters={name: x for name, x in self.named_parameters() if x.requires_grad},
            optimizers=[] if optimizer is None else [optimizer],
            schedulers=[] if scheduler is None else [scheduler],
            stages=() if self.ranks is None else self.ranks.stages,
        )

    @property
    def seed(self) -> int:
        """The run's seed; after a restore that of the run that saved."""
        return self._random_streams.run_seed

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._random_streams.device
