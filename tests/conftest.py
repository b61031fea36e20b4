"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))  # some benchmarks have tests

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for work spin, on cores that other tests need
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and it decides where the tables break

# How long an example takes depends on what else the host does. Examples are the same in every run; others are drawn with
# pytest --hypothesis-profile random.
settings.register_profile("random", deadline=None)
settings.register_profile("repeated", deadline=None, derandomize=True)
settings.load_profile("repeated")

SLOW = ("benchmarks", "examples", "profiler", "runtime", "partition", "evaluate")
"""Folders of tests that measure, train, start processes or search; `python3 go.py test --fast` leaves them out."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import these folders where they are left out; None leaves the choice to others."""
    return (is_slow(collection_path) and config.option.markexpr == "not slow") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in these folders."""
    for item in items:
        if is_slow(item.path):
            item.add_marker(pytest.mark.slow)


def is_slow(path: Path) -> bool:
    """Whether it is one of these folders, or in one."""
    here = Path(__file__).parent
    return path.is_relative_to(here) and path.relative_to(here).parts[:1] in [(x,) for x in SLOW]


@pytest.fixture(scope="session", autouse=True)
def collector_left_frozen() -> Iterator[None]:
    """Profiles and runs freeze the garbage collector and would release here what `older_objects_frozen` has frozen."""
    from gplan_profiler.host import host_info  # not above: pytest-xdist reads this file in a process without torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_info, "gc", SimpleNamespace(collect=gc.collect, freeze=_nothing, unfreeze=_nothing))
        yield


@pytest.fixture(scope="session", autouse=True)
def forks_run_backwards() -> None:
    """Tests fork ranks that train, also with a build of torch for CUDA."""
    from gplan_profiler.torch_compat import start_autograd

    start_autograd()


@pytest.fixture(scope="session", autouse=True)
def seeding_keeps_no_stacks() -> Iterator[None]:
    """Without a GPU, torch keeps the formatted stack of every call of manual_seed, which takes milliseconds here."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for module in (torch.cuda, torch.xpu, torch.mtia):
            if not module.is_available():
                patch.setattr(module, "traceback", SimpleNamespace(format_stack=list))
        yield


@pytest.fixture(scope="module", autouse=True)
def older_objects_frozen(collector_left_frozen: None) -> None:
    """A full collection, one for every profile and run, skips the objects made before this file: torch and other tests.

    Those take 0.3 s each time, a third of the tests of profiles and runs.
    """
    gc.collect()
    gc.freeze()


def _nothing() -> None:
    pass
