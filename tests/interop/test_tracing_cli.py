"""`gplan import-trace` as a person uses it: traces in, tables, a run and a newer profile out,
mistakes in plain words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gplan
from gplan.cli import main
from gplan.core import Plan, Profile, Run
from tests.made import make_profile

SAMPLES = Path(__file__).parent / "traces"


def sample(name: str) -> list[str]:
    return [str(SAMPLES / f"{name}.rank{rank}.json.gz") for rank in range(2)]


def gplan_exits(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a profile and the plan that was run."""
    monkeypatch.chdir(tmp_path)
    profile = make_profile([1e-3, 2e-3, 3e-3, 4e-3], weight_bytes=1000)
    gplan.save(profile, "gplan.profile.json")
    gplan.save(gplan.balance(profile, num_devices=2, num_microbatches=4, schedule="1f1b"), "gplan.plan.json")
    gplan.save(gplan.balance(profile, num_devices=2, num_microbatches=4, schedule="looped-bfs:2"), "looped.plan.json")
    return tmp_path


def test_traces_alone_become_a_chart_and_tables(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("import-trace", *sample("dualpipev")) == 0
    out = capsys.readouterr().out
    assert "traced step: 4 stages on 2 devices, 4 micro-batches, in a custom order" in out
    assert "medians of 3 steps, the first 1 left out" in out
    assert "weight gradient" in out
    assert "note: clocks: the clock of the host that all ranks ran on" in out
    assert sorted(x.name for x in here.iterdir()) == ["gplan.plan.json", "gplan.profile.json", "looped.plan.json"]


def test_traces_alone_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("import-trace", *sample("zero-bubble"), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["timeline"]["num_devices"] == 2
    assert len(printed["step_s"]) == 4


def test_with_the_plan_they_become_a_run_that_is_shown_and_reported(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gplan_exits("import-trace", *sample("1f1b"), "--plan", "gplan.plan.json") == 0
    out = capsys.readouterr().out
    assert "predicted versus measured" in out
    assert "wrote gplan.run.json" in out
    run = gplan.load("gplan.run.json")
    assert isinstance(run, Run)
    assert isinstance(gplan.load("gplan.plan.json"), Plan)
    assert gplan_exits("show", "gplan.run.json") == 0
    assert "imported from torch.profiler traces of 2 ranks" in " ".join(capsys.readouterr().out.split())
    assert gplan_exits("import-trace", *sample("1f1b"), "--plan", "gplan.plan.json", "--run", "a/b.json", "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path("a/b.json").read_text())


def test_a_run_in_another_order_than_the_plans_is_shown_without_parts_of_its_error(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gplan_exits("import-trace", *sample("interleaved"), "--plan", "looped.plan.json") == 0
    assert gplan_exits("show", "gplan.run.json") == 0
    for out in capsys.readouterr().out.split("wrote gplan.run.json"):
        assert "the error cannot be divided into parts" in out
        assert "than predicted" not in out
        assert "the order differs from looped-bfs:2" in out


def test_a_new_plan_needs_no_new_profiling(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = "--plan", "gplan.plan.json", "--profile", "gplan.profile.json", "--output", "new.profile.json"
    assert gplan_exits("import-trace", *sample("1f1b"), *files) == 0
    assert "wrote new.profile.json" in capsys.readouterr().out
    newer = gplan.load("new.profile.json")
    assert isinstance(newer, Profile)
    assert newer.layers != gplan.load("gplan.profile.json").layers  # type: ignore[union-attr]
    assert gplan_exits("balance", "new.profile.json", "--k", "2", "--microbatches", "4") == 0


MISTAKES = [
    (["absent.json"], 3, "absent.json cannot be read: No such file"),
    (["gplan.plan.json"], 3, "gplan.plan.json is no trace, or is cut off"),
    ([], 2, "missing argument"),
    ([*sample("interleaved"), "--plan", "gplan.plan.json"], 3, "the traces have 4 stages on 2 devices"),
    (
        [*sample("zero-bubble"), "--plan", "looped.plan.json"],
        3,
        "the traces have a backward 0I0 0W0; the plan has 0B0",
    ),
    ([sample("interleaved")[0]], 3, "stage 1 is missing"),
    ([*sample("1f1b"), "--profile", "gplan.profile.json", "--output", "x"], 2, "give --plan gplan.plan.json"),
    ([*sample("1f1b"), "--plan", "gplan.plan.json", "--output", "x"], 2, "--output goes with --profile"),
    ([*sample("1f1b"), "--plan", "gplan.plan.json", "--profile", "gplan.profile.json"], 2, "goes with --output"),
    ([*sample("1f1b"), "--run", "x"], 2, "--run needs the plan that was run"),
    (
        [
            *sample("1f1b"),
            *("--plan", "gplan.plan.json"),
            *("--profile", "gplan.profile.json", "--output", "./gplan.profile.json"),
        ],
        2,
        "gplan.profile.json would overwrite the profile",
    ),
    ([*sample("1f1b"), "--plan", "gplan.profile.json"], 3, "gplan.profile.json has format"),
]


@pytest.mark.parametrize(("arguments", "code", "told"), MISTAKES, ids=[told for _, _, told in MISTAKES])
def test_a_mistake_is_one_message_with_its_exit_code_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, told: str
) -> None:
    before = sorted(x.name for x in here.iterdir())
    assert gplan_exits("import-trace", *arguments) == code
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err
    assert sorted(x.name for x in here.iterdir()) == before


def test_the_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("import-trace", "--help") == 0
    text = capsys.readouterr().out
    assert "Examples:" in text
    assert "--json" in text
