"""Files: whole or absent, and damaged ones refused with the place of the damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gplan
from gplan.core import Plan, Precision, Profile, Run
from gplan.core.errors import FileError
from gplan.files import json_files
from gplan.simulation.simulator import simulate
from tests.made import make_profile
from tests.scheduled import EVERY_SCHEDULE, OWN, scheduled_plan


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    gplan.save(make_profile([1.0, 2.0, 3.0]), path)
    return path


def test_what_is_saved_is_loaded_again(profile_file: Path, tmp_path: Path) -> None:
    profile = gplan.load(profile_file)
    assert profile == make_profile([1.0, 2.0, 3.0])
    plan = gplan.balance(profile, num_devices=2, num_microbatches=4)
    gplan.save(plan, tmp_path / "plan.json")
    assert gplan.load(tmp_path / "plan.json") == plan


def run_of(plan: Plan) -> Run:
    """A run that did what the plan predicts."""
    return Run(
        plan=plan, engine="virtual", losses=(1.0,), step_s=(1.0,), num_warmup_steps=0, num_disturbed=0, num_counted=1,
        timeline=simulate(plan), peak_bytes=(1,) * plan.num_devices, check=None, created="2000-01-01T00:00:00+00:00",
        versions=(),
    )  # fmt: skip


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_plans_and_runs_of_every_schedule_are_loaded_again(schedule: str, tmp_path: Path) -> None:
    plan = scheduled_plan(schedule)
    for name, value in (("plan.json", plan), ("run.json", run_of(plan))):
        gplan.save(value, tmp_path / name)
        assert gplan.load(tmp_path / name) == value


def test_a_profile_keeps_its_precision(tmp_path: Path) -> None:
    profile = replace(make_profile([1.0, 2.0, 3.0]), precision=Precision.named("mixed"))
    gplan.save(profile, tmp_path / "profile.json")
    assert gplan.load(tmp_path / "profile.json") == profile
    content = json.loads((tmp_path / "profile.json").read_text())
    content["precision"]["gradients"] = None
    (tmp_path / "profile.json").write_text(json.dumps(content))
    with pytest.raises(FileError, match="expected one of model, float32, bfloat16, mixed"):
        gplan.load(tmp_path / "profile.json")


def test_a_plan_from_before_there_were_chunks_and_halves_is_loaded(tmp_path: Path) -> None:
    plan = gplan.balance(make_profile([1.0, 2.0, 3.0]), num_devices=2, num_microbatches=4)
    json_files.save(plan, tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    for stage in content["stages"]:
        stage.pop("device")
        stage.pop("parts", None)
        del stage["cost"]["input_gradient_s"], stage["cost"]["weight_gradient_s"]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    found = json_files.load(Plan, tmp_path / "plan.json")
    assert (found.devices, found.stages[1].cost) == ((0, 1), plan.stages[1].cost)


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("1f1b", {"schedule": "2f2b"}, r"schedule '2f2b' is not known; expected one of gpipe, .* - at `\$\.schedule`"),
    ("1f1b", {"schedule": "zb-h1:3"}, r"zb-h1 has 1 chunks a device; expected no number - at `\$\.schedule`"),
    ("1f1b", {"schedule": "custom:0F0 0X0"}, r"'0X0' is not an action.* - at `\$\.schedule`"),
    ("1f1b", {"schedule": "custom:0F0 0B0"}, r"custom order has 1 device; .* - at `\$\.schedule`"),
    ("1f1b", {"schedule": "custom:"}, r"device 0 has no actions.* - at `\$\.schedule`"),
    (OWN, {"num_microbatches": 3}, r"custom order has 2 micro-batches; .* - at `\$\.schedule`"),
    ("1f1b", {"num_microbatches": 10**9}, r"1f1b with 2 devices and 1000000000 micro-batches has 4000000000 actions; exp"),
    ("1f1b", {"schedule": "interleaved-1f1b:2"}, r"2 stages; expected 4 for interleaved-1f1b:2 on 2 devices"),
    ("zb-v", {"schedule": "looped-bfs:2"}, r"stage 2 is on device 1; expected device 0 for looped-bfs:2 - at .*\[2\]\.dev"),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "change", "told"), CONTRADICTIONS, ids=[x[2] for x in CONTRADICTIONS])
def test_a_plan_whose_stages_cannot_carry_out_its_schedule_is_refused(
    schedule: str, change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    content = json.loads(json_files.to_json(scheduled_plan(schedule)))
    (tmp_path / "plan.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(FileError, match=told) as caught:
        json_files.load(Plan, tmp_path / "plan.json")
    assert "make it again with `gplan balance`" in str(caught.value)
    assert ": $" not in str(caught.value)  # the path is at the end


@pytest.mark.parametrize("device", [-1, 2, 10**12])
def test_a_stage_on_a_device_that_leaves_others_out_is_refused(device: int) -> None:
    content = json.loads(json_files.to_json(scheduled_plan("1f1b")))
    content["stages"][1]["device"] = device
    with pytest.raises(FileError, match=r"stages are on devices .*; expected 0, 1, 2"):
        json_files.parse(Plan, json.dumps(content).encode(), name="plan.json")


def test_an_order_whose_devices_wait_for_each_other_is_refused() -> None:
    content = json.loads(json_files.to_json(scheduled_plan(OWN)))
    content["schedule"] = OWN.replace("custom:0F0 0F1 2F0 2B0", "custom:2F0 0F0 0F1 2B0")
    with pytest.raises(FileError, match=r"2F0.* - at `\$\.schedule`"):
        json_files.parse(Plan, json.dumps(content).encode(), name="plan.json")


@pytest.mark.parametrize(("schedule", "stage"), [("zb-h1", 1), ("zb-v", 1), (OWN, 1)])
def test_a_split_backward_without_the_times_of_its_halves_is_refused(schedule: str, stage: int) -> None:
    content = json.loads(json_files.to_json(scheduled_plan(schedule)))
    content["stages"][0]["cost"]["input_gradient_s"] = None  # the first stage's halves are the whole backward
    json_files.parse(Plan, json.dumps(content).encode(), name="plan.json")
    content["stages"][stage]["cost"]["weight_gradient_s"] = None
    with pytest.raises(FileError, match=rf"splits the backward of stage {stage}.* - at `\$\.stages\[{stage}\]\.cost`"):
        json_files.parse(Plan, json.dumps(content).encode(), name="plan.json")


def test_a_run_is_held_against_its_plan() -> None:
    content = json.loads(json_files.to_json(run_of(scheduled_plan("zb-v"))))
    content["timeline"]["spans"][3]["action"]["stage"] = 9
    with pytest.raises(FileError, match=r"9\w0 is on device 0, .* - at `\$\.timeline\.spans\[3\]`"):
        json_files.parse(Run, json.dumps(content).encode(), name="run.json")
    content["plan"]["schedule"] = "nemo"
    with pytest.raises(FileError, match=r"'nemo' is not known.* - at `\$\.plan\.schedule`.*`gplan run`"):
        json_files.parse(Run, json.dumps(content).encode(), name="run.json")


def test_a_run_has_every_action_of_its_plan_once() -> None:
    whole = json_files.to_json(run_of(scheduled_plan("zb-v")))
    last = json.loads(whole)["timeline"]["spans"][3]["action"]
    for key, value, found in (
        ("microbatch", -1, r"there are actions of micro-batch -1 on stage \d"),
        ("microbatch", 1 - last["microbatch"], "expected one forward and one backward"),
    ):
        content = json.loads(whole)
        content["timeline"]["spans"][3]["action"][key] = value
        with pytest.raises(FileError, match=rf"{found}.* - at `\$\.timeline`"):
            json_files.parse(Run, json.dumps(content).encode(), name="run.json")
    content = json.loads(whole)
    del content["timeline"]["spans"][3]
    with pytest.raises(FileError, match=r"expected (one forward|micro-batches 0 to 1).* - at `\$\.timeline`"):
        json_files.parse(Run, json.dumps(content).encode(), name="run.json")


def damage_missing_key(content: dict[str, Any]) -> None:
    del content["layers"][1]["name"]


def damage_unknown_key(content: dict[str, Any]) -> None:
    content["layers"][1]["colour"] = "blue"


def damage_negative(content: dict[str, Any]) -> None:
    content["layers"][1]["costs"][0]["stash_bytes"] = -5


def damage_type(content: dict[str, Any]) -> None:
    content["layers"][1]["costs"][0]["stash_bytes"] = "many"


def damage_nan(content: dict[str, Any]) -> None:
    content["layers"][1]["costs"][0]["forward_s"] = float("nan")  # which Python's json writes as NaN


def damage_leftovers(content: dict[str, Any]) -> None:
    content["layers"][1]["costs"][0]["leftovers"] = [{"num_later": 3, "num_bytes": 1}]  # the loss would be 2 later


def damage_order(content: dict[str, Any]) -> None:
    content["layers"][1]["costs"] *= 2


def damage_version(content: dict[str, Any]) -> None:
    content["format"] = "gplan.profile/99"


def damage_empty(content: dict[str, Any]) -> None:
    content["layers"] = []


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (damage_missing_key, r"`name` - at `\$\.layers\[1\]`"),
        (damage_unknown_key, r"\$\.layers\[1\]\.colour"),
        (
            damage_negative,
            r"stash_bytes is -5; expected a finite number of 0 or more - at `\$\.layers\[1\]\.costs\[0\]`",
        ),
        (damage_type, r"Expected `int`, got `str` - at `\$\.layers\[1\]\.costs\[0\]\.stash_bytes`"),
        (damage_nan, "is cut off or is not JSON"),
        (damage_leftovers, r"has bytes left over by a layer after the last of 3"),
        (damage_order, r"micro-batch sizes are \(1, 1\); expected rising sizes"),
        (damage_version, r"format 'gplan.profile/99'; expected 'gplan.profile/8'"),
        (damage_empty, r"layers is empty"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place_and_a_way_out(
    profile_file: Path, damage: Callable[[dict[str, Any]], None], told: str
) -> None:
    content = json.loads(profile_file.read_text())
    damage(content)
    profile_file.write_text(json.dumps(content))
    with pytest.raises(FileError, match=told) as caught:
        json_files.load(Profile, profile_file)
    assert "make it again with `gplan profile`" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_refused_wherever_it_ends(profile_file: Path, keep: float) -> None:
    whole = profile_file.read_bytes()
    profile_file.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(FileError, match="cut off or is not JSON"):
        json_files.load(Profile, profile_file)


TOO_LARGE: list[tuple[str, str, str]] = [
    ('"stash_bytes"', "9223372036854775808", r"stash_bytes is 9223372036854775808; expected at most 2\^50 bytes"),
    ('"stash_bytes"', "1" * 400, r"stash_bytes is about 2\^1325; expected at most 2\^50 bytes"),
    ('"median_s"', "1e308", r"\$\.layers\[0\]\.costs\[0\]\.forward\.median_s is 1e\+308; expected seconds, 0 or from"),
    ('"median_s"', "1e-320", r"\.forward\.median_s is 1e-320; expected seconds, 0 or from 1e-30"),
    ('"median_s"', "1e400", "is cut off or is not JSON"),
    ('"num_samples"', "18446744073709551616", r"num_samples is 18446744073709551616; expected a count of at most"),
    ('"slow_down"', "1e-12", r"slow_down is 1e-12; expected a factor from 1e-6.*layers\[0\]\.costs\[0\]"),
    ('"name"', "[" * 100_000 + "]" * 100_000, "is nested too deeply to be read"),
]


@pytest.mark.parametrize(("key", "number", "told"), TOO_LARGE, ids=range(len(TOO_LARGE)))
def test_numbers_out_of_bounds_are_refused(profile_file: Path, key: str, number: str, told: str) -> None:
    text = profile_file.read_text()
    start = text.index(key, text.index('"layers"')) + len(key)
    profile_file.write_text(text[:start] + ":" + number + text[text.index(",", start) :])
    with pytest.raises(FileError, match=told):
        json_files.load(Profile, profile_file)


@pytest.mark.parametrize(
    ("key", "number", "told"),
    [
        ('"num_devices"', "2147483648", "expected 0 to 2147483647"),
        ('"bubble"', "-1e60", "bubble is -1e.60; expected a share from 0 to 1"),
        ('"forward_s"', "1e308", r"\$\.plan\.stages\[0\]\.cost\.forward_s is 1e\+308; expected seconds, 0 or from"),
    ],
)
def test_numbers_of_a_run_out_of_bounds_are_refused(key: str, number: str, told: str) -> None:
    before, _, after = json_files.to_json(run_of(scheduled_plan("1f1b"))).decode().partition(key)
    text = f"{before}{key}: {number}{after[after.index(',') :]}"
    with pytest.raises(FileError, match=told):
        json_files.parse(Run, text.encode(), name="run.json")


def test_a_plan_edited_into_nonsense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    json_files.save(gplan.balance(make_profile([1.0, 2.0, 3.0]), num_devices=2, num_microbatches=4), path)
    whole = json.loads(path.read_text())
    nonsense: list[tuple[str, dict[str, Any]]] = [
        ("num_microbatches is 0", {"num_microbatches": 0}),
        ("expected 0, 1, 2", {"stages": whole["stages"][::-1]}),
        ("Invalid enum value|recompute", {"recompute": "sometimes"}),
        ("stage 0 begins at layer", {"stages": whole["stages"][1:]}),
    ]
    for told, change in nonsense:
        if "stages" in change and len(change["stages"]) == 1:
            change["stages"][0]["index"] = 0
        path.write_text(json.dumps({**whole, **change}))
        with pytest.raises(FileError, match=told):
            json_files.load(Plan, path)


def test_a_plan_is_not_taken_for_a_profile(tmp_path: Path) -> None:
    plan = gplan.balance(make_profile([1.0, 2.0]), num_devices=2, num_microbatches=2)
    json_files.save(plan, tmp_path / "plan.json")
    with pytest.raises(
        FileError, match=r"format 'gplan.plan/7'; expected 'gplan.profile/8', a gplan profile; make one with"
    ):
        json_files.load(Profile, tmp_path / "plan.json")
    assert isinstance(json_files.load_any(tmp_path / "plan.json"), Plan)


def test_a_value_of_another_kind_is_not_lost(profile_file: Path) -> None:
    for kind in (Plan, None):
        with pytest.raises(FileError, match="is a gplan profile, which would be lost; name another file, or remove it"):
            json_files.check_writable(profile_file, kind)
    json_files.check_writable(profile_file, Profile)


def test_a_file_that_is_not_there_is_named_with_the_verb_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"run.json is not there; .* make one with `gplan run`"):
        json_files.load(Run, tmp_path / "run.json")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    profile_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = profile_file.read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json_files.os, "replace", full_disk)
    with pytest.raises(FileError, match="No space left on device"):
        json_files.save(make_profile([9.0]), profile_file)
    assert profile_file.read_bytes() == before
    assert [x.name for x in profile_file.parent.iterdir()] == ["profile.json"]


def test_a_file_of_an_older_version_gets_one_clear_sentence(tmp_path: Path) -> None:
    plan = gplan.balance(make_profile([1.0, 2.0]), num_devices=2, num_microbatches=2)
    path = tmp_path / "plan.json"
    path.write_bytes(json_files.to_json(plan).replace(b"gplan.plan/7", b"gplan.plan/6"))
    expected = "older gplan .format gplan.plan/6; this one reads gplan.plan/7.; make it again with `gplan balance`"
    for load in (lambda: json_files.load(Plan, path), lambda: json_files.load_any(path)):
        with pytest.raises(FileError, match=expected):
            load()
