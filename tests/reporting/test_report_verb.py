"""`gplan report`: which profile it takes, and what it says where there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import gplan
from gplan.cli import main
from gplan.strategy_search.planner import balance
from tests.made import make_profile
from tests.reporting.subjects import make_layered_profile

PROFILE = make_profile([1e-3, 2e-3, 2e-3, 1e-3])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan, where reports have no charts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gplan.reporting.report_folder.draw", lambda *_: ())
    gplan.save(balance(PROFILE, num_devices=2, num_microbatches=2), "gplan.plan.json")
    return tmp_path


def report(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    return int(ended.value.code or 0)


def has_reasons() -> bool:
    return 'id="reasons"' in Path("gplan-report/index.html").read_text(encoding="utf-8")


def test_the_profile_that_lies_here_is_taken(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gplan.save(PROFILE, "gplan.profile.json")
    assert report() == 0
    assert "read gplan.plan.json and gplan.profile.json" in capsys.readouterr().out
    assert has_reasons()


def test_without_a_profile_it_says_what_the_page_has_not(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report() == 0
    assert "there is no profile here, so the page does not explain the plan (see --profile)" in capsys.readouterr().out
    assert not has_reasons()


def test_a_profile_of_another_model_is_left_alone_unless_it_was_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gplan.save(make_layered_profile(6), "gplan.profile.json")
    assert report() == 0
    assert "the plan was not made from gplan.profile.json" in capsys.readouterr().out
    assert not has_reasons()
    assert report("--profile", "gplan.profile.json") != 0
    assert "expected the profile that the plan was made from" in capsys.readouterr().err


def test_a_profile_that_is_named_must_be_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report("--profile", "other.json") != 0
    assert "other.json" in capsys.readouterr().err


def test_the_newer_of_run_and_plan_is_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("gplan.run.json").write_text("{}")
    os.utime("gplan.run.json", (1, 1))
    assert report() == 0
    assert "read gplan.plan.json" in capsys.readouterr().out


def test_json_lists_the_files_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report("--json") == 0
    assert json.loads(capsys.readouterr().out) == [
        f"gplan-report/{x}" for x in ("index.html", "stages.csv", "actions.csv", "trace.json")
    ]
