"""What measurements and runs set in their process, and put back."""

from __future__ import annotations

import gc

import pytest

from profiler.host.host_info import garbage_collector_frozen


def test_the_collector_leaves_old_objects_alone_inside_and_not_afterwards() -> None:
    with garbage_collector_frozen():
        assert gc.get_freeze_count() > 0
        new: list[object] = []
        new.append(new)
        del new
        assert gc.collect() > 0  # what is made inside is still collected
    assert gc.get_freeze_count() == 0


def test_after_an_error_old_objects_are_looked_at_again() -> None:
    with pytest.raises(KeyboardInterrupt), garbage_collector_frozen():
        raise KeyboardInterrupt
    assert gc.get_freeze_count() == 0
