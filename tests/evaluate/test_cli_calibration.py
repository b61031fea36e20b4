"""`gplan verify --calibrate`, and `gplan balance` and `gplan explain` with its calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gplan
from gplan.cli.arguments import calibration_file
from gplan.core import Plan
from gplan.evaluate.replanning import reprice
from tests.cli.test_cli import gplan_exits
from tests.evaluate.hosts import MadeHost
from tests.evaluate.test_calibration import profile_with, slower

BALANCE = ("balance", "--k", "2", "--microbatches", "8", "--microbatch-size", "2")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a profile and a plan, on a host where everything takes a quarter longer."""
    monkeypatch.chdir(tmp_path)
    profile = profile_with()
    truth = slower(profile, lambda _layer: 1.25)
    host = MadeHost(truth=lambda plan: reprice(plan, truth, engine="torch"))

    def run(plan: Plan, **_options: Any) -> gplan.Run:
        return host(plan)

    monkeypatch.setattr("gplan.api.run", run)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    gplan.save(profile, "gplan.profile.json")
    assert gplan_exits(*BALANCE) == 0
    return tmp_path


def plan_here() -> Plan:
    plan = gplan.load("gplan.plan.json")
    assert isinstance(plan, Plan)
    return plan


def test_calibration_is_written_and_shown(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert gplan_exits("verify", "--rounds", "1", "--calibrate") == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "step time of held-out plans, predicted without and with the calibration" in out
    assert "Even × 1.2" in out
    assert "wrote gplan.calibration.json" in out
    assert isinstance(gplan.load("gplan.calibration.json"), gplan.Calibration)
    assert gplan_exits("show", "gplan.calibration.json") == 0
    assert "learned with the torch engine from: this plan" in " ".join(capfd.readouterr().out.split())


def test_json_has_what_was_learned_too(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert gplan_exits("verify", "--rounds", "1", "--calibrate", "--json") == 0
    assert {x["kind"] for x in json.loads(capfd.readouterr().out)["calibration"]["kinds"]} == {"Even", "Odd"}


def test_later_plans_use_the_calibration(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = plan_here()
    assert gplan_exits("verify", "--rounds", "1", "--calibrate") == 0
    capfd.readouterr()
    assert gplan_exits(*BALANCE) == 0
    assert "note: calibrated by" in capfd.readouterr().out
    after = plan_here()
    assert after.prediction.step_s == pytest.approx(1.25 * before.prediction.step_s, rel=0.05)
    assert "without and" in after.notes[-1]
    assert gplan_exits(*BALANCE, "--calibration", "none") == 0
    assert plan_here().prediction == before.prediction
    assert plan_here().notes == before.notes


def test_verify_and_explain_use_the_calibrated_profile(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("verify", "--rounds", "1", "--calibrate") == 0
    assert gplan_exits(*BALANCE) == 0
    capfd.readouterr()
    for arguments in (("verify", "--rounds", "1", "--json"), ("explain", "--json")):
        assert gplan_exits(*arguments) == 0
        assert not any("with this profile" in x for x in json.loads(capfd.readouterr().out)["notes"])


def test_report_uses_the_calibrated_profile(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gplan.reporting.report_folder.draw", lambda *_: ())
    assert gplan_exits("verify", "--rounds", "1", "--calibrate") == 0
    assert gplan_exits(*BALANCE) == 0
    assert gplan_exits("report", "gplan.plan.json") == 0
    page = Path("gplan-report/index.html").read_text(encoding="utf-8")
    assert 'id="reasons"' in page
    assert "with this profile the plan" not in page


def test_damaged_calibration(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("gplan.reporting.report_folder.draw", lambda *_: ())
    Path("gplan.calibration.json").write_text("{")
    for arguments in (BALANCE, ("verify", "--rounds", "1"), ("explain",), ("report", "gplan.plan.json")):
        assert gplan_exits(*arguments) == 3
        assert "or remove gplan.calibration.json to use the profile as it was measured" in capfd.readouterr().err
    assert gplan_exits("verify", "--rounds", "1", "--calibrate") == 0
    assert isinstance(gplan.load("gplan.calibration.json"), gplan.Calibration)


def test_unchecked_calibration_is_not_used(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("verify", "--rounds", "1", "--rivals", "0", "--calibrate") == 0
    capfd.readouterr()
    assert gplan_exits(*BALANCE) == 0
    assert (
        plan_here()
        .notes[-1]
        .startswith("gplan.calibration.json is not used: no other plan was run to check it; calibrate again")
    )


def test_a_calibration_can_be_named(here: Path) -> None:
    assert gplan_exits("verify", "--rounds", "1", "--calibrate") == 0
    Path("gplan.calibration.json").rename("elsewhere.json")
    assert gplan_exits(*BALANCE, "--calibration", "elsewhere.json") == 0
    assert any(x.startswith("calibrated by") for x in plan_here().notes)


def test_calibration_of_an_older_profile(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("verify", "--rounds", "1", "--calibrate") == 0
    measured_again = replace(profile_with(), created="2001-01-01T00:00:00+00:00")
    gplan.save(measured_again, "gplan.profile.json")
    capfd.readouterr()
    assert gplan_exits(*BALANCE) == 0
    assert "is not used: it was learned for another profile" in " ".join(capfd.readouterr().out.split())
    assert gplan_exits(*BALANCE, "--calibration", "gplan.calibration.json") == 3
    assert "calibrate again with `gplan verify --calibrate`" in capfd.readouterr().err


def test_unhelpful_calibration_must_be_named(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("verify", "--rounds", "1", "--calibrate") == 0
    found = gplan.load("gplan.calibration.json")
    assert isinstance(found, gplan.Calibration) and found.helps
    worse = tuple(replace(x, before_s=x.after_s, after_s=2 * x.measured_s) for x in found.held_out)
    gplan.save(replace(found, held_out=worse), "gplan.calibration.json")
    assert gplan_exits("show", "gplan.calibration.json") == 0
    assert "on average it does not help" in " ".join(capfd.readouterr().out.split())
    assert gplan_exits(*BALANCE) == 0
    assert "gplan.calibration.json is not used" in " ".join(capfd.readouterr().out.split())
    assert gplan_exits(*BALANCE, "--calibration", "gplan.calibration.json") == 0
    assert any(x.startswith("calibrated by") for x in plan_here().notes)


def test_a_search_uses_it_too(here: Path) -> None:
    assert gplan_exits("verify", "--rounds", "1", "--calibrate") == 0
    assert gplan_exits("balance", "--k", "2", "--microbatches", "auto", "--batch-size", "16") == 0
    assert any(x.startswith("calibrated by") for x in plan_here().notes)


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("gplan.profile.json", "gplan.calibration.json"),
        ("runs/big.json", "runs/big.calibration.json"),
        ("big.profile.json", "big.calibration.json"),
    ],
)
def test_it_lies_beside_the_profile_under_its_name(profile: str, expected: str) -> None:
    assert calibration_file(Path(profile)) == Path(expected)
