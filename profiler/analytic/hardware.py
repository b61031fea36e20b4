"""Data sheets of devices that are not present, and the efficiencies that operations reach on them.

The built-in table, `hardware.toml`, names a source for every group of figures. The efficiencies are assumptions, which
profiler/analytic/roofline.py can calibrate with a measured profile. float32 products run as by torch's defaults: matrix
products on a GPU without TF32, convolutions with it where available; a TPU multiplies in bfloat16.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from gplan.core import Device, Link, OperationKind
from gplan.core.checks import check_not_negative, check_positive
from gplan.core.errors import FileError, UsageError

HardwareKind: TypeAlias = Literal["cuda", "tpu", "cpu"]
KINDS: tuple[OperationKind, ...] = get_args(OperationKind)
PRODUCTS: tuple[OperationKind, ...] = ("matmul", "convolution", "attention")
"""Kinds whose peak depends on the dtype; all others use the peak of float32."""

_LEAST_FLOPS_PER_S = 1e9  # lower numbers are probably in another unit
_LEAST = {"bytes_per_s": 1e8, "link.bytes_per_s": 1e6, "memory_bytes": 1e6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The shares of the peak flop rate and of the memory bandwidth that operations of one kind reach."""

    kind: OperationKind
    flops: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_positive(self, "flops", "bandwidth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device and its link to a neighbour."""

    name: str
    kind: HardwareKind
    memory_bytes: int | None  # None: no limit known
    bytes_per_s: float
    flops_per_s: tuple[tuple[str, float], ...]  # peak by dtype, and by "tf32"
    launch_s: float  # to start one operation
    link: Link
    efficiencies: tuple[Efficiency, ...]  # one for every kind of operation
    sources: tuple[tuple[str, str], ...]  # where the figures come from, by group

    def __post_init__(self) -> None:
        check_positive(self, "bytes_per_s")
        check_not_negative(self, "launch_s")
        kinds = tuple(x.kind for x in self.efficiencies)
        if kinds != KINDS:
            raise ValueError(f"efficiencies are for {kinds}; expected {KINDS}")
        if "float32" not in dict(self.flops_per_s):
            raise ValueError(f"flops_per_s is for {[x for x, _ in self.flops_per_s]}; expected float32 among them")

    def efficiency(self, kind: OperationKind) -> Efficiency:
        """The efficiency of operations of a kind."""
        return self.efficiencies[KINDS.index(kind)]

    def peak_flops_per_s(self, kind: OperationKind, dtype: str) -> float:
        """The peak for operations of a kind on tensors of a dtype; raises UsageError where the device has none."""
        peaks = dict(self.flops_per_s)
        if kind not in PRODUCTS:
            return peaks["float32"]
        if kind == "convolution" and dtype == "float32" and "tf32" in peaks:
            return peaks["tf32"]
        if dtype not in peaks:
            known = ", ".join(peaks)
            raise UsageError(
                f"the model multiplies in {dtype}, for which {self.name} has no flop rate; it has {known}: use one of "
                "these dtypes, or describe the hardware in a file of your own"
            )
        return peaks[dtype]

    def device(self) -> Device:
        """The device of a profile."""
        return Device(name=self.name, kind=self.kind, memory_bytes=self.memory_bytes)


class _Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    flops: float
    bandwidth: float


class _LinkFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    latency_s: float
    bytes_per_s: float


class _Sources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory: str = "not given"
    flops: str = "not given"
    link: str = "not given"
    efficiency: str = "not given"


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device as in the table and in TOML files."""

    kind: HardwareKind
    bytes_per_s: float
    launch_s: float
    flops_per_s: dict[str, float]
    link: _LinkFigures
    efficiency: dict[OperationKind, _Shares]
    sources: _Sources = _Sources()
    memory_bytes: float | None = None


def hardware_names() -> tuple[str, ...]:
    """The names of the devices in the built-in table."""
    return tuple(_built_in())


def load_hardware(name_or_path: str) -> Hardware:
    """A device of the built-in table by its name, or of a TOML file with the same keys at its top level.

    Raises UsageError for a name that is not in the table, FileError for a file that does not describe a device.
    """
    table = _built_in()
    if name_or_path.lower() in table:
        return _hardware(table[name_or_path.lower()], name=name_or_path.lower(), place="the built-in table")
    path = Path(name_or_path)
    if path.suffix != ".toml":
        raise UsageError(
            f"no hardware is called {name_or_path}; expected {', '.join(table)}, or a TOML file such as mine.toml"
        )
    return _hardware(_parsed(path), name=path.stem, place=str(path))


def _built_in() -> dict[str, Any]:
    return tomllib.loads(resources.files("profiler.analytic").joinpath("hardware.toml").read_text(encoding="utf-8"))


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}; expected a TOML file of a device") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path} is not TOML: {error}; expected lines such as bytes_per_s = 3.35e12") from error


def _hardware(content: dict[str, Any], *, name: str, place: str) -> Hardware:
    try:
        entry = msgspec.convert(content, _Entry)
    except msgspec.ValidationError as error:
        raise FileError(
            f"{place} does not describe a device: {error}; see profiler/analytic/hardware.toml for the keys"
        ) from error
    _check(entry, place)
    return Hardware(
        name=name,
        kind=entry.kind,
        memory_bytes=None if entry.memory_bytes is None else int(entry.memory_bytes),
        bytes_per_s=entry.bytes_per_s,
        flops_per_s=tuple(entry.flops_per_s.items()),
        launch_s=entry.launch_s,
        link=Link(latency_s=entry.link.latency_s, bytes_per_s=entry.link.bytes_per_s),
        efficiencies=tuple(
            Efficiency(kind=x, flops=entry.efficiency[x].flops, bandwidth=entry.efficiency[x].bandwidth) for x in KINDS
        ),
        sources=tuple(msgspec.structs.asdict(entry.sources).items()),
    )


def _check(entry: _Entry, place: str) -> None:
    """Raise FileError for figures that are missing or probably in another unit."""
    missing = [kind for kind in KINDS if kind not in entry.efficiency]
    if missing:
        raise FileError(f"{place} has no efficiency.{missing[0]}; expected shares for {', '.join(KINDS)}")
    if "float32" not in entry.flops_per_s:
        raise FileError(f"{place} has no flops_per_s.float32; expected the peak by dtype, float32 among them")
    if entry.memory_bytes is None and entry.kind != "cpu":
        raise FileError(f"{place} has no memory_bytes; expected the memory of one device, such as 80e9")
    rates = {f"flops_per_s.{dtype}": value for dtype, value in entry.flops_per_s.items()}
    rates |= {"bytes_per_s": entry.bytes_per_s, "link.bytes_per_s": entry.link.bytes_per_s}
    for key, value in (rates | {"memory_bytes": entry.memory_bytes or _LEAST["memory_bytes"]}).items():
        least = _LEAST.get(key, _LEAST_FLOPS_PER_S)
        if not least <= value < float("inf"):
            raise FileError(
                f"{place}: {key} is {value:g}; expected {least:g} or more: bytes and flops, not GB or Tflop"
            )
    for key, value in (("launch_s", entry.launch_s), ("link.latency_s", entry.link.latency_s)):
        if not 0 <= value < 1:
            raise FileError(f"{place}: {key} is {value:g}; expected seconds from 0 to 1, such as 5e-6")
    for kind, shares in entry.efficiency.items():
        if not (0 < shares.flops <= 1 and 0 < shares.bandwidth <= 1):
            raise FileError(f"{place}: efficiency.{kind} is {shares}; expected shares above 0 and at most 1")
