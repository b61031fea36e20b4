"""`gplan simulate` as a person uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gplan
from gplan.cli import main
from gplan.schedules.registry import every_schedule
from tests.scheduled import scheduled_plan


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def gplan_exits(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert gplan_exits("simulate", *arguments) == 0
    return capsys.readouterr().out


def test_one_line_teaches_a_schedule(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "--k", "8", "--schedule", "1f1b", "--microbatches", "16")
    assert out.startswith(
        "1f1b: 8 devices, 16 micro-batches\nper stage and micro-batch: forward 1, backward 2\nstep 69"
    )
    assert "step 69, bubble 30.4 %; equal stages, free transfers: (K-1)/(M+K-1) = 30.4 %" in out
    assert "All idle time is for filling and draining the pipeline" in out
    assert list(here.iterdir()) == []


def test_as_many_times_as_devices_say_how_many_there_are(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "--forward", "1,1,2", "--backward", "2,2,4", "--link", "0.1", "--recompute", "always")
    assert out.startswith("gpipe: 3 devices, 12 micro-batches, recompute always\n")
    assert "per stage and micro-batch: forward 1 to 2, backward 2 to 4, transfer 0.1" in out
    assert "is for slower stages; device 2 computes longest" in out


def test_a_backward_can_be_given_in_its_halves(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "--k", "2", "--schedule", "zb-h1", "--backward", "1.5+0.5", "--json"))
    assert [(x["input_gradient_s"], x["weight_gradient_s"], x["backward_s"]) for x in found["costs"]] == [
        (1.5, 0.5, 2)
    ] * 2


def test_the_numbers_of_a_custom_order_come_from_its_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert printed(capsys, "--schedule", "mine.csv").startswith("custom order: 2 devices, 2 micro-batches\n")
    assert printed(capsys, "--schedule", "mine.csv", "--k", "2", "--microbatches", "2", "--optimizer", "1")


def test_json_has_the_spans_and_what_each_device_waits_for(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "--k", "2", "--microbatches", "3", "--json"))
    assert len(found["timeline"]["spans"]) == 2 * (3 * 2 + 1)
    assert found["law"] == {"formula": "(K-1)/(M+K-1)", "bubble": 0.25}
    assert [x["idle_s"]["warm-up"] for x in found["devices"]] == [3.0, 1.0]


@pytest.mark.parametrize("schedule", ["interleaved-1f1b:3", "custom:0F0 2F0 2B0 0B0 / 1F0 3F0 3B0 1B0"])
def test_among_all_schedules_is_that_of_the_plan(schedule: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = scheduled_plan(schedule, num_microbatches=1)
    gplan.save(plan, here / "gplan.plan.json")
    found = json.loads(printed(capsys, "--schedule", "all", "--json"))
    steps = {x["name"]: x["step_s"] for x in found["trials"]}
    assert steps[schedule] == plan.prediction.step_s
    assert f"looped-bfs:{plan.num_stages // 2}" in steps


def test_all_schedules_stand_in_one_table_the_shortest_step_first(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(capsys, "--k", "4", "--microbatches", "8", "--schedule", "all")
    names = [line.split()[0] for line in out.splitlines()[3 : 3 + len(every_schedule())]]
    assert sorted(names) == sorted(every_schedule())
    found = json.loads(printed(capsys, "--k", "4", "--microbatches", "8", "--schedule", "all", "--json"))
    assert [x["schedule"] for x in found["trials"]] == names
    assert [x["step_s"] for x in found["trials"]] == sorted(x["step_s"] for x in found["trials"])
    assert found["left_out"] == []


def test_a_plan_is_simulated_in_seconds_with_its_memory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gplan.save(scheduled_plan("zb-v"), "gplan.plan.json")
    assert "peak memory" in printed(capsys)
    assert "step 18.2 s" in printed(capsys, "gplan.plan.json")
    assert "5 micro-batches" in printed(capsys, "--microbatches", "5")
    assert "left out: gpipe: the plan has 4 stages on 2 devices, gpipe has 2" in printed(capsys, "--schedule", "all")


MISTAKES: list[tuple[tuple[str, ...], int, str]] = [
    ((), 2, "how many devices? give --k 4, or a plan; there is no gplan.plan.json here"),
    (("--forward", "2"), 2, "how many devices? give --k 4"),
    (("--k", "0"), 2, "'--k'"),
    (("--k", "2", "--microbatches", "0"), 2, "'--microbatches'"),
    (("--k", "2", "--forward", "fast"), 2, "--forward 'fast': expected a number above 0"),
    (("--k", "2", "--forward", "0"), 2, "--forward '0': expected a number above 0"),
    (("--k", "2", "--backward", "1+"), 2, "--backward '': expected a number above 0"),
    (("--k", "2", "--link", "-1"), 2, "--link '-1': expected a number of 0 or more"),
    (("--k", "2", "--link", "inf"), 2, "--link 'inf'"),
    (("--k", "2", "--optimizer", "1ms"), 2, "--optimizer '1ms': expected a number of 0 or more, without a unit"),
    (("--k", "3", "--forward", "1,2"), 2, "forward has 2 values; expected 1 or 3, one a device"),
    (("--k", "2", "--schedule", "2f2b"), 2, "schedule '2f2b' is not known; expected one of gpipe, "),
    (("--k", "2", "--schedule", "1f1b:3"), 2, "1f1b has 1 chunks a device"),
    (("--schedule", "absent.csv"), 2, "absent.csv cannot be read as an order"),
    (("--schedule", "stuck.txt"), 2, "stuck.txt: "),
    (
        ("--schedule", "own.txt", "--k", "3"),
        2,
        "asked for 3 devices, but the custom order has 2 devices; leave the number out",
    ),
    (
        ("--schedule", "own.txt", "--microbatches", "2"),
        2,
        "asked for 2 micro-batches, but the custom order has 1 micro-batch",
    ),
    (("plan.json", "--link", "1"), 2, "plan.json has its own devices and costs; leave out --link"),
    (("plan.json", "--k", "2"), 2, "leave out --k"),
    (("plan.json", "--schedule", "1f1b"), 2, "the plan has 4 stages on 2 devices, 1f1b has 2; balance anew"),
    (("elsewhere.json",), 3, "elsewhere.json is not there"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "told"), MISTAKES, ids=lambda x: " ".join(x) if isinstance(x, tuple) else ""
)
def test_a_mistake_is_one_message_with_its_exit_code(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, told: str
) -> None:
    Path("own.txt").write_text("0F0 0B0\n1F0 1B0\n")
    Path("stuck.txt").write_text("0F0 0B0\n1F0 1B0 2F0 2B0\n")
    gplan.save(scheduled_plan("zb-v"), "plan.json")
    assert gplan_exits("simulate", *arguments) == code
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err
