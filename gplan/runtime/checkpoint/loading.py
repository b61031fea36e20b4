"""Loads a checkpoint into the ranks of any plan for the same model; each rank reads only its own part."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gplan.core.errors import FileError
from gplan.core.units import counted, some_names
from gplan.runtime.checkpoint.collective import RankGroup
from gplan.runtime.checkpoint.folder import ADVICE, DamagedError, has_checkpoint, list_checkpoints, verify_checksums
from gplan.runtime.checkpoint.state import (
    FORMAT,
    Header,
    PlainValue,
    RankRecord,
    RankState,
    class_names,
    equal_values,
    group_names,
    load_optimizer_state,
)
from gplan.runtime.checkpoint.storage import CheckpointReader, Key
from gplan.runtime.sharded_tensors import local_tensor, with_part


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What one rank holds: the keys of its part of the model, and the parameters of each optimizer's groups."""

    model: tuple[str, ...]
    groups: tuple[tuple[tuple[str, ...], ...], ...]

    @classmethod
    def of(cls, state: RankState) -> _Names:
        rows = [group_names(optimizer, state.parameters) for optimizer in state.optimizers]
        groups = tuple(tuple(tuple(x for x in row if x is not None) for row in optimizer) for optimizer in rows)
        return cls(model=tuple(state.model), groups=groups)

    def trained(self, optimizer: int) -> set[str]:
        return {name for row in self.groups[optimizer] for name in row}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """The result of loading."""

    progress: dict[str, PlainValue]  # as it was saved
    path: Path  # of the checkpoint
    note: str = ""  # why it is not the newest one, and which of the run's own values it replaces
    batch_size: int | None = None  # of the plan that saved it; None if unknown


def checkpoint_exists(path: Path, *, group: dist.ProcessGroup | None) -> bool:
    """Whether any rank of `group` sees a checkpoint, complete or damaged. Collective."""
    return any(RankGroup(group=group).run_on_all(lambda: has_checkpoint(path)))


def load_checkpoint(path: Path, state: RankState, *, digest: str, group: dist.ProcessGroup | None) -> LoadedCheckpoint:
    """Load model, optimizers, schedulers and random state of a rank from a checkpoint. Collective.

    `path` is a checkpoint, or a folder whose newest complete one is used; if any rank finds damage, all ranks fall
    back to an older one. The random state is the rank's own if as many ranks saved, else rank 0's. Raises FileError
    on every rank if all checkpoints are damaged, or if the newest complete one is of another model or optimizer; the
    state may then be partly loaded.
    """
    ranks = RankGroup(group=group, stages=state.stages)
    everyone = ranks.run_on_all(lambda: _Names.of(state))
    restored = partial(_restored, state=state, everyone=everyone, digest=digest, rank=ranks.rank)
    damages: list[str] = []
    for candidate in ranks.run_on_all(lambda: list_checkpoints(path))[0]:
        try:
            ranks.run_on_all(partial(verify_checksums, candidate, rank=ranks.rank, num_ranks=len(everyone)))
            found = ranks.run_on_all(partial(restored, candidate))
        except DamagedError as error:
            damages.append(str(error))
            continue
        found_damaged = "; ".join(x.removesuffix(ADVICE) for x in damages)
        notes = [f"{found_damaged}; going on from {candidate}"] if damages else []
        if replaced := list(dict.fromkeys(x for _, own in found for x in own)):
            notes.append(f"the optimizer goes on with values of {candidate}: {'; '.join(replaced)} as made now")
        return LoadedCheckpoint(progress=found[0][0], path=candidate, note="; ".join(notes))
    if len(damages) == 1:
        raise DamagedError(damages[0])
    others = counted(len(damages) - 1, "older one")
    raise DamagedError(
        f"{damages[0].removesuffix(ADVICE)}; none is left to go on from, as {others} cannot be used either"
    )


def _restored(
    path: Path, *, state: RankState, everyone: Sequence[_Names], digest: str, rank: int
) -> tuple[dict[str, PlainValue], list[str]]:
    """Restore this rank; return the progress and the hyperparameters that the checkpoint replaced."""
    saved = CheckpointReader(path)
    _check_origin(saved, state, digest=digest)
    facts = saved.read({("ranks",): None, ("progress",): None})
    records: list[RankRecord] = facts["ranks",]
    _check_holdings(saved, records, everyone)
    for name, tensor in state.model.items():
        was = saved.empty(("model", name))
        if was is None or (was.shape, was.dtype) != (tensor.shape, tensor.dtype):
            found = "no tensor" if was is None else _form(was)
            raise FileError(f"{saved.path} has {found} for {name}; the model has {_form(tensor)}")
    saved.read({("model", name): tensor.detach() for name, tensor in state.model.items()})
    replaced: list[str] = []
    for index in range(len(state.optimizers)):
        replaced += _restore_optimizer(saved, state, index, everyone[rank].trained(index), records)
    states = _scheduler_states(saved, records, everyone[rank])
    for scheduler, values in zip(state.schedulers, states, strict=True):
        scheduler.load_state_dict(values)
    torch.random.set_rng_state(records[rank if len(records) == len(everyone) else 0]["random"])
    return cast("dict[str, PlainValue]", facts["progress",]), replaced


def _check_origin(saved: CheckpointReader, state: RankState, *, digest: str) -> None:
    header: Header | None = saved.read({("gplan",): None})["gplan",] if ("gplan",) in saved.keys else None
    if header is None or header["format"] != FORMAT:
        found = "no format line" if header is None else f"format {header['format']!r}"
        raise FileError(f"{saved.path} has {found}; expected {FORMAT!r}, a checkpoint that gplan saved")
    if header["digest"] != digest:
        _check_precision(saved, state)
        raise FileError(
            f"{saved.path} is of a model with digest {header['digest']}, this one has {digest}; build the model "
            "with the settings, and make its profile with the --precision, of that training, or use a checkpoint of this model"
        )
    for what, was, now in (
        ("optimizers", header["optimizers"], class_names(state.optimizers)),
        ("schedulers", header["schedulers"], class_names(state.schedulers)),
    ):
        if was != now:
            raise FileError(f"{saved.path} was saved with the {what} {was}, the run has {now}; make the same ones")


def _check_precision(saved: CheckpointReader, state: RankState) -> None:
    """Raise FileError where the parameters are those of this model, stored in another dtype."""
    found = {name: saved.empty(("model", name)) for name in state.parameters if ("model", name) in saved.keys}
    pairs = [(was, state.parameters[name]) for name, was in found.items() if was is not None]
    if not pairs or len(pairs) != len(state.parameters) or any(was.shape != now.shape for was, now in pairs):
        return
    before, after = (sorted({str(x.dtype).removeprefix("torch.") for x in side}) for side in zip(*pairs, strict=True))
    if before != after:
        raise FileError(
            f"{saved.path} holds parameters in {' and '.join(before)}, this plan trains in {' and '.join(after)}: the precision "
            "differs; go on with a plan whose profile has the precision of the checkpoint (gplan profile --precision)"
        )


def _check_holdings(saved: CheckpointReader, records: Sequence[RankRecord], everyone: Sequence[_Names]) -> None:
    """All ranks together must hold exactly what the checkpoint holds."""
    held = {key for names in everyone for key in names.model}
    _check_same_names({str(key[1]) for key in saved.keys if key[0] == "model"}, held, of=saved, what="the model")
    for index in range(len(everyone[0].groups)):
        was = {name for record in records for group in record["groups"][index] for name in group["params"]}
        now = {name for names in everyone for name in names.trained(index)}
        _check_same_names(was, now, of=saved, what=f"optimizer {index}")


def _check_same_names(was: Collection[str], now: Collection[str], *, of: CheckpointReader, what: str) -> None:
    lacking, unknown = sorted({*now} - {*was}), sorted({*was} - {*now})
    if lacking:
        raise FileError(f"{of.path} lacks {counted(len(lacking), 'tensor')} of {what} ({some_names(lacking)})")
    if unknown:
        raise FileError(
            f"{of.path} holds {counted(len(unknown), 'tensor')} that {what} has not ({some_names(unknown)})"
        )


def _restore_optimizer(
    saved: CheckpointReader, state: RankState, index: int, names: Collection[str], records: Sequence[RankRecord]
) -> list[str]:
    wanted: dict[Key, Tensor | None] = {}
    for key in saved.keys:
        if key[:3] != ("optimizers", index, "state") or key[3] not in names:
            continue
        empty, parameter = saved.empty(key), state.parameters[str(key[3])]
        wanted[key] = None if empty is None else torch.empty_like(empty, device="cpu")
        if empty is not None and empty.shape == parameter.shape:  # laid out and divided like its parameter
            part = torch.empty_like(local_tensor(parameter), dtype=empty.dtype, device="cpu", requires_grad=False)
            wanted[key] = with_part(part, like=parameter)
    entries: dict[str, dict[str, Any]] = {}
    for key, value in saved.read(wanted).items():
        entries.setdefault(str(key[3]), {})[str(key[4])] = value
    groups = [record["groups"][index] for record in records]
    return load_optimizer_state(state.optimizers[index], state.parameters, entries, groups)


def _scheduler_states(saved: CheckpointReader, records: Sequence[RankRecord], own: _Names) -> list[dict[str, Any]]:
    """Return the state that all ranks had, or, if they differ, that of a rank with the same param groups."""
    states = [record["schedulers"] for record in records]
    if all(equal_values(other, states[0]) for other in states):
        return states[0]
    mine = [[list(row) for row in rows] for rows in own.groups]
    for record in records:
        if [[group["params"] for group in groups] for groups in record["groups"]] == mine:
            return record["schedulers"]
    raise FileError(
        f"{saved.path} has schedulers that differ from rank to rank, and no rank had this one's param groups; go on with "
        "the plan that saved it, or make as many groups on every rank"
    )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
