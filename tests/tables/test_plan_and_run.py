"""Plans and runs as text in any width."""

from __future__ import annotations

import pytest

from gplan.tables import plan_view, run_view
from tests.reporting.subjects import make_plan, make_run, named
from tests.tables.printed import printed


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_plan_keeps_its_times_and_peak_memory_in_every_width(width: int) -> None:
    plan = named(make_plan(num_stages=2), [f"transformer.encoder.layers.{i}.block" for i in range(8)])
    lines = printed(plan_view(plan), width=width)
    assert all(len(line) <= width for line in lines)
    rows = [line for line in lines if line.split()[0] in ("0", "1")]
    assert len(rows) == 2
    assert all(row.count(" ms") >= 2 and row.endswith(" MiB") for row in rows)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_run_keeps_predicted_and_measured_in_every_width(width: int) -> None:
    lines = printed(run_view(make_run()), width=width)
    assert all(len(line) <= width for line in lines)
    assert sum(line.endswith((" %", " points")) for line in lines) == 3 + 4 + 4 * 4
    assert any(line.split()[0] in ("warm-up", "idle:") for line in lines)
