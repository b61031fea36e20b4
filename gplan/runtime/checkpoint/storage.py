"""Keys and values in torch.distributed.checkpoint (DCP), the only module that writes and reads with it.

A key is a path such as ("model", "0.weight"), the nested layout that torch's own tools rebuild. torch's planner
would derive these paths itself, but it turns numeric keys into text (a scheduler's milestones) and drops empty
containers; here each value that is not a tensor is one object.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner

from gplan.core.errors import FileError, GplanError, RunError, UsageError
from gplan.core.units import bytes_text
from gplan.runtime.checkpoint.collective import RankGroup, lost_peer
from gplan.runtime.checkpoint.folder import DamagedError, note_checksum, publish, read_index
from gplan_profiler.model.error_location import describe

Key: TypeAlias = tuple[str | int, ...]


def write_checkpoint(content: Mapping[Key, object], part: Path, final: Path, *, ranks: RankGroup) -> None:
    """Write the content of all ranks into `part` and rename it to `final` when all have written.

    Of a key on several ranks the lowest rank's value is written. Raises RunError on every rank if it failed on one;
    `part` may then be left.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a process that saves alone
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

        Reads only these. Raises FileError for values other than tensors and plain ones, as to load them could run code.
        """
        values: dict[str, Any] = {_dotted(key): value for key, value in wanted.items()}
        planner = _PlainPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a process that loads alone
            try:
                state_dict_loader.load(
                    values, storage_reader=_Reader(self.path, self._index), planner=planner, no_dist=True
                )
            except CheckpointException as error:
                raise DamagedError(f"{self.path} cannot be read: {_first_failure(error)}") from error
        return {key: values[_dotted(key)] for key in wanted}


class _Reader(FileSystemReader):
    """Reads with an index that was checked; torch would unpickle it again, whatever it holds."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:
        return self._index


class _PlainPlanner(DefaultLoadPlanner):
    """Loads tensors and plain values only."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise FileError(
                f"{name} holds more than tensors and plain values, and to load it could run code"
            ) from error


def check_plain(value: object, *, what: str) -> None:
    """Raise UsageError for a value that `CheckpointReader.read` would not load."""
    content = BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except Exception as error:
        first = str(error).split("Unsupported")[-1].splitlines()[0].strip(" :")
        raise UsageError(
            f"{what} holds values that a checkpoint cannot keep ({first}); expected numbers, text, tensors, lists and dicts"
        ) from error


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
            written = super().write_data(plan, planner)
            for name in {x.storage_data.relative_path for x in written.wait()}:
                note_checksum(Path(self.path) / name)
            return written
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


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))
