"""Files: whole or absent, and damaged ones refused with the place of the damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gplan
from gplan import files
from gplan.errors import FileError
from gplan.nouns import Plan, Profile, Run
from tests.made import make_profile


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    gplan.save(make_profile([1.0, 2.0, 3.0]), path)
    return path


def test_what_is_saved_is_loaded_again(profile_file: Path, tmp_path: Path) -> None:
    profile = gplan.load(profile_file)
    assert profile == make_profile([1.0, 2.0, 3.0])
    plan = gplan.balance(profile, num_stages=2, num_microbatches=4)
    gplan.save(plan, tmp_path / "plan.json")
    assert gplan.load(tmp_path / "plan.json") == plan


def damage_missing_key(content: dict[str, Any]) -> None:
    del content["layers"][1]["name"]


def damage_unknown_key(content: dict[str, Any]) -> None:
    content["layers"][1]["colour"] = "blue"


def damage_negative(content: dict[str, Any]) -> None:
    content["layers"][1]["costs"][0]["stash_bytes"] = -5


def damage_type(content: dict[str, Any]) -> None:
    content["layers"][1]["costs"][0]["stash_bytes"] = "many"


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
        (damage_order, r"micro-batch sizes are \(1, 1\); expected them rising"),
        (damage_version, r"format 'gplan.profile/99'; expected 'gplan.profile/1'"),
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
        files.load(Profile, profile_file)
    assert "make it again with `gplan profile`" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_refused_wherever_it_ends(profile_file: Path, keep: float) -> None:
    whole = profile_file.read_bytes()
    profile_file.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(FileError, match="cut off or is not JSON"):
        files.load(Profile, profile_file)


def test_a_plan_edited_into_nonsense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    files.save(gplan.balance(make_profile([1.0, 2.0, 3.0]), num_stages=2, num_microbatches=4), path)
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
            files.load(Plan, path)


def test_a_plan_is_not_taken_for_a_profile(tmp_path: Path) -> None:
    plan = gplan.balance(make_profile([1.0, 2.0]), num_stages=2, num_microbatches=2)
    files.save(plan, tmp_path / "plan.json")
    with pytest.raises(FileError, match=r"format 'gplan.plan/1'; expected 'gplan.profile/1'"):
        files.load(Profile, tmp_path / "plan.json")
    assert isinstance(files.load_any(tmp_path / "plan.json"), Plan)


def test_a_file_that_is_not_there_is_named_with_the_verb_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"run.json is not there; .* make one with `gplan run`"):
        files.load(Run, tmp_path / "run.json")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    profile_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = profile_file.read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full_disk)
    with pytest.raises(FileError, match="No space left on device"):
        files.save(make_profile([9.0]), profile_file)
    assert profile_file.read_bytes() == before
    assert [x.name for x in profile_file.parent.iterdir()] == ["profile.json"]
