"""What measurements and runs set in their process, and put back."""

from __future__ import annotations

import gc

import pytest

from profiler.host.host_info import old_objects_left_alone


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
