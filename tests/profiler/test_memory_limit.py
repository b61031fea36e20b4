"""A model larger than the memory limit of the process is profiled."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import gplan

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformer_lm.py"
LIMIT_BYTES = 5 * 2**29  # of address space, as `ulimit -v` sets it: 2.5 GiB


def test_large_weights_are_measured_layer_by_layer(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    settings = ("num_blocks=64", "width=1024", "num_heads=8", "sequence_length=16")
    arguments = [
        *(word for setting in settings for word in ("--set", setting)),
        *("--microbatch-size", "1", "--contention", "0", "--budget", "0.01", "--link", "1GB/s,1us"),
    ]
    subprocess.run(
        [sys.executable, "-m", "gplan", "profile", str(EXAMPLE), *arguments, "--output", str(path)],
        check=True,
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES)),
    )
    found = gplan.load(path)
    assert isinstance(found, gplan.Profile)
    assert sum(x.weight_bytes for x in found.layers) > LIMIT_BYTES
    assert all(x.costs[0].forward.num_samples > 0 for x in found.layers)
    assert any(note.startswith("measured layer by layer") for note in found.notes)
