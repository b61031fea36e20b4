"""Gloo's threads are told to wait, and no others."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from profiler.host.links import connection_threads, deprioritize_connection_threads


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads have no names here")
def test_gloos_threads_wait_and_the_work_stays_as_it_is() -> None:
    store, own, others = dist.HashStore(), os.sched_getscheduler(0), set(connection_threads())
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)), range(2)))
    new = set(connection_threads()) - others
    assert {os.sched_getscheduler(x) for x in new} == {os.SCHED_OTHER}
    deprioritize_connection_threads()
    assert {os.sched_getscheduler(x) for x in new} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == own
    del groups
