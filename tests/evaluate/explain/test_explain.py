"""All of it together, and the verb."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import gplan
from gplan.cli import main
from gplan.core import Constraints, MachineDevice
from gplan.evaluate.explain.explain import explain
from tests.evaluate.explain.settings import memory_bound, plan_of, recompute_bound, two_towers
from tests.made import make_profile


def test_the_parts_speak_of_one_plan() -> None:
    profile = memory_bound()
    found = explain(plan_of(profile, memory_bytes=60), profile)
    assert (found.step_s, found.samples_per_s, found.bottleneck.binds) == (63.0, 4 / 63, "memory")
    assert found.bottleneck.memory_gain_s == 9.0
    assert found.options[0].outcome is not None and found.options[0].outcome.step_s == 63.0
    assert found.rules[0].step_s == found.spread.median_s == 63.0
    assert found.notes == ()


def test_a_plan_that_is_not_the_best_is_held_against_the_best() -> None:
    profile = make_profile([3.0, 1.0, 1.0, 1.0])
    found = explain(plan_of(make_profile([1.0, 1.0, 1.0, 1.0])), profile)
    assert found.options[0].outcome is not None
    assert found.options[0].outcome.step_s == plan_of(profile).prediction.step_s
    assert len(found.notes) == 1


def test_a_model_with_branches_is_explained_in_the_order_of_its_plan() -> None:
    profile = two_towers()
    plan = plan_of(profile, minimize="max-stage")
    found = explain(plan, profile)
    assert plan.layer_names == ("b", "a", "c")
    assert found.notes == ()
    assert found.bottleneck.equals == (1,)
    assert found.rules[0].largest_s == 6.0
    turn = {x.layer: x.slower for x in found.sensitivities.layers}["a"]  # b | a c takes 3 + 3x, a | b c takes 9
    assert turn is not None and turn.moved == ("b", "a")
    assert turn.factor == pytest.approx(2.0, rel=0.004)
    assert explain(plan_of(profile, num_stages=3), profile).sensitivities.reason == ""


@pytest.mark.parametrize(("num_stages", "reason"), [(1, "no cut that could move"), (3, "every stage has one layer")])
def test_where_no_layer_can_move_none_is_asked(num_stages: int, reason: str) -> None:
    profile = make_profile([1.0, 2.0, 1.0])
    found = explain(plan_of(profile, num_stages=num_stages), profile).sensitivities
    assert not found.layers and not found.left_out
    assert reason in found.reason


def test_where_the_best_plan_is_not_proven_no_layer_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = make_profile([1.0, 2.0, 1.0])
    proven = explain(plan_of(profile), profile).options[0]
    assert proven.outcome is not None
    unproven = replace(proven, outcome=replace(proven.outcome, is_proven=False))
    monkeypatch.setattr("gplan.evaluate.explain.explain.evaluate_options", lambda *_, **__: (unproven,))
    found = explain(plan_of(profile), profile).sensitivities
    assert (found.layers, found.reason) == ((), "the best plan itself was not proven in time")


def test_a_plan_for_a_machine_is_explained_without_what_needs_the_machine() -> None:
    profile = make_profile([1.0, 2.0])
    plan, place = plan_of(profile), MachineDevice(name="gpu0", host="here")
    found = explain(replace(plan, stages=tuple(replace(x, machine_device=place) for x in plan.stages)), profile)
    assert (found.bottleneck.device, found.bottleneck.binds) == (1, "compute")
    assert [x.outcome for x in found.options] == [None]
    assert "machine" in found.options[0].reason
    assert found.rules == ()


def test_a_plan_with_constraints_is_held_against_plans_that_grant_them() -> None:
    profile = make_profile([1.0, 1.0, 2.0])
    plan = plan_of(profile, constraints=Constraints(cut_after=("a",)))
    found = explain(plan, profile)
    assert found.options[0].outcome is not None and found.options[0].outcome.step_s == found.step_s == 39.0
    assert found.setting.constraints == plan.constraints
    assert {x.stage for x in found.sensitivities.layers if x.layer == "b"} == {1}


def test_a_plan_of_selected_layers_is_explained_like_any_other() -> None:
    found = explain(plan_of(recompute_bound(), memory_bytes=70, recompute="selected"), recompute_bound())
    assert found.options[0].outcome is not None and found.options[0].outcome.step_s == found.step_s
    assert (found.notes, found.sensitivities.reason) == ((), "")
    assert found.bottleneck.memory_gain_s


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", ["never", "always", "except-last"])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_any_way_to_run_a_model_can_be_explained(schedule: str, recompute: str, num_microbatches: int) -> None:
    profile = make_profile([0.0, 2.0, 1.0, 0.0], weight_bytes=4, microbatch_sizes=(1, 2))
    for num_stages in (1, 3):
        plan = plan_of(
            profile, num_stages=num_stages, microbatch_size=2, schedule=schedule, recompute=recompute,
            num_microbatches=num_microbatches,
        )  # fmt: skip
        found = explain(plan, profile)
        assert all((option.outcome is None) == bool(option.reason) for option in found.options)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a profile and its plan."""
    monkeypatch.chdir(tmp_path)
    gplan.save(memory_bound(), "gplan.profile.json")
    gplan.save(plan_of(memory_bound(), memory_bytes=60), "gplan.plan.json")
    return tmp_path


def gplan_exits(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


def test_explain_prints_what_binds_and_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {x.name: x.read_bytes() for x in here.iterdir()}
    assert gplan_exits("explain") == 0
    out = capsys.readouterr().out
    assert "Memory limits the step: without the limit of 60 B a device the step would be 14.3 % shorter." in out
    assert {x.name: x.read_bytes() for x in here.iterdir()} == before


def test_explain_as_json_holds_every_number(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("explain", "gplan.plan.json", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bottleneck"]["memory_gain_s"] == 9.0
    assert {x["kind"] for x in found["options"]} >= {"same", "more memory", "more devices", "free link"}
    assert found["spread"]["num_draws"] == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("absent.json",), "absent.json is not there; expected a gplan plan"),
        (("--profile", "absent.json"), "absent.json is not there; expected a gplan profile"),
        (("--profile", "other.json"), "the plan has a layer d, which the profile does not have"),
        (("gplan.profile.json",), "expected 'gplan.plan/2'"),
    ],
)
def test_a_mistake_is_one_message(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    gplan.save(make_profile([1.0, 2.0, 3.0]), "other.json")
    assert gplan_exits("explain", *arguments) == 3
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""
