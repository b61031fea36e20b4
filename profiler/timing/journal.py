"""What has been measured so far, kept in a file, so that an interrupted profile goes on where it was.

The journal belongs to one model, one way of measuring and one machine, told by its key; a file with another key is not
read. It is gone when the profile is whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from gplan.core.errors import FileError, GplanError
from gplan.files.json_files import write_bytes
from profiler.timing.clock import Samples

# MERGED profiler/timing/journal.py
# How work that takes long says where it is.


Progress: TypeAlias = Callable[[str, float], None]
"""Called with what is being done and the share that is done, 0 to 1."""


def silent(_text: str, _share: float) -> None:
    """Tells nobody."""


def part(progress: Progress, index: int, count: int) -> Progress:
    """Progress of one part of several that take as long."""
    return lambda text, share: progress(text, (index + share) / count)


_FORMAT = "gplan.journal/1"
_SAVE_EVERY_S = 5.0


class Journal:
    """Samples and finished values by name; kept in memory only where no path is given."""

    def __init__(self, path: Path | None, *, key: str) -> None:
        self._path, self._key = path, key
        self._samples: dict[str, Samples] = {}
        self._values: dict[str, Any] = {}
        self._saved_s = time.monotonic()
        self.num_resumed = 0  # samples that were found in the file
        if path is not None:
            self._read(path)

    def samples(self, name: str) -> Samples:
        """The samples of that name, which may be added to."""
        return self._samples.setdefault(name, Samples())

    def value(self, name: str) -> Any:
        """What was kept under that name, as plain JSON values, or None."""
        return self._values.get(name)

    def keep(self, name: str, value: object) -> None:
        """Keep a value, a noun or plain values; it is in the file after the next save."""
        self._values[name] = msgspec.to_builtins(value)

    def save_now_and_then(self) -> None:
        """Save if the last time is some seconds ago."""
        if time.monotonic() - self._saved_s > _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write all of it, whole or not at all."""
        if self._path is not None and (self._samples or self._values):
            content = {"format": _FORMAT, "key": self._key, "samples": self._samples, "values": self._values}
            write_bytes(self._path, msgspec.json.encode(content))
            self._saved_s = time.monotonic()

    @property
    def notes(self) -> tuple[str, ...]:
        """That a measurement went on, where it did."""
        if not self.num_resumed:
            return ()
        return (f"went on from an interrupted profile, which left {self.num_resumed} samples",)

    @contextmanager
    def saved_on_failure(self) -> Iterator[None]:
        """Where the block fails or is interrupted, what was measured is saved, and the error says so."""
        try:
            yield
        except (GplanError, KeyboardInterrupt) as error:
            self.save()
            if not self or self._path is None:
                raise
            kept = f"what was measured until then is kept in {self._path}: run again to go on"
            raise type(error)("; ".join(filter(None, (str(error), kept)))) from error

    def close(self) -> None:
        """The profile is whole: the file is removed."""
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
        except (OSError, KeyError, msgspec.DecodeError) as error:
            raise FileError(
                f"{path} holds what an interrupted profile measured and cannot be read; remove it"
            ) from error
        self.num_resumed = sum(len(x.clean_s) + len(x.refused_s) for x in self._samples.values())
