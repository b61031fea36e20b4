"""Published profiles: the optimum that their own planners find, row by row."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from gplan.core.errors import NoPlanError
from gplan.interop.published.importing import import_profile
from gplan.partition.balance import balance

DATA = Path(os.environ.get("GPLAN_REFERENCE_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "peers"
OBJECTIVES = {"max_device_load": ("max-device-load", 1e-3), "max_stage_seconds_no_communication": ("max-compute", 1.0)}


def rows() -> list[dict[str, str]]:
    path = DATA / "reference.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def label(row: dict[str, str]) -> str:
    return f"{row['input']}-{row['k']}-{row['memory_limit_bytes']}"


@pytest.mark.skipif(
    not rows(), reason=f"{DATA} is not there; GPLAN_REFERENCE_DATA names the folder of published profiles"
)
@pytest.mark.parametrize("row", rows(), ids=label)
def test_the_published_optimum_is_found_and_proven(row: dict[str, str]) -> None:
    minimize, seconds = OBJECTIVES[row["objective"]]  # of a unit of the file
    asked = {
        "num_devices": int(row["k"]),
        "num_microbatches": 1,
        "minimize": minimize,
        "memory_bytes": int(row["memory_limit_bytes"]) if row["memory_limit_bytes"] else None,
    }
    profile = import_profile(DATA / row["input"])
    if row["optimum"] == "INFEASIBLE":
        with pytest.raises(NoPlanError):
            balance(profile, **asked)
        return
    plan = balance(profile, **asked)
    assert plan.proof.objective_s == pytest.approx(float(row["optimum"]) * seconds, rel=1e-9)
    assert plan.proof.is_proven
