"""A batch that cannot be cut as asked: the proposed option is one with which the same request succeeds."""

from __future__ import annotations

import re

import pytest

from gplan.core.errors import UsageError
from gplan.strategy_search.planner import balance
from tests.made import make_profile


@pytest.mark.parametrize("sizes", [(4,), (1, 4), (2, 3), (3, 8)])
@pytest.mark.parametrize(("batch_size", "num_microbatches"), [(30, 8), (7, 3), (32, 5), (13, 4), (50, 16), (100, 7)])
def test_proposals_succeed(sizes: tuple[int, ...], batch_size: int, num_microbatches: int) -> None:
    profile = make_profile([1.0, 2.0, 3.0, 2.0], microbatch_sizes=sizes)
    with pytest.raises(UsageError) as caught:
        balance(profile, num_devices=2, num_microbatches=num_microbatches, batch_size=batch_size)
    counts = re.search(r"try --microbatches ([\d or]+)$", str(caught.value))
    batch = re.search(r"try --batch-size (\d+)$", str(caught.value))
    asked = [(int(x), batch_size) for x in counts[1].split(" or ")] if counts else []
    asked += [(num_microbatches, int(batch[1]))] if batch else []
    assert asked
    for count, size in asked:
        assert balance(profile, num_devices=2, num_microbatches=count, batch_size=size).batch_size == size
