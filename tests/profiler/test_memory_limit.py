"""A model larger than the memory limit of the process is profiled."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

import gplan
from gplan.core import Link, Profile
from tests.runtime.ranks import on_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformer_lm.py"
SPARE_BYTES = 3 * 2**29


def limited_profile(_rank: int) -> Profile:
    """The profile of a process that can take 1.5 GiB more of address space; `ulimit -v` sets the same limit."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit_bytes = 1024 * int(status["VmSize"].split()[0]) + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    return gplan.profile(
        str(EXAMPLE),
        settings={"num_blocks": 40, "width": 1024, "num_heads": 8, "sequence_length": 16},
        microbatch_sizes=[1],
        contention=0,
        budget_s=0.01,
        link=Link(latency_s=1e-6, bytes_per_s=1e9),
    )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_large_weights_are_measured_layer_by_layer() -> None:
    (found,) = on_ranks(1, limited_profile)
    assert sum(x.weight_bytes for x in found.layers) > 1.2 * SPARE_BYTES
    assert all(x.costs[0].forward.num_samples > 0 for x in found.layers)
    assert any(note.startswith("measured layer by layer") for note in found.notes)
