"""Data sheets of devices that are not present, and the efficiencies that operations reach on them.

The built-in table, `hardware.toml`, names a source for every group of figures. The efficiencies are assumptions. float32 products run as by torch's defaults: matrix
products on a GPU without TF32, convolutions with it where available; a TPU multiplies in bfloat16.

A device may also have shares by the shape of a product (`shapes`), rates of named kernels (`kernels`) and rates of
collectives. `load_hardware` reads the table, and TOML or JSON files with the same
keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from gplan.core import Device, Link, OperationKind
from gplan.core.checks import check_not_negative, check_positive
from gplan.core.errors import FileError, UsageError
from gplan.core.units import MOST_OF_CARD, parse_link, parse_network
from gplan.files.machine_file import LinkTable, MessageTable
from gplan_profiler.analytic.shapes import AttentionShape, MatmulShape, Shape, ShapeTable

KernelName: TypeAlias = Literal["cross-entropy", "unfused-cross-entropy", "permute-forward", "permute-backward"]
"""Kernels whose rates may differ from those of their kind: cross-entropies, and how tokens go to experts and back."""

ExchangeKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

HardwareKind: TypeAlias = Literal["cuda", "tpu", "cpu"]
KINDS: tuple[OperationKind, ...] = get_args(OperationKind)
PRODUCTS: tuple[OperationKind, ...] = ("matmul", "convolution", "attention")
"""Kinds whose peak depends on the dtype; all others use the peak of float32."""

_LEAST_FLOPS_PER_S = 1e9  # lower numbers are probably in another unit
_LEAST_LINK = 1e6
_DEVICES_PER_NODE = 8
_MOST_SHARE = 2.0  # a causal attention that counts the whole square may reach twice the peak
_LEAST = {"bytes_per_s": 1e8, "memory_bytes": 1e6}
_SIZE_TOLERANCE = 0.1  # between the memory in a device's name and its bytes
# words beside a device's name
_NO_NAME = re.compile(r"nvidia|amd|geforce|tesla|instinct|google|sxm\d?|hbm\d?e?|oam|gpu|")
_TABLE: dict[str, Any] = msgspec.toml.decode(
    resources.files("gplan_profiler.analytic").joinpath("hardware.toml").read_text(encoding="utf-8")
)
_PARTS = ("flops_per_s", "link", "network", "efficiency", "collectives", "sources")  # whose values hold one by one
_USUAL_COLLECTIVES: dict[str, Any] = _TABLE["collectives"]


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shares of the peak flop rate and of the memory bandwidth that some operations reach."""

    flops: float
    bandwidth: float
    latency_s: float = 0.0  # of each operation, beside the bytes it moves


class CollectiveRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a collective reaches within a node."""

    share: float  # of the link's rate, by the bytes on the wire
    start_s: float = 0.0
    rank_s: float = 0.0  # for each further rank of the group


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device and its links: to a neighbour in its node, and over the network to a device of another node."""

    name: str
    kind: HardwareKind
    memory_bytes: int | None  # None: no limit known
    bytes_per_s: float
    flops_per_s: tuple[tuple[str, float], ...]  # peak by dtype, and by "tf32"
    launch_s: float  # to start one operation
    link: Link
    efficiencies: Mapping[OperationKind, Efficiency]  # one for every kind, in the order of KINDS
    sources: tuple[tuple[str, str], ...]  # where the figures come from, by group
    shapes: ShapeTable = field(default_factory=ShapeTable)  # shares by shape, in place of `efficiencies`
    kernels: Mapping[KernelName, Efficiency] = field(default_factory=dict)  # in place of those of their kind
    network: Link
    devices_per_node: int = _DEVICES_PER_NODE
    network_share: float = 1.0  # of the network's rate that collectives reach
    collectives: Mapping[ExchangeKind, CollectiveRate] = field(default_factory=dict)  # one for every kind

    def __post_init__(self) -> None:
        check_positive(self, "bytes_per_s")
        check_not_negative(self, "launch_s")
        if tuple(self.efficiencies) != KINDS:
            raise ValueError(f"efficiencies are for {tuple(self.efficiencies)}; expected {KINDS}")
        if "float32" not in dict(self.flops_per_s):
            raise ValueError(f"flops_per_s is for {[x for x, _ in self.flops_per_s]}; expected float32 among them")

    def efficiency(self, kind: OperationKind, kernel: KernelName | None = None) -> Efficiency:
        """The efficiency of a kernel where it has one of its own, else of operations of its kind."""
        own = self.kernels.get(kernel) if kernel else None
        return own or self.efficiencies[kind]

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


class _MatmulShare(MatmulShape, frozen=True, kw_only=True):
    flops: float  # the share


class _AttentionShare(AttentionShape, frozen=True, kw_only=True):
    flops: float  # the share


class _ShapeShares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    matmul: list[_MatmulShare] = []
    attention: list[_AttentionShare] = []

    @property
    def rows(self) -> list[tuple[Shape, float]]:
        """The shapes with their shares."""
        both = ((MatmulShape, self.matmul), (AttentionShape, self.attention))
        return [
            (kind(**{name: getattr(x, name) for name in kind.__struct_fields__}), x.flops)
            for kind, rows in both
            for x in rows
        ]


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
    link: LinkTable
    efficiency: dict[OperationKind, Efficiency]
    sources: _Sources = _Sources()
    memory_bytes: float | None = None
    shapes: _ShapeShares = _ShapeShares()
    kernels: dict[KernelName, Efficiency] = {}
    network: MessageTable | None = None  # None: as the link
    devices_per_node: int = _DEVICES_PER_NODE
    network_share: float | None = None  # None, and no collectives: those of the table's own entry "collectives"
    collectives: dict[ExchangeKind, CollectiveRate] = {}


def load_hardware(name_or_path: str) -> Hardware:
    """A device of the built-in table by its name, or of a TOML or JSON file with the same keys.

    Raises UsageError for a name that is not in the table, FileError for a file that does not describe a device.
    """
    table, name = hardware_table(), _table_name(name_or_path)
    if name in table:
        return described_hardware(table[name], name=name, place="the built-in table")
    path = Path(name_or_path)
    if path.suffix not in (".toml", ".json"):
        raise UsageError(
            f'no hardware is called {name_or_path}; expected {", ".join(table)}, or a file such as mine.toml, which may begin with like = "h100"'
        )
    kind = path.suffix[1:].upper()
    try:
        text = path.read_text(encoding="utf-8")
        content = msgspec.toml.decode(text) if kind == "TOML" else json.loads(text)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}; expected a {kind} file of a device") from error
    except ValueError as error:  # of both parsers
        raise FileError(f"{path} cannot be parsed as {kind}: {error}; expected keys such as bytes_per_s") from error
    if isinstance(content, dict):
        if (like := content.get("like", "h100")) not in list(table):
            raise FileError(f"{path} is like {like}, which is no device; expected one of {', '.join(table)}")
        try:
            content = _whole(content)
        except UsageError as error:  # of a link or a network as text
            raise FileError(f"{path}: {error}") from error
    return described_hardware(content, name=path.stem, place=str(path))


def _table_name(name: str) -> str:
    """A device's name as in the table, from that of a driver or a shop.

    >>> _table_name("NVIDIA A100-SXM4-80GB"), _table_name("RTX-4090"), _table_name("H100 PCIe")
    ('a100', 'rtx4090', 'h100-pcie')
    """
    words = [x for x in re.split(r"[^a-z0-9]+", name.lower()) if not _NO_NAME.fullmatch(x)]
    plain = "-".join(words).replace("rtx-a", "a").replace("rtx-", "rtx")
    sized, table = re.fullmatch(r"(.+)-(\d+)gb", plain), hardware_table()
    if sized and plain not in table and sized[1] in table:
        found = table[sized[1]].get("memory_bytes", 0) / 2**30
        return sized[1] if abs(found / int(sized[2]) - 1) < _SIZE_TOLERANCE else plain
    return plain


def hardware_table() -> dict[str, Any]:
    """The devices of the built-in table, hardware.toml."""
    return {name: _whole(entry) for name, entry in _TABLE.items() if name != "collectives"}


def _whole(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry with what it takes from the device that it is like, and a link or a network in text as a table.

    Raises UsageError for text that is none.
    """
    other = _whole(_TABLE[entry["like"]]) if "like" in entry else {}
    own = {key: value for key, value in entry.items() if key != "like"}
    given = own.get("devices_per_node", other.get("devices_per_node"))
    per_node = given if isinstance(given, int) and given > 0 else _DEVICES_PER_NODE
    for name, text in [(x, own[x]) for x in ("link", "network") if isinstance(own.get(x), str)]:
        parsed = parse_link(text) if name == "link" else parse_network(text, devices_per_node=per_node)
        own[name] = {"bytes_per_s": parsed[0], **({"latency_s": parsed[1]} if parsed[1] else {})}
    parts = {x: {**other.get(x, {}), **own[x]} for x in _PARTS if isinstance(own.get(x), dict)}
    return {**other, **own, **parts}


def described_hardware(content: dict[str, Any], *, name: str, place: str) -> Hardware:
    """The device that an entry of the table describes; `place` names its file in errors."""
    try:
        entry = msgspec.convert(content, _Entry)
    except msgspec.ValidationError as error:
        keys = ", ".join(("like", *_Entry.__struct_fields__))
        hosts = "; a file of hosts is for gplan balance --machine" if "host" in content else ""
        raise FileError(f"{place} does not describe a device: {error}; expected keys are {keys}{hosts}") from error
    _check(entry, place)
    try:
        link = entry.link.link()
        network = entry.network.link() if entry.network else replace(link, collectives=())
    except ValueError as error:
        raise FileError(f"{place}: {error}") from error
    return Hardware(
        name=name,
        kind=entry.kind,
        memory_bytes=None if entry.memory_bytes is None else int(entry.memory_bytes),
        bytes_per_s=entry.bytes_per_s,
        flops_per_s=tuple(entry.flops_per_s.items()),
        launch_s=entry.launch_s,
        link=link,
        efficiencies={kind: entry.efficiency[kind] for kind in KINDS},
        sources=tuple(msgspec.structs.asdict(entry.sources).items()),
        shapes=ShapeTable(dict(entry.shapes.rows)),
        kernels=entry.kernels,
        network=network,
        devices_per_node=entry.devices_per_node,
        network_share=_USUAL_COLLECTIVES["network_share"] if entry.network_share is None else entry.network_share,
        collectives={
            kind: entry.collectives.get(kind) or CollectiveRate(**_USUAL_COLLECTIVES[kind])
            for kind in get_args(ExchangeKind)
        },
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
    links: dict[str, MessageTable | None] = {"link": entry.link, "network": entry.network}
    if entry.devices_per_node < 1:
        raise FileError(f"{place}: devices_per_node is {entry.devices_per_node}; expected at least 1, such as 8")
    for name, rate in entry.collectives.items():
        if not (0 < rate.share <= _MOST_SHARE and 0 <= rate.start_s < 1 and 0 <= rate.rank_s < 1):
            raise FileError(f"{place}: collectives.{name} is {rate}; expected a share of the link and seconds below 1")
    links |= {f"link.collective.{x.kind}.{x.num_devices}": x.message for x in entry.link.collective}
    if few := [x for x in entry.link.collective if x.num_devices < 2]:
        raise FileError(f"{place}: num_devices of {few[0].kind} is {few[0].num_devices}; expected at least 2")
    rates |= {"bytes_per_s": entry.bytes_per_s}
    rates |= {f"{name}.bytes_per_s": link.bytes_per_s for name, link in links.items() if link}
    for key, value in (rates | {"memory_bytes": entry.memory_bytes or _LEAST["memory_bytes"]}).items():
        least = _LEAST_LINK if key.endswith(".bytes_per_s") else _LEAST.get(key, _LEAST_FLOPS_PER_S)
        if not least <= value < float("inf"):
            raise FileError(
                f"{place}: {key} is {value:g}; expected {least:g} or more: bytes and flops, not GB or Tflop"
            )
    if entry.network and entry.network.bytes_per_s > MOST_OF_CARD:
        found = entry.network.bytes_per_s
        raise FileError(
            f"{place}: network.bytes_per_s is {found:g}, more than any card has; if these are bits, write network = "
            f'"{found / 1e9:g}Gb/s"'
        )
    latencies = {f"{name}.latency_s": link.latency_s for name, link in links.items() if link}
    for key, value in ({"launch_s": entry.launch_s} | latencies).items():
        if not 0 <= value < 1:
            raise FileError(f"{place}: {key} is {value:g}; expected seconds from 0 to 1, such as 5e-6")
    for kind, shares in (entry.efficiency | entry.kernels).items():
        if not (0 < shares.flops <= 1 and 0 < shares.bandwidth <= 1):
            raise FileError(f"{place}: efficiency.{kind} is {shares}; expected shares above 0 and at most 1")
        if not 0 <= shares.latency_s < 1:
            raise FileError(f"{place}: latency_s of {kind} is {shares.latency_s:g}; expected seconds, such as 5e-6")
    for shape, share in entry.shapes.rows:
        if min(shape.sizes) < 1 or not 0 < share <= _MOST_SHARE:
            raise FileError(
                f"{place}: shapes has {shape} with flops {share:g}; expected sizes of 1 or more and flops, the share of the "
                f"peak, above 0 and at most {_MOST_SHARE:g}"
            )
