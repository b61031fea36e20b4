"""Neighbours work only inside `running`, and are gone at the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

from gplan_profiler.timing import neighbours as module
from gplan_profiler.timing.neighbours import neighbours

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="neighbours need Linux")


def write_a_dot(path: Path) -> Callable[[], None]:
    def work() -> None:
        with path.open("a") as file:
            file.write(".")
        time.sleep(0.001)

    return work


def wait_for_dots(path: Path, more_than: int = 0) -> int:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if path.exists() and path.stat().st_size > more_than:
            return path.stat().st_size
        time.sleep(0.005)
    raise AssertionError("the neighbour did not work")


def test_a_neighbour_works_once_and_then_only_inside_the_block(tmp_path: Path) -> None:
    dots = tmp_path / "dots"
    with neighbours([{0}], write_a_dot(dots), ()) as others:
        time.sleep(0.05)
        assert dots.stat().st_size == 1  # the work before the first stop
        with others.running():
            wait_for_dots(dots, more_than=1)
        time.sleep(0.02)
        held = dots.stat().st_size
        time.sleep(0.05)
        assert dots.stat().st_size == held
        with others.running():
            wait_for_dots(dots, more_than=held)


def test_nothing_is_left_at_the_end() -> None:
    with neighbours([{0}, {0}], lambda: time.sleep(0.01), ()) as others, others.running():
        assert others.are_alive
    assert not others.are_alive


def test_nothing_is_left_where_a_later_one_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started, fork = list[int](), module._fork

    def fork_once(*args: Any) -> int:
        if started:
            raise BlockingIOError("no more processes")
        started.append(fork(*args))
        return started[0]

    monkeypatch.setattr(module, "_fork", fork_once)
    with pytest.raises(BlockingIOError), neighbours([{0}, {0}], lambda: time.sleep(0.01), ()):
        pass
    with pytest.raises(ChildProcessError):
        os.waitpid(started[0], os.WNOHANG)


def test_a_neighbour_that_fails_is_seen() -> None:
    def fail() -> None:
        raise ValueError

    with neighbours([{0}], fail, ()) as others:
        deadline = time.monotonic() + 10
        with others.running():
            while others.are_alive and time.monotonic() < deadline:
                time.sleep(0.005)
        assert not others.are_alive


def test_a_neighbour_that_waits_forever_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STUCK_S", 0.2)
    with neighbours([{0}], Event().wait, ()) as others:
        assert not others.are_alive


def test_a_process_with_several_threads_has_neighbours_that_work() -> None:
    """A fork has none of the OpenMP threads of its parent."""
    before, matrix = torch.get_num_threads(), torch.ones(512, 512)

    def work() -> None:
        torch.mm(matrix, matrix).add_(1)

    torch.set_num_threads(2)
    work()
    try:
        with neighbours([{0}], work, ()) as others, others.running():
            assert others.are_alive
    finally:
        torch.set_num_threads(before)


def test_a_neighbour_changes_no_weight_of_ours() -> None:
    weight = nn.Parameter(torch.zeros(4))

    def work() -> None:
        with torch.no_grad():
            weight.add_(1)

    with neighbours([{0}], work, (weight,)) as others, others.running():
        time.sleep(0.1)
    assert torch.equal(weight, torch.zeros(4))
