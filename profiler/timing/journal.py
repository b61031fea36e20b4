"""A journal file from which an interrupted profile continues.

The key of a journal covers the model, the options and the machine; a file with another key is ignored. The file is
removed when the profile is complete.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from gplan.core.errors import FileError, GplanError
from gplan.files.json_files import write_bytes
from profiler.timing.clock import Samples

_FORMAT = "gplan.journal/6"
_SAVE_EVERY_S = 5.0


class Journal:
    """Samples and values by name; in memory only if `path` is None."""

    def __init__(self, path: Path | None, *, key: str) -> None:
        self._path, self._key = path, key
        self._samples: dict[str, Samples] = {}
        self._values: dict[str, Any] = {}
        self._saved_s = time.monotonic()
        self.num_resumed = 0  # samples read from the file
        if path is not None:
            self._read(path)

    def samples(self, name: str) -> Samples:
        """The samples of this name, to be added to."""
        return self._samples.setdefault(name, Samples())

    def value(self, name: str) -> Any:
        """The value of this name as plain JSON values, or None."""
        return self._values.get(name)

    def keep(self, name: str, value: object) -> None:
        """Set a value; it is in the file after the next save."""
        self._values[name] = msgspec.to_builtins(value)

    def save_now_and_then(self) -> None:
        """Save if the last save is more than 5 s ago."""
        if time.monotonic() - self._saved_s > _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the journal atomically."""
        if self._path is not None and (self._samples or self._values):
            content = {"format": _FORMAT, "key": self._key, "samples": self._samples, "values": self._values}
            write_bytes(self._path, msgspec.json.encode(content))
            self._saved_s = time.monotonic()

    @property
    def notes(self) -> tuple[str, ...]:
        """A note that the measurement continued an interrupted one, if it did."""
        if not self.num_resumed:
            return ()
        return (f"continued an interrupted profile, which had {self.num_resumed} samples",)

    @contextmanager
    def saved_on_failure(self) -> Iterator[None]:
        """If the block fails or is interrupted, save the journal and name it in the error."""
        try:
            yield
        except (GplanError, KeyboardInterrupt) as error:
            self.save()
            if not self or self._path is None:
                raise
            kept = f"the measurements so far are kept in {self._path}: run again to continue"
            raise type(error)("; ".join(filter(None, (str(error), kept)))) from error

    def close(self) -> None:
        """Remove the file; the profile is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self._samples or self._values)

    def _read(self, path: Path) -> None:
        try:
            content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            if content.get("format") != _FORMAT or content.get("key") != self._key:
                return
            self._samples = msgspec.convert(content["samples"], dict[str, Samples])
            self._values = content["values"]
        except FileNotFoundError:
            return
        except (OSError, KeyError, UnicodeDecodeError, msgspec.DecodeError) as error:
            raise FileError(f"{path}, the journal of an interrupted profile, cannot be read; remove it") from error
        self.num_resumed = sum(len(x.clean_s) + len(x.refused_s) for x in self._samples.values())
