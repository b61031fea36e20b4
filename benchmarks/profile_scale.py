"""How profiling scales: many blocks, billions of parameters, and weights that exceed a memory limit.

    python benchmarks/profile_scale.py       about three minutes; writes reports/profile/scale.md

Each row is one `gplan profile` in a process of its own: the seconds it took from start to end, Python's own start
included, and the most memory it held. The limit is set with RLIMIT_AS, as `ulimit -v` does.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from gplan.core.units import bytes_text, seconds_text
from profiler.host.host_info import processor

ROOT = Path(__file__).parent.parent
GIB = 2**30
LINK = ("--link", "10GB/s,5us")  # given: two processes that measure it would hide what the layers take


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One profile to make."""

    name: str
    example: str
    arguments: tuple[str, ...]
    limit_bytes: int | None = None


def blocks(count: int) -> Case:
    """The transformer example with this many blocks, measured."""
    return Case(
        name=f"{count} blocks, measured",
        example="transformer_lm.py",
        arguments=("--set", f"num_blocks={count}", *LINK),
    )


CASES = (
    blocks(4),
    blocks(24),
    blocks(96),
    Case(
        name="5 GiB of weights under a limit of 3 GiB, measured layer by layer",
        example="transformer_lm.py",
        arguments=(
            "--set",
            "num_blocks=112",
            "--set",
            "width=1024",
            "--set",
            "num_heads=8",
            "--contention",
            "0",
            *LINK,
        ),
        limit_bytes=3 * GIB,
    ),
    Case(
        name="20 billion parameters, computed for h100",
        example="transformer_l.py",
        arguments=(
            *("--set", "num_layers=64", "--set", "width=5120", "--set", "feed_forward=20480", "--set", "num_heads=40"),
            *("--set", "vocabulary=50000", "--set", "sequence_length=1024"),
            *("--microbatch-size", "1", "--device", "meta", "--hardware", "h100"),
        ),
        limit_bytes=4 * GIB,
    ),
    Case(
        name="GPipe's Transformer-L of 1663 layers, computed for tpu-v3",
        example="transformer_l.py",
        arguments=(
            *("--set", "paper=true", "--set", "num_layers=1663"),
            *("--microbatch-size", "1", "--device", "meta", "--hardware", "tpu-v3"),
        ),
        limit_bytes=4 * GIB,
    ),
)


def main() -> None:
    """Make every profile, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "profile" / "scale.md")
    output: Path = parser.parse_args().output
    rows = []
    for case in CASES:
        rows.append(row(case))
        print(rows[-1], flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(rows))


def row(case: Case) -> str:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "gplan", "profile", str(ROOT / "examples" / case.example), *case.arguments]
        start_s = time.perf_counter()
        peak_bytes = run([*command, "--output", str(path)], case.limit_bytes)
        took_s = time.perf_counter() - start_s
        profile = json.loads(path.read_bytes())
    layers = profile["layers"]
    parameters = sum(x["num_parameters"] for x in (*layers, *profile["shared_weights"]))
    weights = sum(x["weight_bytes"] for x in (*layers, *profile["shared_weights"]))
    measured = sum(x["same_as"] is None for x in layers)
    cells = (
        case.name, f"{len(layers):,}", f"{measured:,}", f"{parameters:,}", bytes_text(weights), seconds_text(took_s),
        bytes_text(peak_bytes), bytes_text(case.limit_bytes) if case.limit_bytes else "–",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def run(command: Sequence[str], limit_bytes: int | None) -> int:
    """The most memory that the command held, in bytes; raises CalledProcessError where it fails."""

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    watcher = (
        "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
    )  # a process of its own, as the record of children is the largest of all so far
    found = subprocess.run(
        [sys.executable, "-c", watcher, *command], preexec_fn=limit, check=True, capture_output=True, text=True
    )
    return 1024 * int(found.stdout)


def page(rows: Sequence[str]) -> str:
    """The table with how it was made."""
    head = ("profile", "layers", "measured", "parameters", "weights", "took", "most memory", "limit of address space")
    made = f"{processor()}; torch {torch.__version__}, python {platform.python_version()}; {datetime.now(UTC):%Y-%m-%d}"
    lines = [
        "# How profiling scales",
        "",
        f"`python benchmarks/profile_scale.py`: {made}. Layers that are alike are measured, or followed, once.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *rows,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
