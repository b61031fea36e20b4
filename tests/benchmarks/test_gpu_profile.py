"""The suite for a GPU, dry-run on a CPU: every step of it, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from benchmarks import gpu_profile
from gplan.evaluate.compare import PEAK_MEMORY, STEP_TIME


def test_dry_run(tmp_path: Path) -> None:
    gpu_profile.main(["--dry", "--output", str(tmp_path)])
    rows = pd.read_csv(tmp_path / "rows.csv")
    assert set(rows.num_devices) == {1, 2}
    assert {"forward", "backward", "step", "allocated bytes"} <= set(rows[rows.num_devices == 1].quantity)
    assert {STEP_TIME, f"{PEAK_MEMORY} 1"} <= set(rows[rows.num_devices == 2].quantity)
    text = (tmp_path / "README.md").read_text()
    assert "device: cpu (a dry run)" in text
    assert "Error" not in text
    assert all(f"| tiny, {precision} | 2 |" in text for precision in ("bfloat16", "float32"))
    assert "two ranks on one device: rank 0: losses" in text


def test_model_left_out_is_in_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_profile, "two_ranks", lambda _options: "")  # which the dry run starts
    gpu_profile.main(["--dry", "--longest", "0", "--output", str(tmp_path)])
    assert "tiny, float32: left out, 0 s had passed" in (tmp_path / "README.md").read_text()
