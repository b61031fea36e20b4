"""Heartbeat files tell a rank's position, also after it was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gplan.core import ActionKind
from gplan_profiler.host.heartbeat import Heartbeat, heartbeat_file, read_heartbeat

LAYERS = ("a", "blocks.4", "c")


def place(notes: Heartbeat) -> str:
    return notes.read(LAYERS).place


def test_place_names_step_action_layer() -> None:
    notes = Heartbeat(stage=1)
    assert place(notes) == "while starting on stage 1"
    notes.enter_action("capturing")
    assert place(notes) == "while capturing the model on stage 1"
    notes.enter_step(12)
    assert place(notes) == "in step 13, taking a batch on stage 1"
    notes.enter_action(ActionKind.FORWARD, 1, 3)
    assert place(notes) == "in step 13, forward of micro-batch 3 on stage 1"
    notes.enter_layer(1)
    assert place(notes) == "in step 13, forward of micro-batch 3 on stage 1, layer blocks.4"
    notes.enter_action(ActionKind.BACKWARD, 0, 2)
    assert place(notes) == "in step 13, backward of micro-batch 2 on stage 0"
    notes.enter_layer(0)
    assert place(notes) == "in step 13, backward of micro-batch 2 on stage 0, after recomputing a"
    notes.enter_action(ActionKind.OPTIMIZER, 1, 0)
    assert place(notes) == "in step 13, optimizer on stage 1"
    notes.enter_action("saving")
    assert place(notes) == "in step 13, saving a checkpoint on stage 1"


def test_halves_of_a_backward() -> None:
    notes = Heartbeat()
    notes.enter_action(ActionKind.INPUT_GRADIENT, 3, 1)
    assert place(notes) == "input gradient of micro-batch 1 on stage 3"
    notes.enter_action(ActionKind.WEIGHT_GRADIENT, 0, 2)
    notes.enter_layer(1)
    assert place(notes) == "weight gradient of micro-batch 2 on stage 0, after recomputing blocks.4"


def test_waiting_is_told_from_computing() -> None:
    notes = Heartbeat(stage=1)
    notes.enter_step(2)
    notes.enter_action(ActionKind.FORWARD, 1, 0)
    notes.enter_layer(2)
    notes.enter_wait("neighbours")
    assert notes.read(LAYERS).is_waiting
    assert "in step 3, waiting for other stages on stage 1" in place(notes)
    with notes.waiting("ranks"):
        assert place(notes).startswith("in step 3, waiting for all ranks to come as far")
        notes.enter_layer(0)
        assert not notes.read(LAYERS).is_waiting  # whoever begins a layer does not wait


def test_wait_persists_after_error() -> None:
    notes = Heartbeat()
    with pytest.raises(RuntimeError), notes.waiting("sums"):
        raise RuntimeError
    assert notes.read(LAYERS).awaited == "sums"


def test_new_step_clears_action() -> None:
    notes = Heartbeat()
    notes.enter_action(ActionKind.FORWARD, 1, 3)
    notes.enter_layer(1)
    notes.enter_step(5)
    found = notes.read(LAYERS)
    assert (found.step, found.microbatch, found.layer, found.stage) == (5, None, None, None)


def test_every_note_moves_the_time() -> None:
    notes = Heartbeat()
    times = [notes.read(LAYERS).moved_s]
    for note in (
        lambda: notes.enter_step(1),
        lambda: notes.enter_action("reading"),
        lambda: notes.enter_layer(1),
        lambda: notes.waiting("ranks").__enter__(),
    ):
        time.sleep(0.002)
        note()
        times.append(notes.read(LAYERS).moved_s)
    assert times == sorted(set(times))


DYING = """
import os, signal, sys
from pathlib import Path
from gplan_profiler.host.heartbeat import Heartbeat
from gplan.core import ActionKind
notes = Heartbeat(Path(sys.argv[1]), stage=0)
notes.enter_step(7)
notes.enter_action(ActionKind.FORWARD, 0, 1)
notes.enter_layer(2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_heartbeat_survives_kill(tmp_path: Path) -> None:
    begun_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", DYING, str(tmp_path / "w")], check=False)
    assert done.returncode == -signal.SIGKILL
    found = read_heartbeat(tmp_path / "w", LAYERS)
    assert found is not None
    assert found.place == "in step 8, forward of micro-batch 1 on stage 0, layer c"
    assert begun_s < found.moved_s < time.monotonic()  # the processes of a host share the clock


def test_missing_and_incomplete_files(tmp_path: Path) -> None:
    file = heartbeat_file(tmp_path, 3)
    assert read_heartbeat(file, LAYERS) is None
    file.write_bytes(b"")
    assert read_heartbeat(file, LAYERS) is None
    Heartbeat(file, stage=1)
    found = read_heartbeat(file, LAYERS)
    assert found is not None and (found.place, found.is_starting) == ("while starting on stage 1", True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_raises_oserror() -> None:
    with pytest.raises(OSError, match="No space left"):
        Heartbeat(Path("/dev/full"))
