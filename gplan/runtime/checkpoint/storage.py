"""Keys and values in torch.distributed.checkpoint (DCP), the only module that writes and reads with it.

A key is a path such as ("model", "0.weight"), the nested layout that torch's own tools rebuild. torch's planner
would derive these paths itself, but it turns numeric keys into text (a scheduler's milestones) and drops empty
containers; here each value that is not a tensor is one object.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.serialization import get_crc32_options, set_crc32_options

from gplan.core.errors import FileError, GplanError, RunError
from gplan.core.units import bytes_text
from gplan.runtime.checkpoint.collective import RankGroup, lost_peer
from gplan.runtime.checkpoint.folder import DamagedError, byte_ranges, publish, read_index, verify_checksums
from profiler.model.error_location import describe

Key: TypeAlias = tuple[str | int, ...]


def write_checkpoint(content: Mapping[Key, object], part: Path, final: Path, *, ranks: RankGroup) -> None:
    """Write the content of all ranks into `part` and rename it to `final` when all have written.

    Of a key on several ranks the lowest rank's value is written. Raises RunError on every rank if it failed on one;
    `part` may then be left.
    """
    with _without_warnings(), _with_checksums():
        try:
            state_dict_saver.save(
                {_dotted(key): value for key, value in content.items()},
                storage_writer=_Writer(part, final, place=ranks.place),
                planner=_Planner({_dotted(key): key for key in content}),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
        except CheckpointException as error:
            raise _first_failure(error) from error
        except RuntimeError as error:
            raise lost_peer(error, place=ranks.place) from error


class CheckpointReader:
    """A checkpoint opened for reading; raises FileError if it is none or incomplete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._index = read_index(path)
        self.keys: frozenset[Key] = frozenset((self._index.planner_data or {}).values())

    def empty(self, key: Key) -> Tensor | None:
        """Return a meta tensor of a key's shape and dtype; None if its value is not a tensor."""
        found = self._index.state_dict_metadata[_dotted(key)]
        if not isinstance(found, TensorStorageMetadata):
            return None
        return torch.empty(found.size, dtype=found.properties.dtype, device="meta")

    def read(self, wanted: Mapping[Key, Tensor | None]) -> dict[Key, Any]:
        """Return the values of some keys; tensors are filled in place.

        Reads only these; raises FileError if their bytes changed since they were written.
        """
        values: dict[str, Any] = {_dotted(key): value for key, value in wanted.items()}
        verify_checksums(self.path, (span for span in byte_ranges(self._index) if span.key in values))
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _without_warnings():
            try:
                state_dict_loader.load(
                    values, storage_reader=FileSystemReader(self.path), planner=planner, no_dist=True
                )
            except CheckpointException as error:
                raise DamagedError(f"{self.path} cannot be read: {_first_failure(error)}") from error
        return {key: values[_dotted(key)] for key in wanted}


class _Planner(DefaultSavePlanner):
    """Writes values as given, under given paths."""

    def __init__(self, paths: dict[str, Key]) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._paths = paths

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: object = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.mappings, self.is_coordinator = state_dict, self._paths, is_coordinator


class _Writer(FileSystemWriter):
    """Explains failed writes, and publishes the folder as its last act, so that all ranks learn the outcome."""

    def __init__(self, part: Path, final: Path, *, place: str) -> None:
        super().__init__(part)
        self._final, self._place = final, place

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        num_bytes = sum(item.tensor_storage_size() or 0 for item in plan.items)
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            what = f"{self._place} could not write its {bytes_text(num_bytes)} to {self._final.parent}"
            raise RunError(f"{what}: {_reason(error)}; mend that or save elsewhere") from error

    def finish(self, metadata: Any, results: Any) -> None:
        try:
            super().finish(metadata, results)
            publish(Path(self.path), self._final)
        except (OSError, FileError) as error:
            what = f"{self._place} could not complete it in {self._final.parent}"
            raise RunError(f"{what}: {_reason(error)}; mend that or save elsewhere") from error


def _first_failure(error: CheckpointException) -> GplanError:
    """Return the error of the lowest rank that failed; an interrupt is raised as it is."""
    rank = min(error.failures)
    cause = error.failures[rank][0]
    if not isinstance(cause, Exception):
        raise cause
    return cause if isinstance(cause, GplanError) else RunError(f"rank {rank}: {_reason(cause)}")


def _reason(error: BaseException) -> str:
    """Return the operating system's message if there is one; torch.save wraps it."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return behind.strerror
        behind = behind.__cause__ or behind.__context__
    return str(error) if isinstance(error, GplanError) else describe(error)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide torch's warning about a process that saves or loads alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@contextmanager
def _with_checksums() -> Iterator[None]:
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(before)


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))
