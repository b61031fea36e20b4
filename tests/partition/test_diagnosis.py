"""What is said when nothing fits: the numbers named are exact."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import gplan
from gplan.core import Constraints
from gplan.core.errors import NoPlanError
from gplan.core.units import memory_text, parse_bytes
from gplan.partition import diagnosis, memory_feasibility
from gplan.partition.candidates import TooManyCandidates
from gplan.partition.diagnosis import feasibility_by_num_devices, is_feasible, no_plan_error, tightest_device
from gplan.partition.plan_evaluation import stages_of
from gplan.partition.problem import Problem, without_memory
from tests.made import make_profile
from tests.partition.problems import EVERY, all_cuts, make_problem, peak_bytes, problems


@settings(max_examples=80, deadline=None)
@given(problems(max_layers=6, schedules=EVERY))
def test_the_smallest_memory_fits_and_one_byte_less_does_not(problem: Problem) -> None:
    smallest = tightest_device(problem).peak_bytes
    assert smallest == min(peak_bytes(problem, stages_of(problem, cuts)) for cuts in all_cuts(problem))
    assert is_feasible(replace(problem, memory_bytes=smallest))
    assert is_feasible(replace(problem, memory_bytes=smallest - 1)) is False


@settings(max_examples=60, deadline=None)
@given(problems(max_layers=6))
def test_the_feasibility_by_num_devices_are_those_of_brute_force(problem: Problem) -> None:
    problem = replace(problem, memory_bytes=problem.memory_bytes or 200)
    expected = [is_feasible(replace(problem, num_stages=k + 1)) for k in range(problem.num_layers)]
    assert list(feasibility_by_num_devices(problem)) == expected


def test_of_devices_with_several_stages_as_many_are_asked_about_as_there_are_layers_for() -> None:
    problem = make_problem(
        [1] * 7, num_stages=4, schedule="looped-bfs:2", num_microbatches=1, stash_bytes=1000, memory_bytes=3000
    )
    assert list(feasibility_by_num_devices(problem)) == [False, False, True]


def test_the_message_names_the_device_that_is_full_with_all_its_stages() -> None:
    problem = make_problem(
        [1] * 8, num_stages=4, schedule="interleaved-1f1b:2", num_microbatches=1, stash_bytes=1000, memory_bytes=2500
    )
    text = str(no_plan_error(problem))
    assert "8 layers into 4 stages on 2 devices fits 2.44 KiB per device" in text
    assert "the smallest memory that fits is --memory 4000B, for device 0, which has stages 0 and 2" in text
    assert text.endswith("--k 4 --microbatches 1 fits")


def test_where_time_is_up_the_message_claims_no_more_than_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    problem = make_problem(
        rng.integers(1, 9, 60).tolist(), num_stages=16, schedule="interleaved-1f1b:2", num_microbatches=8,
        weight_bytes=rng.integers(1, 90, 60).tolist(), stash_bytes=rng.integers(1, 90, 60).tolist(),
    )  # fmt: skip
    monkeypatch.setattr(diagnosis, "_SEARCH_S", 0.0)
    found = tightest_device(problem)
    tight = replace(problem, memory_bytes=found.peak_bytes * 3 // 4)  # within which a partition may be or not
    assert not found.is_proven and is_feasible(tight) is None
    text = str(no_plan_error(tight))
    assert f"the smallest memory that was found to fit is {memory_text(found.peak_bytes)}" in text
    assert re.search(r"no number of devices up to \d+ (fits|was found to fit) \(larger ones were not tried\)", text)


def test_the_message_names_the_smallest_memory_the_stage_and_the_smallest_k() -> None:
    problem = make_problem([1] * 8, num_stages=2, stash_bytes=1000, num_microbatches=1, memory_bytes=2500)
    text = str(no_plan_error(problem))
    assert "8 layers into 2 stages fits 2.44 KiB per device" in text
    assert "the smallest memory that fits is --memory 4000B, for stage 0 (layers: a … d (4))" in text
    assert text.endswith("--k 4 --microbatches 1 needs --memory 2000B")


def test_the_smallest_k_may_be_smaller_than_the_one_asked_for() -> None:
    problem = make_problem(
        [1] * 4, num_stages=4, schedule="1f1b", num_microbatches=8, stash_bytes=[100, 0, 0, 0], memory_bytes=250
    )
    assert "--k 1 --microbatches 8 needs" in str(no_plan_error(problem))


def test_more_stages_need_not_fit_better_under_1f1b() -> None:
    problem = make_problem(
        [1] * 4, num_stages=4, schedule="1f1b", num_microbatches=8, stash_bytes=[100, 0, 0, 0], memory_bytes=250
    )
    assert list(feasibility_by_num_devices(problem)) == [True, True, False, False]


def test_a_layer_that_is_too_big_for_every_k_is_named() -> None:
    problem = make_problem([1] * 3, num_stages=2, weight_bytes=[10, 5000, 10], memory_bytes=9999)
    text = str(no_plan_error(problem))
    assert "no number of stages fits: with one layer per stage, stage 1 (layers: b) needs" in text


def test_where_each_layer_would_fit_alone_but_no_k_does_the_finest_partition_is_named() -> None:
    problem = make_problem(
        [1] * 2, num_stages=1, schedule="1f1b", num_microbatches=4, weight_bytes=[0, 45], stash_bytes=[100, 0],
        memory_bytes=199,
    )  # fmt: skip
    text = str(no_plan_error(problem))
    assert "no number of stages fits: with one layer per stage, stage 0 (layers: a) needs 200 B" in text


def test_recomputing_is_not_offered_where_it_saves_nothing() -> None:
    problem = make_problem([1] * 4, num_stages=2, num_microbatches=8, weight_bytes=100, memory_bytes=150)
    assert "--recompute" not in str(no_plan_error(problem))


@pytest.mark.parametrize(("memory_bytes", "would_fit"), [(200, True), (199, False)])
def test_what_recomputing_would_need_is_named(memory_bytes: int, would_fit: bool) -> None:
    problem = make_problem([1] * 4, num_stages=2, num_microbatches=8, stash_bytes=100, memory_bytes=memory_bytes)
    text = str(no_plan_error(problem))
    assert ("; what fits: --recompute always needs --memory 200B" in text) is would_fit
    assert ("; what fits: --recompute always --k 4 --microbatches 8 needs --memory 100B" in text) is not would_fit


@pytest.mark.parametrize(
    ("schedule", "memory_bytes", "is_offered"), [("gpipe", 300, True), ("gpipe", 299, False), ("1f1b", 299, False)]
)
def test_a_schedule_that_needs_less_memory_is_offered(schedule: str, memory_bytes: int, is_offered: bool) -> None:
    problem = make_problem(
        [1] * 4, num_stages=2, num_microbatches=8, schedule=schedule, stash_bytes=100, memory_bytes=memory_bytes
    )
    text = str(no_plan_error(problem))
    assert ("--schedule 1f1b needs --memory 300B" in text) == is_offered


def test_two_remedies_are_named_together_only_where_one_is_not_enough() -> None:
    problem = make_problem([1] * 4, num_stages=2, num_microbatches=8, stash_bytes=100, output_bytes=10)
    one, other, both = (
        "--schedule 1f1b needs --memory 330B",
        "--recompute always needs --memory 350B",
        "--schedule 1f1b --recompute always needs",
    )

    def text(memory_bytes: int) -> str:
        return str(no_plan_error(replace(problem, memory_bytes=memory_bytes)))

    assert f"; what fits: {other}, {one}" in text(350) and both not in text(350)
    assert f"; what fits: {one}" in text(330) and both not in text(330)
    assert f"; what fits: {both}" in text(329)


@pytest.mark.parametrize(
    ("memory_bytes", "fitting"), [(300, "needs --memory 280B"), (150, "--k 4 needs --memory 140B")]
)
def test_smaller_micro_batches_are_offered(memory_bytes: int, fitting: str) -> None:
    large, small = (
        make_problem([1] * 4, num_stages=2, num_microbatches=x, weight_bytes=10, stash_bytes=y, memory_bytes=memory_bytes,
                     schedule="1f1b", recompute="always")
        for x, y in ((4, 200), (8, 100))
    )  # fmt: skip
    text = str(no_plan_error(large, smaller=lambda: [small]))
    assert f"; what fits: --microbatch-size 1 --microbatches 8 {fitting}" in text


def test_a_custom_order_with_several_profiled_sizes_names_what_fits() -> None:
    profile, order = (
        make_profile([1.0] * 6, stash_bytes=100, microbatch_sizes=(2, 4)),
        "custom:0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1",
    )
    with pytest.raises(NoPlanError, match="the smallest memory that fits is"):
        gplan.balance(profile, num_devices=2, num_microbatches=2, schedule=order, memory_bytes=100)


def test_options_that_fit_with_another_number_of_stages_are_among_what_fits() -> None:
    def text(memory_bytes: int) -> str:
        problem = make_problem(
            [1] * 8, num_stages=2, schedule="1f1b", num_microbatches=8, stash_bytes=100, weight_bytes=20, memory_bytes=memory_bytes
        )  # fmt: skip
        return str(no_plan_error(problem))

    assert text(360).endswith("; what fits: --recompute always --k 4 --microbatches 8 needs --memory 360B")
    assert "what fits" not in text(160) and "with --recompute always no number of stages fits" in text(160)


def test_recomputing_is_not_offered_to_those_who_do() -> None:
    problem = make_problem([1] * 4, num_stages=2, recompute="always", stash_bytes=100, memory_bytes=10)
    assert "--recompute" not in str(no_plan_error(problem))


def test_constraints_are_not_blamed_where_the_stages_are_too_many_to_be_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_many(*_: object, **__: object) -> None:
        raise TooManyCandidates

    problem = make_problem([1] * 4, num_stages=2, stash_bytes=1000, memory_bytes=10)
    monkeypatch.setattr(diagnosis, "candidates_within", too_many)
    constrained = replace(problem, constraints=Constraints(cut_after=("a",)))
    assert diagnosis.conflicting_constraints(constrained) == []
    assert diagnosis.conflicting_constraints(without_memory(constrained)) == ["--cut-after a"]


def test_general_advice_is_given_where_the_stages_are_too_many_to_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem([1] * 8, num_stages=2, stash_bytes=1000, num_microbatches=1, memory_bytes=2500)
    monkeypatch.setattr(memory_feasibility, "_MOST_CHUNKS", 0)
    text = str(no_plan_error(problem))
    assert "give each device more memory (--memory), use more stages (--k), or --recompute always" in text


def test_as_many_cuts_as_stages_are_one_too_many() -> None:
    problem = replace(make_problem([1] * 4, num_stages=2), constraints=Constraints(cut_after=("a", "b")))
    text = "--cut-after asks for 2 cuts, so 3 stages; expected fewer cuts, or --k 3"
    assert str(no_plan_error(problem)) == text


@pytest.mark.parametrize(("num_cuts", "enough"), [(4, 3), (6, 4), (7, 4)])
def test_the_k_for_many_cuts_counts_devices(num_cuts: int, enough: int) -> None:
    problem = make_problem([1] * 12, num_stages=4, schedule="interleaved-1f1b:2", num_microbatches=4)
    problem = replace(problem, constraints=Constraints(cut_after=tuple("abcdefg"[:num_cuts])))
    text = f"--cut-after asks for {num_cuts} cuts, so {num_cuts + 1} stages; expected fewer cuts, or --k {enough}"
    assert str(no_plan_error(problem)) == text


def test_proposed_memory_is_enough() -> None:
    # 2.41 KiB was proposed where 2,468 bytes are needed.
    profile = make_profile([1.0] * 4, stash_bytes=617)
    with pytest.raises(NoPlanError) as caught:
        gplan.balance(profile, num_devices=2, num_microbatches=4, schedule="gpipe", memory_bytes=2_000)
    proposals = re.findall(r"((?:--[a-z]+ \S+ )*)(?:needs|is) --memory (\w+)", str(caught.value))
    assert len(proposals) > 1
    for options, memory in proposals:
        found = dict(re.findall(r"--([a-z]+) (\S+)", options))
        dials: dict[str, Any] = {
            "schedule": found.get("schedule", "gpipe"),
            "recompute": found.get("recompute", "never"),
        }
        k, m = int(found.get("k", 2)), int(found.get("microbatches", 4))
        gplan.balance(profile, num_devices=k, num_microbatches=m, memory_bytes=parse_bytes(memory), **dials)


def test_smallest_memory_is_one_number() -> None:
    # "28.0 MiB (--memory 29MiB)" were two that disagreed.
    profile = make_profile([1.0] * 2, stash_bytes=7 * 2**20 + 999)
    with pytest.raises(NoPlanError, match="the smallest memory that fits is --memory 29MiB, for stage 0") as caught:
        gplan.balance(profile, num_devices=2, num_microbatches=4, memory_bytes=20 * 2**20)
    assert "28.0" not in str(caught.value)
