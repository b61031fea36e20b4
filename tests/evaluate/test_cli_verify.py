"""`gplan verify` from the command line, on a made host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gplan
from gplan.core import Plan, Verification
from tests.cli.test_cli import gplan_exits
from tests.evaluate.hosts import MadeHost, usual_plan, usual_profile


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan and its profile."""
    monkeypatch.chdir(tmp_path)
    gplan.save(usual_profile(), "gplan.profile.json")
    gplan.save(usual_plan(), "gplan.plan.json")
    return tmp_path


def on(host: MadeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are carried out by the made-up host, which is no host of few cores."""

    def run(plan: Plan, **_options: Any) -> gplan.Run:
        return host(plan)

    monkeypatch.setattr("gplan.api.run", run)
    monkeypatch.setattr("os.cpu_count", lambda: 64)


def test_verify_prints_and_writes(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    on(MadeHost(slowness=lambda plan: 1.0 if plan.schedule == "1f1b" else 1.25, disturbed={2}), monkeypatch)
    assert gplan_exits("verify", "--rivals", "3", "--rounds", "2") == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "step time 648 s 810 s -20.0 %" in out
    assert "from the predicted step to the measured one" in out
    assert "the fastest was schedule 1f1b" in out
    assert "1 run counted although more than half of the steps were interrupted; verify again" in out
    found = gplan.load("gplan.verification.json")
    assert isinstance(found, Verification)
    assert (found.num_rounds, len(found.contenders)) == (2, 4)
    assert gplan_exits("show", "gplan.verification.json") == 0
    assert "the fastest was schedule 1f1b" in " ".join(capfd.readouterr().out.split())


def test_json_has_the_numbers_of_the_tables(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    on(MadeHost(slowness=lambda _plan: 2.0), monkeypatch)
    assert gplan_exits("verify", "--rivals", "1", "--rounds", "1", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert [x["label"] for x in found["plans"]] == ["this plan", "equal layer counts"]
    assert found["plans"][0]["error"] == pytest.approx(-0.5)
    assert found["standing"]["median_error"] == pytest.approx(0.5)
    parts = [x["seconds"] for x in found["attribution"]["parts"]]
    assert sum(parts) == pytest.approx(found["plans"][0]["predicted_s"])
    assert found["comparison"][0]["quantity"] == "step time"


def test_interrupt_prints_and_writes_the_rounds_so_far(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    on(MadeHost(interrupted_at=3), monkeypatch)
    assert gplan_exits("verify", "--rivals", "1") == 0
    assert "interrupted: the results are of the first round" in capfd.readouterr().out
    assert isinstance(gplan.load("gplan.verification.json"), Verification)


def test_interrupt_before_the_first_run_writes_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    on(MadeHost(interrupted_at=0), monkeypatch)
    assert gplan_exits("verify") == 130
    assert capfd.readouterr().err.strip().startswith("interrupted")
    assert not Path("gplan.verification.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("absent.json",), 3, "absent.json is not there; expected a gplan plan"),
        (("--profile", "absent.json"), 3, "absent.json is not there; expected a gplan profile"),
        (("--steps", "2"), 2, "asked for 2 steps a run; expected at least 6"),
        (("gplan.profile.json",), 3, "gplan.profile.json has format 'gplan.profile/8'; expected 'gplan.plan/7'"),
    ],
)
def test_what_cannot_be_verified_is_one_message(
    arguments: tuple[str, ...], code: int, message: str, here: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    host = MadeHost()
    on(host, monkeypatch)
    assert gplan_exits("verify", *arguments) == code
    assert message in capfd.readouterr().err
    assert host.calls == []
