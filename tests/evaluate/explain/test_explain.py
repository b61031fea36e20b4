"""The explanation as a whole, its baselines, and the verb `gplan explain`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import gplan
from gplan.cli import main
from gplan.core import Constraints, HostLoad, MachineDevice
from gplan.evaluate.explain import explain
from gplan.evaluate.replanning import reprice
from tests.evaluate.explain.settings import memory_bound, plan_of, recompute_bound, two_towers
from tests.made import make_profile


def test_the_parts_speak_of_one_plan() -> None:
    profile = memory_bound()
    found = explain(plan_of(profile, memory_bytes=60), profile)
    assert (found.step_s, found.samples_per_s, found.bottleneck.binds) == (63.0, 4 / 63, "memory")
    assert found.bottleneck.memory_gain_s == 9.0
    assert found.options[0].outcome is not None and found.options[0].outcome.step_s == 63.0
    assert found.notes == ()


def test_suboptimal_plan_is_compared_with_the_best() -> None:
    profile = make_profile([3.0, 1.0, 1.0, 1.0])
    plan = plan_of(make_profile([1.0, 1.0, 1.0, 1.0]))
    found = explain(plan, profile)
    assert found.options[0].outcome is not None
    assert found.options[0].outcome.step_s == plan_of(profile).prediction.step_s
    assert plan.prediction.step_s < reprice(plan, profile, engine="torch").prediction.step_s == found.step_s
    (note,) = found.notes
    assert note.startswith("this profile gives the plan a step of")
    assert note.endswith("all figures here are from this profile")


def test_branching_model_is_explained_in_plan_order() -> None:
    profile = two_towers()
    plan = plan_of(profile, minimize="max-stage")
    found = explain(plan, profile)
    assert plan.layer_names == ("b", "a", "c")
    assert found.notes == ()
    assert found.bottleneck.equals == (1,)


def test_machine_plan_is_explained_without_options() -> None:
    profile = make_profile([1.0, 2.0])
    plan, place = plan_of(profile), MachineDevice(name="gpu0", host="here")
    found = explain(replace(plan, stages=tuple(replace(x, machine_device=place) for x in plan.stages)), profile)
    assert (found.bottleneck.device, found.bottleneck.binds) == (1, "compute")
    assert [x.outcome for x in found.options] == [None]
    assert "machine" in found.options[0].reason


def test_constrained_plan_is_compared_with_constrained_plans() -> None:
    profile = make_profile([1.0, 1.0, 2.0])
    plan = plan_of(profile, constraints=Constraints(cut_after=("a",)))
    found = explain(plan, profile)
    assert found.options[0].outcome is not None and found.options[0].outcome.step_s == found.step_s == 39.0
    assert found.setting.constraints == plan.constraints


def test_explain_selected_layers() -> None:
    found = explain(plan_of(recompute_bound(), memory_bytes=70, recompute="selected"), recompute_bound())
    assert found.options[0].outcome is not None and found.options[0].outcome.step_s == found.step_s
    assert found.notes == ()
    assert found.bottleneck.memory_gain_s


@pytest.mark.parametrize(
    ("schedule", "recompute", "num_microbatches"),
    [("gpipe", "always", 3), ("1f1b", "except-last", 3), ("1f1b", "never", 1)],
)
def test_any_way_to_run_a_model_can_be_explained(schedule: str, recompute: str, num_microbatches: int) -> None:
    profile = make_profile([0.0, 2.0, 1.0, 0.0], weight_bytes=4, microbatch_sizes=(1, 2))
    for num_stages in (1, 3):
        plan = plan_of(
            profile, num_devices=num_stages, microbatch_size=2, schedule=schedule, recompute=recompute,
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


def test_explain_prints_and_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {x.name: x.read_bytes() for x in here.iterdir()}
    assert gplan_exits("explain") == 0
    out = capsys.readouterr().out
    assert "Memory limits the step: without the limit of 60 B a device the step would be 14.3 % shorter." in out
    assert {x.name: x.read_bytes() for x in here.iterdir()} == before


def test_the_profiles_warnings_stand_below(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    busy = replace(memory_bound(), host_load=HostLoad(wait_share=0.5))
    gplan.save(busy, "gplan.profile.json")
    (doubt,) = busy.doubts
    assert gplan_exits("explain") == 0
    assert doubt in " ".join(capsys.readouterr().out.split())


def test_explain_as_json_holds_every_number(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("explain", "gplan.plan.json", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bottleneck"]["memory_gain_s"] == 9.0
    assert {x["kind"] for x in found["options"]} >= {"same", "more memory", "more devices", "free link"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("absent.json",), "absent.json is not there; expected a gplan plan"),
        (("--profile", "absent.json"), "absent.json is not there; expected a gplan profile"),
        (("--profile", "other.json"), "the plan has a layer d, which the profile does not have"),
        (("gplan.profile.json",), "expected 'gplan.plan/7'"),
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
