"""Plans and runs as text in any width."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.balancer import alternative_of
from gplan.nouns import Place
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


def _rows(lines: list[str], title: str) -> list[str]:
    """What stands below a title, its header left out."""
    return lines[lines.index(title) + 2 :]


def test_rivals_stand_beside_the_plan_with_what_they_change() -> None:
    plan = make_plan(num_stages=2)
    free = alternative_of(replace(plan, prediction=replace(plan.prediction, step_s=plan.prediction.step_s / 2)))
    lines = printed(plan_view(replace(plan, rivals=(replace(free, label="without wishes", cuts=(3,)),))))
    this, other = _rows(lines, "compared with")[:2]
    assert this.startswith("this plan") and this.endswith(" 4")
    assert other.startswith("without wishes") and "-50.0 %" in other and other.endswith(" 3")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_frontier_is_a_table_that_begins_with_the_plan(width: int) -> None:
    plan = make_plan(num_stages=2)
    slower = replace(
        alternative_of(plan), recompute="selected", step_s=2 * plan.prediction.step_s, peak_bytes=plan.peak_bytes // 2
    )
    lines = printed(plan_view(replace(plan, frontier=(alternative_of(plan), slower))), width=width)
    first, second = _rows(lines, "less memory, longer steps")[:2]
    assert all(len(line) <= width for line in lines)
    assert first.endswith("MiB") and second.endswith("MiB")
    assert first.startswith("2 stages") and second.startswith("2 stages")
    assert "less memory" not in "".join(printed(plan_view(replace(plan, frontier=(alternative_of(plan),)))))


def test_replicas_stand_in_the_title_and_below() -> None:
    lines = printed(plan_view(replace(make_plan(num_stages=2), num_replicas=4)))
    assert ": 4 replicas of 2 stages" in lines[0]
    assert any(line.startswith("the replicas add up their gradients in") for line in lines)


def test_selected_layers_are_counted_for_each_stage() -> None:
    plan = make_plan(num_stages=2)
    first = replace(plan.stages[0], recompute_layers=plan.stages[0].layer_names[:3])
    lines = printed(plan_view(replace(plan, recompute="selected", stages=(first, plan.stages[1]))))
    assert "recomputed" in lines[1]
    assert "3 of 4" in lines[2] and "0 of 4" in lines[3]


def test_each_stage_has_its_own_device_and_that_devices_memory() -> None:
    plan = make_plan(num_stages=2)
    places = (Place(name="big", host="h", memory_bytes=2**30), Place(name="small", host="h"))
    stages = tuple(replace(stage, place=place) for stage, place in zip(plan.stages, places, strict=True))
    lines = printed(plan_view(replace(plan, stages=stages)))
    assert "big" in lines[2] and lines[2].endswith("of 1.00 GiB")
    assert "small" in lines[3] and " of " not in lines[3]
