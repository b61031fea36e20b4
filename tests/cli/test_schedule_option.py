"""How `gplan balance` takes a schedule: by its name, with a number of chunks, left open, or as a file with an order."""

from __future__ import annotations

from pathlib import Path

import pytest

import gplan
from gplan.cli import main
from tests.made import make_profile


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a profile of six layers and some orders."""
    monkeypatch.chdir(tmp_path)
    gplan.save(make_profile([1.0] * 6, microbatch_sizes=(2,)), "gplan.profile.json")
    Path("mine.csv").write_text("0F0,0F1,0B0,0B1,2F0,2F1,2B0,2B1\n1F0,1F1,1B0,1B1\n")
    Path("two.csv").write_text("0F0 0F1 0B0 0B1  # the first device\n1F0 1B0 1F1 1B1\n")
    Path("stuck.csv").write_text("0F0 0B0\n1F0 1B0 2F0 2B0\n")
    return tmp_path


def planned() -> gplan.Plan:
    plan = gplan.load("gplan.plan.json")
    assert isinstance(plan, gplan.Plan)
    return plan


def balance_exits(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["balance", *arguments])
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    ("name", "found"), [("1f1b", "1f1b"), ("interleaved-1f1b:3", "interleaved-1f1b:3"), ("looped-bfs", "looped-bfs:2")]
)
def test_k_counts_devices_however_many_chunks_they_have(here: Path, name: str, found: str) -> None:
    assert balance_exits("--k", "2", "--schedule", name) == 0
    assert (planned().schedule, planned().num_devices, planned().num_microbatches) == (found, 2, 8)


@pytest.mark.parametrize("options", [(), ("--k", "2"), ("--k", "2", "--microbatches", "2")])
def test_a_file_with_an_order_says_how_many_devices_and_micro_batches(here: Path, options: tuple[str, ...]) -> None:
    assert balance_exits("--schedule", "two.csv", *options) == 0
    assert planned().schedule == "custom:0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1"
    assert (planned().num_devices, planned().num_microbatches) == (2, 2)


def test_an_open_schedule_is_left_to_the_search(here: Path) -> None:
    assert balance_exits("--k", "2", "--schedule", "auto") == 0
    assert (planned().proof.solver[:7], planned().num_microbatches) == ("search/", 8)


MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("--k", "2", "--schedule", "1f2b"), "schedule '1f2b' is not known; expected one of gpipe, "),
    (("--k", "2", "--schedule", "gpipe:2"), "gpipe has 1 chunks a device"),
    (("--k", "2", "--schedule", "interleaved-1f1b:many"), "expected a number"),
    (("--k", "2", "--schedule", "absent.csv"), "absent.csv cannot be read as an order"),
    (("--schedule", "stuck.csv"), "stuck.csv"),
    (("--schedule", "mine.csv"), "mine.csv"),
    (
        ("--schedule", "two.csv", "--k", "3"),
        "asked for 3 devices, but the custom order has 2 devices; leave the number out",
    ),
    (("--schedule", "two.csv", "--k", "auto"), "asked for auto, but the custom order has 2 devices"),
    (("--schedule", "two.csv", "--microbatches", "8"), "asked for 8 micro-batches, but the custom order has 2"),
    (("--schedule", "two.csv", "--microbatches", "1"), "asked for 1 micro-batch, but the custom order has 2"),
]


@pytest.mark.parametrize(("options", "told"), MISTAKES)
def test_a_schedule_that_cannot_be_used_is_one_message(
    here: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], told: str
) -> None:
    assert balance_exits(*options) == 2
    assert told in capsys.readouterr().err
    assert not Path("gplan.plan.json").exists()
