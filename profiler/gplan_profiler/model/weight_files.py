"""Read some weights from a checkpoint of a whole model: only their bytes are read, and nothing is memory-mapped.

Formats: safetensors (https://huggingface.co/docs/safetensors: 8 bytes with the length of a JSON header, the header, the
data), files of torch.save (a state_dict, or one under "state_dict" or "model"), and folders of Hugging Face transformers
with either, in one file or in several with an index. Offsets come from the header, or from the pickle without tensors.
"""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gplan.core.errors import FileError
from gplan.core.units import some_names

_INDEX = ".index.json"
_IN_FOLDERS = ("model.safetensors", f"model.safetensors{_INDEX}", "pytorch_model.bin", f"pytorch_model.bin{_INDEX}")
_STATE_KEYS = ("state_dict", "model")
_MOST_HEADER_BYTES = 100_000_000  # by the format
_SAVE_AGAIN = "save it with torch.save(model.state_dict(), path)"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Location:
    """The position of a tensor in a file, and its layout; strides in elements."""

    offset_bytes: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_weights(path: Path, names: Collection[str], *, what: str) -> dict[str, Tensor]:
    """The named tensors of a checkpoint file or folder, on the CPU in new memory; `what` is the model's name in errors.

    If the file has none of the names, but all of them with one prefix such as `module.`, those are read. Raises FileError
    for a path that is not a checkpoint and for missing names. Shapes are not checked.
    """
    files = _files(path)
    stored = _stored_names(files.keys(), list(names), path=path, what=what)
    found: dict[str, Tensor] = {}
    for file in dict.fromkeys(files[key] for key in stored.values()):
        locations = _locations(file)
        keys = {name: key for name, key in stored.items() if files[key] == file}
        with file.open("rb") as stream:
            found |= {name: _read(stream, locations.get(key), f"{key} of {file}") for name, key in keys.items()}
    return {name: found[name] for name in names}


def _files(path: Path) -> dict[str, Path]:
    """The file of each tensor of a checkpoint."""
    if path.is_dir():
        there = [path / name for name in _IN_FOLDERS if (path / name).is_file()]
        if not there:
            raise FileError(f"the folder {path} has no weights; expected one of {', '.join(_IN_FOLDERS)} in it")
        path = there[0]
    if not path.is_file():
        raise FileError(
            f"{path} is not there; expected a .safetensors file, a torch checkpoint or a folder with either"
        )
    if not path.name.endswith(_INDEX):
        return dict.fromkeys(_locations(path), path)
    try:
        index = json.loads(path.read_text())["weight_map"]
        return {name: path.parent / file for name, file in index.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(
            f'{path} is not an index of weights; expected JSON with a "weight_map" of names and files'
        ) from error


def _stored_names(stored: Collection[str], names: Sequence[str], *, path: Path, what: str) -> dict[str, str]:
    """The stored name of each name: itself, or itself with the one prefix that all have."""
    missing = [name for name in names if name not in stored]
    if not missing:
        return {name: name for name in names}
    if len(missing) == len(names):
        prefixes = [key.removesuffix(names[0]) for key in stored if key.endswith(f".{names[0]}")]
        fitting = [prefix for prefix in prefixes if all(prefix + name in stored for name in names)]
        if len(fitting) == 1:
            return {name: fitting[0] + name for name in names}
        if fitting:
            raise FileError(
                f"{path} has the weights of {what} with several prefixes, {some_names(fitting)}; save the wanted ones in a "
                "separate file"
            )
    raise FileError(
        f"{path} lacks {len(missing)} of {len(names)} weights of {what}: {some_names(missing)}; it has {some_names(stored)}; expected "
        "the state_dict of that model"
    )


def _locations(file: Path) -> Mapping[str, _Location]:
    """The locations of the tensors in one file."""
    try:
        return _locations_in_safetensors(file) if file.suffix == ".safetensors" else _locations_in_torch_file(file)
    except OSError as error:
        raise FileError(f"{file} cannot be read: {error.strerror or error}") from error


def _locations_in_safetensors(file: Path) -> dict[str, _Location]:
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = stream.read(header_bytes) if header_bytes <= _MOST_HEADER_BYTES else b""
    try:
        entries: dict[str, Any] = json.loads(header)
        entries.pop("__metadata__", None)
        return {name: _described_location(entry, start=8 + header_bytes) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{file} is not a safetensors file; expected a header of names, shapes and offsets") from error


def _described_location(entry: Mapping[str, Any], *, start: int) -> _Location:
    shape = tuple(entry["shape"])
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    dtype = _DTYPES.get(entry["dtype"])
    return _Location(offset_bytes=start + entry["data_offsets"][0], dtype=dtype, shape=shape, strides=strides)


def _locations_in_torch_file(file: Path) -> dict[str, _Location]:
    with file.open("rb") as stream:  # raises where is_zipfile of a path would say no
        is_zip = zipfile.is_zipfile(stream)
    if not is_zip:
        raise FileError(f"{file} is neither a checkpoint of torch 1.6 or later nor a .safetensors file; {_SAVE_AGAIN}")
    try:
        saved = torch.load(file, map_location="meta", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise FileError(f"{file} contains objects other than weights, or is damaged; {_SAVE_AGAIN}") from error
    for key in _STATE_KEYS:
        if isinstance(saved, dict) and isinstance(saved.get(key), dict):
            saved = saved[key]
    tensors = {name: x for name, x in saved.items() if isinstance(x, Tensor)} if isinstance(saved, dict) else {}
    if not tensors:
        raise FileError(f"{file} has a {type(saved).__name__} without weights by name; {_SAVE_AGAIN}")
    return {
        name: _Location(  # torch.load notes offsets for every zip file
            offset_bytes=x.untyped_storage()._checkpoint_offset + int(x.storage_offset()) * x.itemsize,  # type: ignore[operator]
            dtype=x.dtype,
            shape=tuple(x.shape),
            strides=x.stride(),
        )
        for name, x in tensors.items()
    }


def _read(stream: BinaryIO, location: _Location | None, what: str) -> Tensor:
    if location is None:
        raise FileError(f"there is no {what}, which its index lists; the checkpoint is damaged")
    if location.dtype is None:
        raise FileError(f"{what} has an unsupported dtype; expected one of {', '.join(_DTYPES)}")
    ends = [(size - 1) * stride for size, stride in zip(location.shape, location.strides, strict=True)]
    num_elements = 0 if 0 in location.shape else 1 + sum(ends)  # with those in between of other tensors
    elements = torch.empty(num_elements, dtype=location.dtype)
    if elements.nbytes:
        stream.seek(location.offset_bytes)
        num_read = stream.readinto(memoryview(elements.view(torch.uint8).numpy()))  # type: ignore[arg-type, attr-defined]
        if num_read != elements.nbytes:
            raise FileError(f"{what} ends after {num_read} of {elements.nbytes} bytes; the file is incomplete")
    return elements.as_strided(location.shape, location.strides)
