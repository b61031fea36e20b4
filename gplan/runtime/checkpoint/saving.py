"""Saves a checkpoint: it is complete under its name or absent, and every rank learns which."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gplan.core.errors import GplanError, RunError, UsageError
from gplan.runtime.checkpoint.collective import LostPeerError, RankGroup
from gplan.runtime.checkpoint.folder import checkpoint_path, clean_directory, newest_complete, partial_path
from gplan.runtime.checkpoint.state import (
    FORMAT,
    Header,
    OptimizerState,
    PlainValue,
    RankRecord,
    RankState,
    class_names,
    optimizer_state,
)
from gplan.runtime.checkpoint.storage import Key, check_plain, write_checkpoint


def save_checkpoint(
    directory: Path,
    state: RankState,
    *,
    step: int,
    progress: Mapping[str, PlainValue],
    digest: str,
    group: dist.ProcessGroup | None,
) -> Path:
    """Write `directory/step-000120`, replacing one of the same step; return its path. Collective.

    All ranks of `group` use the same directory on a shared file system; with `group` None this process saves alone.
    Raises RunError on every rank if it failed on one: the attempt is removed and earlier checkpoints stay. Raises
    UsageError for optimizers that cannot be saved.
    """
    ranks = RankGroup(group=group, stages=state.stages)
    final = checkpoint_path(directory, step)
    states: list[OptimizerState] = []

    def prepare() -> tuple[RankRecord, dict[str, list[str]], str]:
        """What the ranks exchange before they write: records, classes, and a token for the folder's temporary name."""
        if ranks.rank == 0:
            clean_directory(directory)
        states.extend(optimizer_state(optimizer, state.parameters) for optimizer in state.optimizers)
        record = RankRecord(
            groups=[[_without_numpy(group) for group in groups] for _, groups in states],
            schedulers=[_without_numpy(scheduler.state_dict()) for scheduler in state.schedulers],
            random=torch.random.get_rng_state(),
        )
        check_plain(record["groups"], what="the optimizer")
        check_plain(record["schedulers"], what="the scheduler")
        for by_parameter, _ in states:
            entries = ((x, y) for values in by_parameter.values() for x, y in values.items())
            check_plain({x: y for x, y in entries if not isinstance(y, torch.Tensor)}, what="the optimizer")
        classes = {"optimizers": class_names(state.optimizers), "schedulers": class_names(state.schedulers)}
        return record, classes, uuid.uuid4().hex

    part: Path | None = None
    try:
        records, of_ranks, tokens = zip(*ranks.run_on_all(prepare), strict=True)
        first = of_ranks[0]
        for rank, own in enumerate(of_ranks):  # they are saved by index
            for what in first:
                if own[what] != first[what]:
                    raise UsageError(
                        f"rank 0 has the {what} {first[what]}, rank {rank} has {own[what]}; make the same on all ranks"
                    )
        part = partial_path(final, tokens[0])
        content: dict[Key, object] = {("model", name): tensor for name, tensor in state.model.items()}
        for index, (by_parameter, _) in enumerate(states):
            for name, entries in by_parameter.items():
                content |= {("optimizers", index, "state", name, key): value for key, value in entries.items()}
        if ranks.rank == 0:  # the others' values of these keys would not be written
            header = Header(
                format=FORMAT,
                digest=digest,
                step=step,
                optimizers=first["optimizers"],
                schedulers=first["schedulers"],
            )
            content |= {("gplan",): header, ("progress",): dict(progress), ("ranks",): list(records)}
        write_checkpoint(content, part, final, ranks=ranks)
    except UsageError:
        raise
    except GplanError as error:
        attempt = part

        def remove() -> None:
            if attempt is not None and ranks.rank == 0:
                shutil.rmtree(attempt, ignore_errors=True)

        if isinstance(error, LostPeerError):
            remove()
        else:
            with suppress(RunError):
                ranks.run_on_all(remove)  # all ranks wait for it
        last = newest_complete(directory)
        left = f"no earlier one is in {directory}" if last is None else f"the last complete one is {last}"
        raise RunError(
            f"the checkpoint of step {step} was not saved: {error}; {left}"
        ) from None  # torch's own error repeats it in forty lines
    return final


def _without_numpy(value: dict[str, Any]) -> dict[str, Any]:
    """The values with numpy's numbers, such as a learning rate, as plain ones."""
    return {name: x.item() if isinstance(x, np.generic) else x for name, x in value.items()}
