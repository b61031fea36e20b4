"""Links: two figures, or a point for every size of message that was measured."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Link, LinkPoint, Profile
from gplan.cost.stage_table import StageTable
from gplan.files.json_files import parse, to_json
from tests.made import make_profile

STEPS = Link(
    latency_s=0.9,
    bytes_per_s=100.0,
    points=(LinkPoint(num_bytes=10, seconds=1.0), LinkPoint(num_bytes=30, seconds=1.0), LinkPoint(num_bytes=50, seconds=3.0)),
)  # fmt: skip


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 0.0), (1, 1.01), (100, 2.0)])
def test_a_link_of_two_figures_is_one_line(num_bytes: int, seconds: float) -> None:
    assert Link(latency_s=1.0, bytes_per_s=100.0).transfer_s(num_bytes) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(0, 0.0), (1, 1.0), (10, 1.0), (20, 1.0), (40, 2.0), (50, 3.0), (150, 4.0)]
)
def test_a_measured_link_follows_its_points_and_then_its_bandwidth(num_bytes: int, seconds: float) -> None:
    assert STEPS.transfer_s(num_bytes) == pytest.approx(seconds)


def test_many_sizes_at_once_take_what_each_takes_alone() -> None:
    sizes = np.array([[0, 1, 10], [35, 50, 10**9]])
    alone = [[STEPS.transfer_s(int(x)) for x in row] for row in sizes]
    assert STEPS.transfers_s(sizes).tolist() == alone


links = st.builds(
    lambda steps, rate: Link(
        latency_s=0.0,
        bytes_per_s=rate,
        points=tuple(
            LinkPoint(num_bytes=n, seconds=s)
            for n, s in zip(np.cumsum([n for n, _ in steps]).tolist(), np.cumsum([s for _, s in steps]).tolist(), strict=True)
        ),
    ),
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0.0, 10.0)), max_size=6),
    st.floats(1.0, 1e9),
)  # fmt: skip


@given(links, st.lists(st.integers(0, 10_000), min_size=2))
def test_more_bytes_never_take_less_time(link: Link, sizes: list[int]) -> None:
    seconds = [link.transfer_s(size) for size in sorted(sizes)]
    assert all(low <= high * (1 + 1e-12) for low, high in pairwise(seconds))


@pytest.mark.parametrize("second", [(10, 2.0), (5, 2.0), (20, 0.5)], ids=["same size", "smaller", "quicker"])
def test_points_that_do_not_rise_are_refused(second: tuple[int, float]) -> None:
    points = (LinkPoint(num_bytes=10, seconds=1.0), LinkPoint(num_bytes=second[0], seconds=second[1]))
    with pytest.raises(
        ValueError, match=f"10 bytes in 1.0 s before {second[0]} bytes in {second[1]} s; expected rising"
    ):
        Link(latency_s=0.0, bytes_per_s=1.0, points=points)


def test_a_profile_keeps_the_points_of_its_link_and_costs_use_them() -> None:
    profile = make_profile([1, 1, 1], output_bytes=[20, 40, 0], link=STEPS)
    read = parse(Profile, to_json(profile), name="the profile")
    assert read == profile
    assert StageTable(read, 4).transfers_s(read.link)[0].tolist() == [0.0, 1.0, 2.0, 0.0]
