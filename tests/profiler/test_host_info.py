"""The state of GPUs by nvidia-smi, and the garbage collector."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from gplan_profiler.host import host_info
from gplan_profiler.host.host_info import garbage_collector_frozen, gpu_state, parse_gpu_state

ONE = "NVIDIA H100 80GB HBM3, 550.54.15, 1980 MHz, 2619 MHz, 700.00 W, 34\n"


def test_a_gpus_line_becomes_names_and_values() -> None:
    assert parse_gpu_state(ONE) == (
        ("name", "NVIDIA H100 80GB HBM3"),
        ("driver", "550.54.15"),
        ("SM clock", "1980 MHz"),
        ("memory clock", "2619 MHz"),
        ("power limit", "700.00 W"),
        ("temperature, degrees C", "34"),
    )


def test_several_gpus_are_told_apart() -> None:
    found = dict(parse_gpu_state(ONE + ONE.replace("34", "61")))
    assert (found["GPU 0 temperature, degrees C"], found["GPU 1 temperature, degrees C"]) == ("34", "61")


def test_what_a_gpu_does_not_tell_is_left_out() -> None:
    names = [name for name, _ in parse_gpu_state("GeForce, 470.1, 300 MHz, [N/A], [Not Supported], 40\n")]
    assert names == ["name", "driver", "SM clock", "temperature, degrees C"]


@pytest.mark.parametrize("text", ["", "No devices were found\n", "Failed to initialize NVML: Unknown Error\n"])
def test_words_instead_of_values_say_nothing(text: str) -> None:
    assert parse_gpu_state(text) == ()


def play(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_nvidia_smi_is_asked_and_only_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(tmp_path, f'echo "$@" > {tmp_path}/arguments\necho "{ONE.strip()}"', monkeypatch)
    assert gpu_state() == parse_gpu_state(ONE)
    arguments = (tmp_path / "arguments").read_text().split()
    assert [x.split("=")[0] for x in arguments] == ["--query-gpu", "--format"]


def test_a_host_without_gpus_has_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_state() == ()
    play(tmp_path, "exit 9", monkeypatch)
    assert gpu_state() == ()


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector as it is outside of these tests: see conftest.py."""
    monkeypatch.setattr(host_info, "gc", gc)
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_garbage_collector_frozen() -> None:
    with garbage_collector_frozen():
        assert gc.get_freeze_count() > 0
        new: list[object] = []
        new.append(new)
        del new
        assert gc.collect() > 0  # what is made inside is still collected
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_after_an_error_old_objects_are_looked_at_again() -> None:
    with pytest.raises(KeyboardInterrupt), garbage_collector_frozen():
        raise KeyboardInterrupt
    assert gc.get_freeze_count() == 0
