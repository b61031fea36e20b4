"""What measurements and runs set in their process, and put back."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from profiler.host.share import let_work_go_on, old_objects_left_alone


def test_the_collector_leaves_old_objects_alone_inside_and_not_afterwards() -> None:
    with old_objects_left_alone():
        assert gc.get_freeze_count() > 0
        new: list[object] = []
        new.append(new)
        del new
        assert gc.collect() > 0  # what is made inside is still collected
    assert gc.get_freeze_count() == 0


def test_after_an_error_old_objects_are_looked_at_again() -> None:
    with pytest.raises(KeyboardInterrupt), old_objects_left_alone():
        raise KeyboardInterrupt
    assert gc.get_freeze_count() == 0


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads have no names here")
def test_the_threads_of_gloo_interrupt_nothing_and_all_others_stay_as_they_are() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)), range(2)))
    assert len(groups) == 2
    let_work_go_on()
    assert _policies() == {(True, os.SCHED_BATCH), (False, os.SCHED_OTHER)}
    let_work_go_on(False)
    assert _policies() == {(True, os.SCHED_OTHER), (False, os.SCHED_OTHER)}


def _policies() -> set[tuple[bool, int]]:
    """Of the threads of this process: whether it is one of gloo's, and how it is scheduled."""
    names = Path("/proc/self/task").glob("*/comm")
    return {(x.read_text().startswith("gloo"), os.sched_getscheduler(int(x.parent.name))) for x in names}
