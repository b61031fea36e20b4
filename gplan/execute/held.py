"""What a process holds of a model, and what a user does with it: parameters, gradient norm, state, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gplan.execute import holdings
from gplan.execute.checkpoint import Loaded, Plain, State, is_there, load_checkpoint, save_checkpoint
from gplan.execute.checkpoint.state import Scheduler
from gplan.execute.clipping import gradient_norm
from gplan.execute.randomness import Draws
from gplan.execute.ranks import Ranks
from gplan.execute.whereabouts import Whereabouts

_BATCH_SIZE = "gplan.batch_size"


class Held:
    """The parameters and buffers of some stages, under the model's own names."""

    def __init__(
        self,
        names: holdings.Names,
        tensors: Mapping[str, Tensor],
        *,
        digest: str,
        batch_size: int,
        ranks: Ranks | None,
        draws: Draws,
        whereabouts: Whereabouts,
    ) -> None:
        """`tensors` are those of this process by their first names; `digest` is that of the model, `batch_size` the
        plan's."""
        self.ranks, self.whereabouts = ranks, whereabouts
        self.num_steps = 0  # taken so far
        self._names, self._tensors = names, tensors
        self._digest, self._batch_size, self._draws = digest, batch_size, draws
        self._counted = [  # in the norm of all gradients: a tied parameter by the first of the ranks that hold it
            x for name, x in self.named_parameters() if ranks is None or names.first_stage(name) in ranks.stages
        ]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters held here, by their names in the model; a tied one once."""
        return ((name, x) for name, x in self._tensors.items() if isinstance(x, nn.Parameter))

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters held here, for an optimizer.

        A stage without any gives one of no elements, since torch's optimizers refuse an empty list.
        """
        found = [x for _, x in self.named_parameters()]
        yield from found or [nn.Parameter(torch.empty(0, device=self.device))]

    def clip_grad_norm_(self, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all stages so that their norm together is at most `max_norm`; the norm before.

        A tied parameter counts once, as in the plain model.
        """
        group = None if self.ranks is None else self.ranks.pipeline
        norm = gradient_norm(self._counted, norm_type, device=self.device, group=group)
        nn.utils.clip_grads_with_norm_([x for _, x in self.named_parameters()], max_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """What is held here of the model's state dict, under the model's own keys: all of it in one process."""
        return holdings.state_dict(self._names.saved, self._tensors)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's whole state dict, on the CPU of global rank 0; empty on other ranks. The plain model loads it."""
        if self.ranks is None:
            return {key: x.to("cpu", copy=True) for key, x in self.state_dict().items()}
        own = {key: x.cpu() for key, x in self.state_dict().items()}
        parts: list[dict[str, Tensor] | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own if self.ranks.replica == 0 else {}, parts)
        merged = {key: x for part in parts or () if part for key, x in part.items()}
        return {key: merged[key] for key in self._names.saved if key in merged}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of a state dict of the model, whole or this process's part of it.

        Raises FileError for keys that are missing or unknown, or of another shape.
        """
        holdings.load_state_dict(self.state_dict(), state, known=self._names.saved)

    def save(
        self,
        directory: str | Path,
        *,
        optimizer: Optimizer | None = None,
        scheduler: Scheduler | None = None,
        progress: Mapping[str, Plain] | None = None,
    ) -> Path:
        """Write a checkpoint, `directory`/step-N, that any plan for the same model can go on from;
        every rank must call it.

        It holds parameters and buffers, the states of optimizer, scheduler and torch's generator, the number of steps
        taken, and `progress` (plain values, such as the position in the data). It is there whole or not at all. Raises
        RunError, on every rank, where it cannot be written; earlier checkpoints then stay as they are.
        """
        self.whereabouts.enter_action("saving")
        known = {"gplan.steps": self.num_steps, "gplan.seed": self._draws.run_seed, _BATCH_SIZE: self._batch_size}
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
    ) -> dict[str, Plain]:
        """Go on from a checkpoint, or from the newest whole one in a folder, that was saved with this or another plan.

        Parameters, buffers and what else is given are set in place, and random numbers continue as they would have.
        Returns the `progress` that was saved. A warning says where newer ones are damaged, and where it was saved with
        mini-batches of another size. Raises FileError where there is no whole checkpoint of this model; without
        `must_exist` a path at which there is none at all, as at a job's first start, changes nothing and has no
        progress.
        """
        loaded = self.restore(path, optimizer=optimizer, scheduler=scheduler, must_exist=must_exist)
        if loaded is None:
            return {}
        was, now = loaded.batch_size, self._batch_size
        told = [loaded.note] if loaded.note else []
        if was not in (None, now):
            told.append(
                f"{loaded.path} was saved with mini-batches of {was} samples, the plan has {now}: data that are counted in "
                "steps go on elsewhere"
            )
        if told and (self.ranks is None or dist.get_rank() == 0):
            warnings.warn("; ".join(told), stacklevel=2)
        return loaded.progress

    def restore(
        self, path: str | Path, *, optimizer: Optimizer | None, scheduler: Scheduler | None, must_exist: bool = True
    ) -> Loaded | None:
        """The same, but what there is to say of the checkpoint is returned with it."""
        self.whereabouts.enter_action("restoring")
        group = dist.group.WORLD if self.ranks is not None else None
        if not must_exist and not is_there(Path(path), group=group):
            return None
        loaded = load_checkpoint(Path(path), self._state(optimizer, scheduler), digest=self._digest, group=group)
        self.num_steps = int(loaded.progress.pop("gplan.steps"))
        self._draws.run_seed = int(loaded.progress.pop("gplan.seed"))
        size = loaded.progress.pop(_BATCH_SIZE, None)
        return replace(loaded, batch_size=None if size is None else int(size))

    def _state(self, optimizer: Optimizer | None, scheduler: Scheduler | None) -> State:
        return State(
            model=self.state_dict(),
            parameters={name: x for name, x in self.named_parameters() if x.requires_grad},
            optimizers=[] if optimizer is None else [optimizer],
            schedulers=[] if scheduler is None else [scheduler],
            stages=() if self.ranks is None else self.ranks.stages,
        )

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._draws.device
