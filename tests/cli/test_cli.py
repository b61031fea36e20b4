"""The command line as a person uses it: verbs in a row, and every mistake one message with its exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gplan
from gplan.cli import main
from tests.made import make_profile

MODEL = """
import torch
from torch import nn

def model(width=8, depth=5):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

def loss(output, target):
    return ((output - target) ** 2).mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def batches(batch_size, width=8):
    generator = torch.Generator().manual_seed(0)
    while True:
        x = torch.randn(batch_size, width, generator=generator)
        yield x, -x
"""


PROFILE = ("profile", "model.py", "--microbatch-size", "2", "--link", "1GB/s", "--budget", "0.1", "--contention", "0")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a model file."""
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def gplan_exits(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


def made_profile(path: Path = Path("gplan.profile.json")) -> None:
    gplan.save(make_profile([1.0, 2.0, 3.0, 4.0], weight_bytes=1000, stash_bytes=100, microbatch_sizes=(2,)), path)


def test_the_four_verbs_follow_each_other_without_naming_files(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits(*PROFILE[:-2], "--set", "depth=6") == 0  # beside a process that computes
    assert gplan_exits("balance", "--k", "2", "--microbatches", "4") == 0
    assert gplan_exits("run", "--steps", "6", "--check") == 0
    assert gplan_exits("report") == 0
    out = capfd.readouterr().out
    told = ("layer", "predicted step", "lower bound", "predicted versus measured", "gradients equal", "index.html")
    assert [x for x in told if x not in out] == []
    run = gplan.load("gplan.run.json")
    assert isinstance(run, gplan.Run)
    assert run.plan.model.settings == (("depth", "6"),)
    assert len(run.losses) == 6
    assert {"index.html", "trace.json", "pipeline.png"} <= {x.name for x in Path("gplan-report").iterdir()}


def test_json_is_the_file_itself(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_profile()
    assert gplan_exits("balance", "--k", "2", "--json") == 0
    printed = capsys.readouterr().out
    assert printed.encode() == Path("gplan.plan.json").read_bytes()


MISTAKES: list[tuple[tuple[str, ...], int, str]] = [
    (("profile", "absent.py"), 3, "absent.py is not there"),
    (("profile", "model.py:Net"), 3, "has no Net"),
    (("profile", "model.py", "--set", "widht=3"), 2, "expected depth, width"),
    (("profile", "model.py", "--set", "width"), 2, "expected key=value"),
    (("profile", "model.py", "--microbatch-size", "two"), 2, "such as 1,2,4"),
    (("profile", "model.py", "--link", "fast"), 2, "25GB/s,5us"),
    (("run", "other.json"), 2, "gplan run --plan other.json"),
    (("balance", "--k", "5"), 2, "4 layers"),
    (("balance", "--k", "0"), 2, "asked for 0 stages"),
    (("balance", "--k", "2", "--microbatches", "0"), 2, "asked for 0 micro-batches"),
    (("balance", "--k", "2", "--memory", "lots"), 2, "16GiB"),
    (("balance", "--k", "2", "--memory", "1KB"), 4, "KiB"),
    (("balance", "--k", "2", "--microbatches", "3", "--batch-size", "16"), 2, "cannot be cut into 3 equal"),
    (("balance", "--k", "2", "--microbatch-size", "64"), 2, "asked for 64"),
    (("balance", "--k", "2", "--microbatch-size", "0"), 2, "at least 1 sample"),
    (("balance", "--k", "2", "--batch-size", "-3"), 2, "at least 1 sample"),
    (("profile", "model.py", "--input-shape", "2,8"), 2, "defines batches, which have inputs"),
    (("profile", "model.py", "--link", "100Gb/s"), 2, "reads as bits"),
    (("balance", "elsewhere.json", "--k", "2"), 3, "elsewhere.json is not there"),
    (("balance",), 2, "--k"),
    (("run",), 3, "gplan.plan.json is not there; expected"),
    (("report",), 2, "run `gplan balance` or `gplan run` first"),
    (("report", "gplan.profile.json"), 2, "is a profile"),
    (
        ("balance", "--k", "two"),
        2,
        "error: invalid value for '--k': 'two' is neither a whole number nor auto; see gplan",
    ),
    (("export", "gplan.plan.json"), 2, "error: missing option '--to'. Choose from: "),
    (("blance",), 2, "error: no such command 'blance'; similar: balance; see gplan --help"),
    (("show", "gplan.profle.json"), 3, "gplan.profle.json is not there, but gplan.profile.json is; expected"),
    (("profile", "modle.py"), 3, "), but model.py is; name a Python file"),
    (("nonsense",), 2, "error: no such command 'nonsense'; see gplan --help"),
]


PRINTING = """
import os, subprocess, sys
print("imported")
os.write(1, b"as C does\\n")
subprocess.run([sys.executable, "-c", "print('a child')"])
"""


def printed_by(capfd: pytest.CaptureFixture[str], code: int, *arguments: str) -> tuple[str, str]:
    assert gplan_exits(*arguments) == code
    return capfd.readouterr()


def test_prints_of_a_model_file_leave_stdout_to_the_json(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "model.py").write_text(PRINTING + MODEL)
    balance, run = ("balance", "--k", "2", "--microbatches", "2"), ("run", "--engine", "virtual", "--steps", "2")
    for verb in (PROFILE, balance, run):
        out, err = printed_by(capfd, 0, *verb, "--json")
        json.loads(out)
        printed = {"imported", "as C does", "a child"} & set(err.splitlines())
        assert len(printed) == (0 if verb[0] == "balance" else 3)


def test_a_mistake_with_json_leaves_stdout_empty(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "model.py").write_text("print('imported')")
    out, err = printed_by(capfd, 3, "profile", "model.py", "--json")
    assert out == "" and err.startswith("imported\nerror: ")


@pytest.mark.parametrize(
    ("arguments", "code", "told"), MISTAKES, ids=lambda x: " ".join(x) if isinstance(x, tuple) else ""
)
def test_a_mistake_is_one_message_with_its_exit_code_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, told: str
) -> None:
    made_profile()
    before = sorted(x.name for x in here.iterdir())
    assert gplan_exits(*arguments) == code
    err = capsys.readouterr().err
    assert told in err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert sorted(x.name for x in here.iterdir() if x.name != "__pycache__") == before


def test_a_run_of_a_plan_for_another_model_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_profile()
    assert gplan_exits("balance", "--k", "2") == 0
    assert gplan_exits("run", "model.py", "--engine", "virtual") == 3
    assert "made for made with 4 layers (a to d); model.py has 5 layers (0 to 4)" in capsys.readouterr().err
    assert not Path("gplan.run.json").exists()


def test_a_model_that_is_frozen_whole_is_profiled(here: Path) -> None:
    (here / "model.py").write_text(
        MODEL.replace("for _ in range(depth)))", "for _ in range(depth))).requires_grad_(False)")
    )
    assert gplan_exits(*PROFILE) == 0


def test_batches_that_fail_are_named_with_their_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "model.py").write_text(MODEL.replace("        yield x, -x", "        yield x, -missing"))
    assert gplan_exits("profile", "model.py", "--microbatch-size", "2", "--link", "1GB/s") == 3
    assert "batches in model.py failed: NameError" in capsys.readouterr().err


def test_a_warning_of_a_run_is_not_repeated_as_a_note(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits(*PROFILE) == 0
    assert gplan_exits("balance", "--k", "2", "--microbatches", "4") == 0
    with Path("model.py").open("a") as file:
        file.write("\nCHANGED = True\n")
    with pytest.warns(UserWarning, match="changed after it was profiled"):
        assert gplan_exits("run", "--steps", "2", "--engine", "virtual") == 0
    assert "changed after it was profiled" not in capfd.readouterr().out
    assert gplan_exits("show", "gplan.run.json") == 0
    assert "changed after it was profiled" in capfd.readouterr().out


@pytest.mark.slow
def test_the_same_run_works_under_torchrun(here: Path) -> None:
    assert gplan_exits(*PROFILE) == 0
    assert gplan_exits("balance", "--k", "2", "--microbatches", "4") == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
               "--nproc-per-node", "2", "-m", "gplan", "run", "--steps", "5", "--check"]  # fmt: skip
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gradients equal") == 1
    assert isinstance(gplan.load("gplan.run.json"), gplan.Run)


def test_a_place_for_the_plan_that_cannot_be_written_is_named(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("profile", "model.py", "--device", "meta", "--hardware", "h100") == 0
    assert gplan_exits("balance", "--k", "2", "--output", "model.py/plan.json") == 3
    assert "cannot be written" in capfd.readouterr().err


def test_names_of_files_are_no_markup(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("profile", "model.py", "--device", "meta", "--hardware", "h100") == 0
    assert gplan_exits("balance", "--k", "2", "--output", "plans[best].json") == 0
    assert "wrote plans[best].json" in capfd.readouterr().out


def test_a_profile_for_hardware_elsewhere_is_computed_and_says_so(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert gplan_exits("profile", "model.py", "--device", "meta", "--hardware", "H100", "--json") == 0
    found = gplan.load(Path("gplan.profile.json"))
    assert isinstance(found, gplan.Profile)
    assert (found.origin, found.device.name, found.num_samples) == ("computed", "h100", 0)
    assert json.loads(capfd.readouterr().out)["origin"] == "computed"
    assert gplan_exits("balance", "--k", "2") == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--device", "meta"], 2, "name it: .*h100.* or a TOML or JSON file"),
        (["--device", "meta", "--hardware", "abacus"], 2, "abacus"),
        (["--hardware", "h100"], 2, "--hardware goes with device 'meta'"),
        (["--device", "tpu"], 2, "expected auto, cpu, cuda, cuda:1 or meta"),
        (["--contention", "9999"], 2, "has cores for"),
        (["--output", "model.py/p.json"], 3, "cannot be written"),
    ],
)
def test_options_of_profile_that_cannot_be_used_are_named(
    here: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert gplan_exits("profile", "model.py", *arguments) == code
    assert re.search(words, capfd.readouterr().err)
