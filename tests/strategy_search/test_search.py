"""The search as a whole: against the best plan of every setting, and interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gplan.core import Constraints, Link, Pin, Plan, Profile
from gplan.core.errors import NoPlanError, UsageError
from gplan.partition.validation import why_not_selected
from gplan.schedules.registry import num_stages_of
from gplan.schedules.request import PlanRequest
from gplan.strategy_search import space as space_module
from gplan.strategy_search.planner import balance
from gplan.strategy_search.space import AUTO_RECOMPUTE, AUTO_SCHEDULES, search_space
from tests.made import SLOW_ENGINE, make_profile
from tests.partition.problems import in_halves
from tests.searching import open_request, search


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """A chain of up to four layers at three sizes, with transfers, an optimizer and sometimes overheads."""
    num_layers = draw(st.integers(1, 4))

    def numbers(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=num_layers, max_size=num_layers))

    profile = make_profile(
        numbers(1, 9), numbers(1, 12), weight_bytes=numbers(0, 40), stash_bytes=numbers(1, 40),
        output_bytes=numbers(0, 4), workspace_bytes=numbers(0, 10), microbatch_sizes=(1, 2, 4),
        link=Link(latency_s=0.5, bytes_per_s=draw(st.sampled_from([2.0, 50.0]))),
        optimizer_s=draw(st.sampled_from([0.0, 8.0])), overhead_s=draw(st.sampled_from([0.0, 0.5])),
        engine=draw(st.sampled_from([None, SLOW_ENGINE])),
    )  # fmt: skip
    return in_halves(profile)


def every_plan(profile: Profile, request: PlanRequest, memory_bytes: int | None) -> Iterator[Plan]:
    """The best plan of every setting, each way to recompute."""
    for setting in search_space(profile, request).settings:
        for mode in AUTO_RECOMPUTE:
            if mode == "selected" and why_not_selected(setting.schedule):
                continue
            try:
                yield balance(
                    profile, num_devices=setting.num_devices, num_microbatches=setting.num_microbatches,
                    microbatch_size=setting.microbatch_size, schedule=setting.schedule, recompute=mode,
                    memory_bytes=memory_bytes, num_replicas=setting.num_replicas, sharding=setting.sharding,
                )  # fmt: skip
            except NoPlanError:
                continue


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    profile=profiles(), num_devices=st.sampled_from([None, 2, 4]), memory_bytes=st.sampled_from([None, 100, 200, 400]),
    schedules=st.lists(st.sampled_from(AUTO_SCHEDULES), min_size=2, max_size=3, unique=True),
)  # fmt: skip
def test_search_is_optimal(
    monkeypatch: pytest.MonkeyPatch, profile: Profile, num_devices: int | None, memory_bytes: int | None,
    schedules: list[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(space_module, "AUTO_SCHEDULES", tuple(schedules))
    request = open_request(
        num_devices="auto", num_microbatches=None, schedule="auto", recompute="auto", total_devices=num_devices,
        batch_size=8, microbatch_size=None, sharding="auto",
    )  # fmt: skip
    plans = list(every_plan(profile, request, memory_bytes))
    if not plans:
        with pytest.raises(NoPlanError):
            search(profile, total_devices=num_devices, batch_size=8, memory_bytes=memory_bytes, sharding="auto")
        return
    plan = search(profile, total_devices=num_devices, batch_size=8, memory_bytes=memory_bytes, sharding="auto")

    def cost(one: Plan) -> float:
        return one.prediction.step_s * (one.num_devices if num_devices is None else 1)

    assert cost(plan) == pytest.approx(min(map(cost, plans)), rel=1e-9)
    assert plan.proof.is_proven
    assert memory_bytes is None or plan.peak_bytes <= memory_bytes
    assert plan.batch_size == 8


@pytest.fixture(scope="module")
def wide() -> Profile:
    """Twelve layers with more stash than weights."""
    return make_profile(
        [0.01 * (3 + i % 4) for i in range(12)], weight_bytes=1000, stash_bytes=4000, output_bytes=500,
        link=Link(latency_s=1e-4, bytes_per_s=1e7), optimizer_s=0.01, microbatch_sizes=(1, 2, 4),
    )  # fmt: skip


@pytest.mark.slow
def test_frontier_trades_time_for_memory(wide: Profile) -> None:
    plan = search(wide, total_devices=4, batch_size=32, time_limit_s=3.0)
    steps, peaks = [x.step_s for x in plan.frontier], [x.peak_bytes for x in plan.frontier]
    assert (steps[0], peaks[0]) == (plan.prediction.step_s, plan.peak_bytes)
    assert len(steps) > 2
    assert all(a < b for a, b in pairwise(steps)) and all(a > b for a, b in pairwise(peaks))
    assert all(x.num_stages <= num_stages_of(x.schedule, 4 // x.num_replicas) for x in plan.frontier)


@pytest.mark.slow
def test_replicas_share_the_batch(wide: Profile) -> None:
    plan = search(wide, num_devices=2, total_devices=8, batch_size=64, time_limit_s=2.0)
    assert (plan.num_replicas, plan.batch_size) == (4, 64)
    assert all(stage.cost.all_reduce_s > 0 for stage in plan.stages)


def test_little_memory_makes_replicas_divide_stages() -> None:
    profile = make_profile(
        [1.0] * 4, weight_bytes=600, stash_bytes=1, output_bytes=1, link=Link(latency_s=0.0, bytes_per_s=1e3),
    )  # fmt: skip

    def sharding(memory_bytes: int) -> tuple[str, int]:
        plan = search(
            profile, total_devices=4, num_microbatches=2, schedule="gpipe", recompute="never", batch_size=8,
            memory_bytes=memory_bytes, sharding="auto",
        )  # fmt: skip
        assert plan.peak_bytes <= memory_bytes and plan.proof.is_proven
        return plan.sharding, plan.num_replicas

    found = [sharding(x) for x in (20_000, 7_000, 5_500)]
    assert found == [("none", 4), ("optimizer", 4), ("weights", 4)]


@pytest.mark.slow
def test_devices_that_stay_idle_are_named(wide: Profile) -> None:
    plan = search(wide, num_devices=3, total_devices=5, batch_size=12, time_limit_s=2.0)
    assert plan.num_replicas == 1
    assert "3 of 5 devices are used; another pipeline needs 3, 2 are left; --k auto tries other numbers" in plan.notes


@pytest.mark.slow
def test_interrupt_gives_the_best_plan_so_far(wide: Profile) -> None:
    calls = []

    def interrupting(text: str, _share: float) -> None:
        calls.append(text)
        if len(calls) == 4:
            raise KeyboardInterrupt

    plan = search(wide, total_devices=4, batch_size=32, progress=interrupting)
    assert any("interrupted" in note for note in plan.notes)
    assert (
        0 < plan.proof.lower_bound_s <= search(wide, total_devices=4, batch_size=32, time_limit_s=3.0).prediction.step_s
    )
    assert len(calls) == 4  # nothing goes on behind the user's back


def test_interrupt_before_the_first_plan_is_raised(wide: Profile) -> None:
    def interrupting(_text: str, _share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(wide, total_devices=4, progress=interrupting)


def test_search_without_time(wide: Profile) -> None:
    with pytest.raises(NoPlanError, match="allow more time"):
        search(wide, total_devices=4, time_limit_s=1e-6)


@pytest.mark.slow
def test_where_nothing_fits_the_closest_is_named(wide: Profile) -> None:
    with pytest.raises(
        NoPlanError, match=r"no plan of \d+ settings fits 1.46 KiB per device; .* closest that was found needs"
    ):
        search(wide, total_devices=4, batch_size=32, memory_bytes=1500)


@pytest.mark.parametrize(
    ("dials", "memory_bytes", "text"),
    [
        ({"num_microbatches": "auto"}, 136, "what fits: --microbatch-size 2 --microbatches 16 --recompute always needs --memory 136B$"),
        ({"schedule": "auto"}, 200, "of 4, 1f1b, recompute never; in 8 of --microbatch-size 2 it needs --memory 204B; smaller "
         "micro-batches may fit: gplan profile --microbatch-size 1,2$"),
        ({"microbatch_size": 2}, 50, "; smaller micro-batches may fit: gplan profile --microbatch-size 1,2$"),
        ({"microbatch_size": 2}, 9, "with one layer per stage, stage 0 .layers: a. needs 68 B$"),  # by its weights alone
    ],
)  # fmt: skip
def test_where_nothing_fits_smaller_micro_batches_are_named(dials: Any, memory_bytes: int, text: str) -> None:
    # With a micro-batch size that was asked for, a search named neither smaller profiled sizes nor smaller ones to profile.
    profile = make_profile([1.0] * 4, stash_bytes=30, weight_bytes=2, microbatch_sizes=(2, 4))
    with pytest.raises(NoPlanError, match=text):
        balance(
            profile, memory_bytes=memory_bytes, num_devices=2, **{"microbatch_size": 4, "num_microbatches": 4, **dials}
        )


@pytest.mark.slow
def test_search_with_constraints(wide: Profile) -> None:
    plan = search(wide, num_devices=3, batch_size=24, constraints=Constraints(cut_after=("b",)), time_limit_s=2.0)
    assert plan.cuts[0] == 2
    with pytest.raises(UsageError, match="give --k a number"):
        search(wide, constraints=Constraints(pins=(Pin(layer="a", stage=0),)))


@pytest.mark.parametrize(
    ("changes", "message"), [({"time_limit_s": 0.0}, "time limit"), ({"memory_bytes": 0}, "memory")]
)
def test_no_time_and_no_memory_are_refused(wide: Profile, changes: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        search(wide, **changes)  # type: ignore[arg-type]


@pytest.mark.slow
def test_progress_names_the_best(wide: Profile) -> None:
    seen: list[tuple[str, float]] = []
    search(wide, total_devices=4, batch_size=32, time_limit_s=2.0, progress=lambda *x: seen.append(x))
    assert all(0 <= share <= 1 for _, share in seen)
    assert any("best" in text for text, _ in seen)
