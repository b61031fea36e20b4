"""Plans with another order of layers than the model, and plans of operations, with both engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gplan.core import Constraints, Pin, Plan, Run
from gplan.core.errors import FileError
from gplan.runtime.run.run_options import RunOptions
from gplan_profiler.model.model_reference import SettingValue
from tests.model_files import load_model_file
from tests.runtime.branched_models import branched_file
from tests.runtime.forked import run_forked
from tests.runtime.plans import pipeline_for, plan_for, recomputing, run_virtually, small_example

CHECKED = RunOptions(num_steps=2, check=True)

# Layers pinned to stages in a way that the model's own order cannot have.
PINS = {
    "towers": {"a.0": 0, "a.1": 0, "b.0": 1, "b.1": 1},
    "sides": {"down.1": 0, "side.0": 1},
}


def turned_plan(reference: str, *, num_devices: int = 2, **options: Any) -> Plan:
    """A plan with another order of layers than the model."""
    pins = tuple(Pin(layer=x, stage=stage) for x, stage in PINS[Path(reference).stem].items())
    plan = plan_for(load_model_file(reference), num_devices=num_devices, constraints=Constraints(pins=pins), **options)
    written = plan_for(load_model_file(reference), num_devices=1).layer_names
    assert sorted(plan.layer_names) == sorted(written)
    assert plan.layer_names != written
    return plan


def assert_passed(run: Run) -> None:
    assert run.check is not None
    assert run.check.passed, run.check


@pytest.mark.parametrize("recompute", ["never", "always", "selected"])
def test_stages_hold_parameters_of_their_layers(tmp_path: Path, recompute: Any) -> None:
    reference = branched_file(tmp_path, "towers")
    file, plan = load_model_file(reference), replace(turned_plan(reference), recompute=recompute)
    stages = pipeline_for(file, plan).runner.stages
    names = {id(parameter): name for name, parameter in file.model.named_parameters()}
    for stage, layers in enumerate([("a.0", "a.1"), ("b.0", "b.1", "head")]):
        held = {names[id(x)] for x in stages[stage].parameters()}
        assert held == {name for name in names.values() if name.startswith(layers)}


@pytest.mark.parametrize("recompute", ["never", "always", "except-last"])
@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("name", sorted(PINS))
def test_virtual_engine_plan_order(tmp_path: Path, name: str, num_devices: int, recompute: str) -> None:
    reference = branched_file(tmp_path, name)
    plan = turned_plan(reference, num_devices=num_devices, recompute=recompute, schedule="1f1b")
    assert_passed(run_virtually(load_model_file(reference), plan, CHECKED))


@pytest.mark.parametrize("name", sorted(PINS))
def test_selected_recompute_in_plan_order(tmp_path: Path, name: str) -> None:
    reference = branched_file(tmp_path, name)
    plan = turned_plan(reference)
    plan = recomputing(plan, plan.layer_names[1::2])
    assert_passed(run_virtually(load_model_file(reference), plan, CHECKED))


def test_torch_engine_plan_order(tmp_path: Path) -> None:
    reference = branched_file(tmp_path, "sides")
    plan = turned_plan(reference)
    plan = recomputing(plan, plan.layer_names[::2])
    run = run_forked(reference, plan, CHECKED)
    assert_passed(run)
    assert run.plan.layer_names == plan.layer_names


def test_op_granularity_virtual_engine() -> None:
    file = small_example("transformer_lm", num_blocks=2, width=16)
    plan = plan_for(file, num_devices=3, granularity="op")
    assert plan.granularity == "op"
    assert len(plan.layer_names) > 10
    assert_passed(run_virtually(file, plan, CHECKED))
    assert_passed(run_virtually(file, recomputing(plan, plan.layer_names[::3]), CHECKED))


def test_op_granularity_torch_engine() -> None:
    settings: dict[str, SettingValue] = {"num_blocks": 1, "width": 16, "num_heads": 2, "sequence_length": 8}
    file = small_example("transformer_lm", **settings)
    plan = plan_for(file, num_devices=2, granularity="op")
    plan = recomputing(plan, plan.layer_names[1::3])
    assert_passed(run_forked(file.name, plan, CHECKED, settings=settings))


def with_layers(plan: Plan, names: list[str]) -> Plan:
    """The plan with these layer names, in order."""
    stages = (replace(x, layer_names=tuple(names[x.first_layer : x.end_layer])) for x in plan.stages)
    return replace(plan, stages=tuple(stages))


def test_impossible_order_refused(tmp_path: Path) -> None:
    reference = branched_file(tmp_path, "towers")
    plan = with_layers(turned_plan(reference), ["a.1", "a.0", "b.0", "b.1", "head"])
    with pytest.raises(FileError, match=r"layer a\.1 cannot run before a\.0, .*; balance again"):
        run_virtually(load_model_file(reference), plan, CHECKED)


def test_unknown_layer_refused(tmp_path: Path) -> None:
    reference = branched_file(tmp_path, "towers")
    plan = with_layers(turned_plan(reference), ["a.0", "a.1", "b.0", "b.one", "head"])
    with pytest.raises(
        FileError, match=r"5 layers \(a\.0 to head\).*only the plan has b\.one; only the model has b\.1;"
    ):
        run_virtually(load_model_file(reference), plan, CHECKED)


def test_sequential_keeps_child_order(tmp_path: Path) -> None:
    reference = branched_file(tmp_path, "row")
    plan = with_layers(plan_for(load_model_file(reference), num_devices=2), ["1", "0", "2"])
    with pytest.raises(
        FileError, match="order of layers is impossible: .*each child reads what the one before it gives"
    ):
        run_virtually(load_model_file(reference), plan, CHECKED)
