"""Seconds and bytes to text and back: the only module that formats or parses a number with a unit.

Inside gplan every duration is in seconds and every size in bytes; text such as "1.2 ms" or "3.4 GiB" exists only here.
The present time as text is here too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from decimal import Decimal
from typing import Literal, TypeAlias, TypeVar

from gplan.core.checks import INTEGER, RATE, SECONDS, Bounds, Sharding
from gplan.core.errors import UsageError

NumberT = TypeVar("NumberT", int, float)
UnitKind: TypeAlias = Literal["seconds", "bytes", "share", "samples_per_s"]
"""What a number counts."""

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_SCALES_OF_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
_BYTES_PER_UNIT = {
    "": 1, "b": 1,
    "k": 1024, "kib": 1024, "m": 1024**2, "mib": 1024**2, "g": 1024**3, "gib": 1024**3, "t": 1024**4, "tib": 1024**4,
    "pib": 1024**5,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
}  # fmt: skip
_SECONDS_PER_UNIT = {"": "1", "s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "ns": "1e-9"}


def seconds_text(seconds: float) -> str:
    """Three significant digits and a unit.

    >>> seconds_text(0.00123), seconds_text(12.3456), seconds_text(0.0), seconds_text(7.5e-7)
    ('1.23 ms', '12.3 s', '0 s', '0.75 µs')
    """
    if seconds == 0:
        return "0 s"
    unit, scale = next((x for x in _SCALES_OF_SECONDS if abs(seconds) >= 0.9995 * x[1]), _SCALES_OF_SECONDS[-1])
    return f"{_three_digits(seconds / scale)} {unit}"


def bytes_text(num_bytes: float) -> str:
    """Three significant digits and a binary unit.

    >>> bytes_text(512), bytes_text(3 * 2**20), bytes_text(17.25 * 2**30)
    ('512 B', '3.00 MiB', '17.2 GiB')
    """
    size, unit = _scaled(num_bytes, 1024, _BINARY)
    return f"{size:.0f} B" if unit == "B" else f"{_three_digits(size)} {unit}"


def memory_text(num_bytes: int) -> str:
    """The smallest `--memory` in whole MiB, or below one in bytes, that is enough for a size.

    >>> memory_text(374_096_115), memory_text(1000)
    ('--memory 357MiB', '--memory 1000B')
    """
    return f"--memory {math.ceil(num_bytes / 2**20)}MiB" if num_bytes >= 2**20 else f"--memory {num_bytes}B"


def some_names(names: Collection[str], *, most: int = 3) -> str:
    """The first names as a list in words, and how many more there are.

    >>> some_names("abc"), some_names("abcde"), some_names([])
    ('a, b and c', 'a, b, c and 2 more', 'none')
    """
    shown = list(names)[:most] or ["none"]
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    *first, last = shown
    return f"{', '.join(first)} and {last}" if first else last


def now_text() -> str:
    """The present time in ISO 8601, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def percent_text(share: float, *, signed: bool = False) -> str:
    """A share as a percentage with one decimal.

    >>> percent_text(0.1234), percent_text(0.05, signed=True), percent_text(-0.0001, signed=True)
    ('12.3 %', '+5.0 %', '+0.0 %')
    """
    percent = round(100 * share, 1) + 0.0  # adding 0.0 makes 0.0 of -0.0
    return f"{percent:+.1f} %" if signed else f"{percent:.1f} %"


def flops_text(num_flops: float) -> str:
    """Floating-point operations with a decimal prefix; divided by seconds, a rate.

    >>> flops_text(940), flops_text(2.34e10) + "/s"
    ('940 FLOP', '23.4 GFLOP/s')
    """
    size, prefix = _scaled(num_flops, 1000, _DECIMAL)
    return f"{_three_digits(size)} {prefix}FLOP" if prefix else f"{size:.0f} FLOP"


def intensity_text(flops_per_byte: float) -> str:
    """Arithmetic intensity: operations per byte read or written.

    >>> intensity_text(0.25), intensity_text(141.3)
    ('0.25 FLOP/B', '141 FLOP/B')
    """
    return f"{_three_digits(flops_per_byte)} FLOP/B"


def quantity_text(value: float, unit: UnitKind) -> str:
    """A number of any kind, with its unit.

    >>> quantity_text(0.00123, "seconds"), quantity_text(2048, "bytes"), quantity_text(1234.5, "samples_per_s")
    ('1.23 ms', '2.00 KiB', '1.23 k samples/s')
    """
    if unit == "seconds":
        return seconds_text(value)
    if unit == "bytes":
        return bytes_text(value)
    if unit == "share":
        return percent_text(value)
    rate, prefix = _scaled(value, 1000, _DECIMAL)
    return f"{_three_digits(rate)} {prefix} samples/s" if prefix else f"{_three_digits(rate)} samples/s"


def error_text(error: float | None, unit: UnitKind) -> str:
    """A signed error: of a share in percentage points, of all else in percent; "–" where there is none.

    >>> error_text(-0.05, "seconds"), error_text(-0.0001, "share"), error_text(None, "bytes")
    ('-5.0 %', '+0.0 points', '–')
    """
    if error is None:
        return "–"
    text = percent_text(error, signed=True)
    return f"{text.removesuffix('%')}points" if unit == "share" else text


def seconds_axis(longest_s: float) -> tuple[str, float]:
    """The unit for an axis that reaches `longest_s`, and how many seconds it is.

    >>> seconds_axis(0.0042), seconds_axis(70.0)
    (('ms', 0.001), ('s', 1.0))
    """
    return next(((unit, scale) for unit, scale in _SCALES_OF_SECONDS if longest_s >= scale), _SCALES_OF_SECONDS[-1])


def bytes_axis(largest_bytes: float) -> tuple[str, float]:
    """The unit for an axis that reaches `largest_bytes`, and how many bytes it is.

    >>> bytes_axis(5000), bytes_axis(3 * 2**30)
    (('KiB', 1024.0), ('GiB', 1073741824.0))
    """
    power = max((i for i in range(len(_BINARY)) if largest_bytes >= 1024.0**i), default=0)
    return _BINARY[power], 1024.0**power


def parse_bytes(text: str) -> int:
    """Bytes from text: GiB (or G) are binary, GB are decimal.

    Raises UsageError for anything that is not a positive size.

    >>> parse_bytes("16GiB"), parse_bytes("1.5 GB"), parse_bytes("4096")
    (17179869184, 1500000000, 4096)
    """
    if re.search(r"\d\s*[KMGTP]i?b\s*$", text):
        raise UsageError(f"{text!r} reads as bits; write bytes, such as 16GB or 16GiB")
    size = _parse(text, _BYTES_PER_UNIT, what="a size in bytes", example="16GiB or 800MB")
    if size < 1:
        raise UsageError(f"{text!r} is {size:g} bytes; expected at least 1 byte, such as 16GiB")
    return int(size)


def parse_memory(text: str) -> int:
    """As `parse_bytes`; a number below 1024 needs its unit, as it is probably meant in GiB.

    >>> parse_memory("6 B"), parse_memory("4096")
    (6, 4096)
    """
    size = parse_bytes(text)
    if size < 1024 and text.strip().isdecimal():
        raise UsageError(
            f"{text!r} is {size} bytes; write it with its unit, such as {text.strip()}GiB or {text.strip()}MiB"
        )
    return _within(INTEGER, size, text)


def parse_seconds(text: str) -> float:
    """Seconds from text; raises UsageError for anything that is not a duration of 0 or more.

    >>> parse_seconds("5us"), parse_seconds("2 ms"), parse_seconds("1.5")
    (5e-06, 0.002, 1.5)
    """
    return _parse(text, _SECONDS_PER_UNIT, what="a duration", example="5us or 2ms")


def parse_link(text: str) -> tuple[float, float]:
    """Bytes per second and seconds of latency from `25GB/s,5us`; the latency may be left out.

    Raises UsageError for anything else.

    >>> parse_link("25GB/s,5us"), parse_link("100MB/s")
    ((25000000000.0, 5e-06), (100000000.0, 0.0))
    """
    rate, _, latency = text.partition(",")
    if not rate.strip().endswith("/s"):
        raise UsageError(f"{text!r} is not a link; write bandwidth and latency like 25GB/s,5us")
    amount = rate.strip().removesuffix("/s")
    if re.search(r"[kKmMgGtTpP]i?b\s*$", amount):
        raise UsageError(f"{text!r} reads as bits; write the bandwidth in bytes, such as 12.5GB/s for 100 Gbit/s")
    latency_s = parse_seconds(latency) if latency else 0.0
    return _within(RATE, float(parse_bytes(amount)), text), _within(SECONDS, latency_s, text)


_NETWORK = re.compile(
    r"\s*(?P<amount>\d+(?:\.\d*)?|\.\d+)\s*(?P<prefix>[kKMGT]?)(?P<unit>b|bit|B)?(?P<per>/s|ps)?\s*"
    r"(?:[*x×]\s*(?P<rails>\d{1,4})\s*)?(?:,\s*(?P<latency>[^,]+))?"
)
MOST_OF_CARD = 2.5e11
"""Bytes a second of a network card; above, the unit is probably another one."""


def parse_network(text: str, *, devices_per_node: int) -> tuple[float, float | None]:
    """Bytes per second of one device to other nodes, and the latency if it is given, from cards of a node: `400Gb/s*8,5us`.

    A small b counts bits, a large one bytes. Without a number of cards each device has one. Raises UsageError for anything
    else, with the nearest reading.

    >>> parse_network("400Gb/s*8,5us", devices_per_node=8), parse_network("25GB/s", devices_per_node=8)
    ((50000000000.0, 5e-06), (25000000000.0, None))
    >>> parse_network("200Gbps*4", devices_per_node=8)
    (12500000000.0, None)
    """
    match = _NETWORK.fullmatch(text)
    if match is None:
        likely = re.sub(r"([kmgt])(b|B|bit)(?=/s|ps)", lambda x: x[1].upper() + x[2], text)
        if likely != text and _NETWORK.fullmatch(likely):
            raise UsageError(f"{text!r} has an unknown prefix; did you mean {likely}?")
        raise UsageError(
            f"{text!r} is no network; write the rate of a card, the cards of a node and the latency like 400Gb/s*8,5us, or "
            "the rate of one device like 50GB/s,5us"
        )
    amount, prefix, rails = match["amount"], match["prefix"], match["rails"]
    behind = (f"*{rails}" if rails else "") + (f",{match['latency']}" if match["latency"] else "")
    if not match["unit"] or not match["per"]:
        raise UsageError(f"{text!r} has no unit of a rate; did you mean {amount}{prefix or 'G'}b/s{behind} (bits)?")
    scale = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[prefix]
    bytes_per_s = float(amount) * scale / (1 if match["unit"] == "B" else 8)
    if bytes_per_s > MOST_OF_CARD:
        nearest = (
            f"did you mean {amount}{prefix}b/s{behind} (bits)?" if match["unit"] == "B" else "give the rate of one card"
        )
        raise UsageError(f"{text!r} is {bytes_per_s / 1e9:,.0f} GB/s a card, more than any has; {nearest}")
    if rails:
        if not int(rails):
            raise UsageError(f"{text!r} has no cards; expected at least 1 a node, such as 400Gb/s*8")
        bytes_per_s *= int(rails) / devices_per_node
    latency_s = None if match["latency"] is None else _within(SECONDS, parse_seconds(match["latency"]), text)
    if latency_s is not None and latency_s >= 1e-2:
        raise UsageError(
            f"{text!r} has a latency of {seconds_text(latency_s)}; did you mean {match['latency'].rstrip('mµus ')}us?"
        )
    return _within(RATE, bytes_per_s, text), latency_s


def _within(bounds: Bounds, value: NumberT, text: str) -> NumberT:
    """The value; raises UsageError where a file could not hold it."""
    if wrong := bounds.violation(value):
        raise UsageError(f"{text!r} is {wrong}")
    return value


def _parse(text: str, units: Mapping[str, str | int], *, what: str, example: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*([a-zA-Zµ]*)\s*", text)
    if match is None or match[2].lower() not in units:
        raise UsageError(f"{text!r} is not {what}; write it like {example}")
    try:
        value = float(Decimal(match[1]) * Decimal(units[match[2].lower()]))
    except ArithmeticError:
        value = math.inf
    if not math.isfinite(value):
        raise UsageError(f"{text!r} is too large for {what}; write it like {example}")
    return value


def _scaled(value: float, base: int, prefixes: Sequence[str]) -> tuple[float, str]:
    """A value divided by a power of the base so that it has at most three digits, and the prefix of that power."""
    size, power = float(value), 0
    while abs(size) >= 999.5 and power < len(prefixes) - 1:
        size, power = size / base, power + 1
    return size, prefixes[power]


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"


def counted(count: int, noun: str) -> str:
    """A count and its noun.

    >>> counted(1, "stage"), counted(8, "micro-batch")
    ('1 stage', '8 micro-batches')
    """
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{count} {noun}{ending}"


def ends_text(names: Sequence[str]) -> str:
    """The first and the last of some names in order, and how many there are.

    >>> ends_text(["embedding", "blocks.0", "blocks.1"]), ends_text(["head"])
    ('embedding … blocks.1 (3)', 'head')
    """
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def pipeline_text(num_stages: int, num_devices: int) -> str:
    """The number of stages, and that of devices where it is another.

    >>> pipeline_text(4, 4), pipeline_text(4, 2)
    ('4 stages', '4 stages on 2 devices')
    """
    stages = counted(num_stages, "stage")
    return stages if num_stages == num_devices else f"{stages} on {counted(num_devices, 'device')}"


def replicas_text(num_replicas: int, sharding: Sharding) -> str:
    """How many replicas there are, and what they divide among them.

    >>> replicas_text(4, "none"), replicas_text(4, "optimizer")
    ('4 replicas', '4 replicas with sharded optimizer state')
    """
    divided = {"none": "", "optimizer": " with sharded optimizer state", "weights": " with sharded weights"}
    return counted(num_replicas, "replica") + divided[sharding]
