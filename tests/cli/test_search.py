"""`gplan balance` with something left open: what it prints, and what cannot be combined."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gplan
from gplan.cli import main
from tests.made import make_profile


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a profile of six layers at two sizes."""
    monkeypatch.chdir(tmp_path)
    profile = make_profile([0.01, 0.02, 0.03] * 2, weight_bytes=1000, stash_bytes=500, microbatch_sizes=(1, 2))
    gplan.save(profile, "gplan.profile.json")
    Path("m.toml").write_text(
        '[[host]]\nname = "a"\ndevices = 4\n\n[links]\nwithin = "10GB/s,3us"\nbetween = "1GB/s,9us"\n'
    )
    return tmp_path


def gplan_exits(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


def test_devices_are_spent_on_stages_and_replicas(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_options = ("--microbatches", "auto", "--schedule", "auto", "--recompute", "auto", "--time-limit", "5")
    assert gplan_exits("balance", "--devices", "4", "--batch-size", "16", "--memory", "1MiB", *open_options) == 0
    plan = gplan.load("gplan.plan.json")
    assert isinstance(plan, gplan.Plan)
    assert (plan.batch_size, plan.num_stages * plan.num_replicas) == (16, 4)
    assert plan.frontier and plan.proof.solver.startswith("search/")
    assert "predicted step" in capsys.readouterr().out


def test_recompute_alone_can_be_left_open(here: Path) -> None:
    assert gplan_exits("balance", "--k", "2", "--memory", "30KiB", "--recompute", "auto") == 0
    plan = gplan.load("gplan.plan.json")
    assert isinstance(plan, gplan.Plan)
    assert (plan.num_stages, plan.num_microbatches, plan.microbatch_size, plan.schedule) == (2, 8, 2, "gpipe")


def test_selected_recompute_needs_no_search(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("balance", "--k", "2", "--memory", "30KiB", "--recompute", "selected") == 0
    plan = gplan.load("gplan.plan.json")
    assert isinstance(plan, gplan.Plan)
    assert any(stage.recompute_layers for stage in plan.stages) and not plan.frontier
    assert "recomputed" in capsys.readouterr().out


MISTAKES: list[tuple[tuple[str, ...], int, str]] = [
    ((), 2, "--devices 8"),
    (("--k", "2", "--shard", "weights"), 2, "one pipeline has none"),
    (
        ("--k", "2", "--microbatches", "3", "--batch-size", "1000000000"),
        2,
        "try --batch-size 6",
    ),
    (
        ("--k", "2", "--microbatches", "1000000000"),
        2,
        "micro-batches has 4000000000 actions; expected at most 5000000",
    ),
    (("--k", "two"), 2, "'two' is neither a whole number nor auto"),
    (("--devices", "16", "--machine", "m.toml"), 2, "--devices 16: the machine has"),
    (
        ("--k", "2", "--schedule", "auto", "--minimize", "max-stage"),
        2,
        "--minimize max-stage cannot be used in a search",
    ),
    (("--devices", "4", "--solver", "milp"), 2, "--solver milp cannot be used in a search"),
    (("--k", "4", "--shard", "auto", "--solver", "milp"), 2, "--shard none, and no --devices"),
    (("--k", "2", "--machine", "m.toml", "--shard", "weights"), 2, "one pipeline has none; give the devices in all"),
    (("--devices", "4", "--pin", "a=0"), 2, "give --k a number"),
    (("--devices", "4", "--k", "5"), 2, "try --k 4 or fewer"),
    (("--k", "2", "--microbatches", "auto", "--batch-size", "7", "--microbatch-size", "2"), 2, "cannot be cut evenly"),
    (("--k", "2", "--recompute", "auto", "--memory", "100B"), 4, "the closest that was found needs"),
]


@pytest.mark.parametrize(("options", "code", "message"), MISTAKES)
def test_what_clashes_is_said_in_one_message(
    here: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], code: int, message: str
) -> None:
    assert gplan_exits("balance", *options) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "batch", "count", "schedule"),
    [((4,), 30, 4, "1f1b"), ((2, 8), 30, 4, "1f1b"), ((1, 2, 4), 28, 3, "interleaved-1f1b:2"), ((4,), 3, 2, "gpipe")],
)
def test_the_other_micro_batches_that_are_proposed_work(
    here: Path, capsys: pytest.CaptureFixture[str], sizes: tuple[int, ...], batch: int, count: int, schedule: str
) -> None:
    gplan.save(make_profile([1.0, 2.0, 3.0, 4.0], microbatch_sizes=sizes), Path("gplan.profile.json"))
    given = ("balance", "--k", "2", "--schedule", schedule)
    assert gplan_exits(*given, "--microbatches", str(count), "--batch-size", str(batch)) == 2
    option, *values = re.sub(r".*; try | or", "", capsys.readouterr().err.strip()).split()
    rest = ("--microbatches", str(count)) if option == "--batch-size" else ("--batch-size", str(batch))
    assert values
    for value in values:
        assert gplan_exits(*given, *rest, option, value) == 0, capsys.readouterr().err
