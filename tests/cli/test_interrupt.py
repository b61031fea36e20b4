"""An interrupt ends the command line with one line and exit code 130, also while it is imported or cleans up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.forked import forking

SCRIPT = """
import sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.argv[0] = "gplan"
from gplan.cli import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    "module", ["click", "gplan.cli.verbs", "gplan.cli.simulate", "numpy", "msgspec", "gplan.simulation.schedule_trial"]
)
def test_interrupted_import_is_one_line(module: str) -> None:
    command = [sys.executable, "-c", SCRIPT, module, "simulate", "--k", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip().startswith("interrupted") and done.stderr.strip().count("\n") == 0


MODEL = """
import os, signal, time
def model():
    open("loading", "w").close()
    {sends}
    time.sleep(60)
"""


def profiled(folder: Path, sends: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The end of `gplan profile` of a model file that sends a signal."""
    (folder / "model.py").write_text(MODEL.format(sends=sends))
    command, env = [sys.executable, "-m", "gplan", "profile", "model.py"], {**os.environ, **environment}
    with forking():
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=env)


@pytest.mark.parametrize(
    ("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)], ids=["sigterm", "sighup", "sigint"]
)
def test_signal_to_the_process_alone_ends_it_as_an_interrupt(tmp_path: Path, name: str, code: int) -> None:
    done = profiled(tmp_path, f"os.kill(os.getpid(), signal.{name})")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.strip().splitlines() == ["interrupted; no file was left half-written"]


def test_interrupted_profile_says_what_was_done_and_how_to_make_a_shorter_one(tmp_path: Path) -> None:
    model = """
import os, signal, time, torch
def model():
    return torch.nn.Linear(4, 4)
def loss(output, target):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
def batches(n):
    while True:
        yield torch.ones(n, 4), None
"""
    (tmp_path / "model.py").write_text(model)
    command = [sys.executable, "-m", "gplan", "profile", "model.py"]
    with forking():
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ})
    shorter = "one --microbatch-size, --contention 0 and a small --budget (ten rounds are the least) take less time"
    assert (done.returncode, done.stdout) == (130, "")
    assert (
        done.stderr.strip()
        == f"interrupted; 0% done: running the model and its loss; no profile was written; {shorter}"
    )


def test_interrupt_that_the_shell_ignores_stays_ignored_and_sigterm_ends(tmp_path: Path) -> None:
    sends = "[os.kill(os.getpid(), x) for x in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)]"
    (tmp_path / "model.py").write_text(MODEL.format(sends=sends))
    script = 'trap "" INT HUP; exec "$0" -m gplan profile model.py'  # as nohup, and `&` in a script, have it
    command = ["sh", "-c", script, sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (143, "")
    assert done.stderr.strip().splitlines() == ["interrupted; no file was left half-written"]


def test_forked_worker_is_ended_by_the_signal_alone(tmp_path: Path) -> None:
    sends = "pid = os.fork() or time.sleep(60); time.sleep(0.5); os.kill(pid, 15); print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])); 1 / 0"
    done = profiled(tmp_path, sends)
    assert done.returncode == 3 and set(done.stdout.split()) == {"143"}
    assert "ZeroDivisionError" in done.stderr and "interrupted" not in done.stderr


def test_rank_of_a_launcher_keeps_its_signals(tmp_path: Path) -> None:
    done = profiled(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)", RANK="1")
    assert done.returncode == -signal.SIGTERM
