"""Plans that one device alone would beat say so; no others do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import gplan
from gplan.core import Plan, Profile, Timing
from gplan.core.units import seconds_text
from gplan.partition.diagnosis import one_device_notes
from gplan.schedules.request import OptionNames
from tests.made import FREE_LINK, make_profile
from tests.searching import search

LARGE = make_profile([1.0] * 4, weight_bytes=100, stash_bytes=10, output_bytes=4)
SLOW = replace(LARGE, link=replace(FREE_LINK, latency_s=50.0))


def notes_of(plan: Plan) -> list[str]:
    return [x for x in plan.notes if x.startswith("one device alone (--k 1 --schedule 1f1b --microbatch-size 1 ")]


@pytest.mark.parametrize(("profile", "is_told"), [(SLOW, True), (LARGE, False)])
def test_a_plan_that_one_device_beats_says_by_how_much(profile: Profile, is_told: bool) -> None:
    plan = gplan.balance(profile, num_devices=2, num_microbatches=4)
    alone = gplan.balance(profile, num_devices=1, num_microbatches=4)
    assert (alone.prediction.step_s < plan.prediction.step_s) is is_told
    said = "48.0 s for the same batch"
    assert [said in x for x in notes_of(plan)] == [True] * is_told
    assert all(seconds_text(plan.prediction.step_s) not in x for x in notes_of(plan))  # the virtual engine's is another
    assert not notes_of(alone)


def test_one_device_alone_is_not_slowed_by_the_neighbours_that_two_devices_have() -> None:
    crowded = replace(
        SLOW,
        num_neighbours=1,
        layers=tuple(replace(x, costs=tuple(replace(y, slow_down=1.5) for y in x.costs)) for x in SLOW.layers),
        step=replace(SLOW.step, optimizer=Timing.exactly(2.0), slow_down=2.0),
    )
    plan = gplan.balance(crowded, num_devices=2, num_microbatches=4)
    alone = gplan.balance(crowded, num_devices=1, num_microbatches=4)
    assert plan.shares_host
    told = f"{seconds_text(alone.prediction.step_s)} for the same batch"
    assert [told in x for x in notes_of(plan)] == [True]


def test_a_search_says_it_too_and_counts_the_replicas_batch() -> None:
    plan = search(SLOW, num_devices=2, num_microbatches=4, schedule="gpipe", recompute="never")
    assert len(notes_of(plan)) == 1
    twice = gplan.balance(SLOW, num_devices=2, num_microbatches=4, num_replicas=2)
    assert ["96.0 s" in x and "than these 4" in x for x in notes_of(twice)] == [True]


@pytest.mark.parametrize(
    ("recompute", "memory_bytes"),
    [("never", None), ("never", 6000), ("always", None), ("selected", 5000), ("selected", 4200)],
)
def test_the_setting_that_is_named_takes_the_time_that_is_named(recompute: str, memory_bytes: int | None) -> None:
    profile = replace(make_profile([1.0] * 4, weight_bytes=100, stash_bytes=1000, output_bytes=4), link=SLOW.link)
    options: dict[str, Any] = {"num_replicas": 2, "recompute": recompute, "memory_bytes": memory_bytes}
    plan = gplan.balance(profile, num_devices=2, num_microbatches=2, **options)
    (note,) = notes_of(plan)
    words = note.partition("(")[2].partition(")")[0].split()
    named = dict(zip(words[::2], words[1::2], strict=True))
    alone = gplan.balance(
        profile,
        num_devices=int(named["--k"]),
        num_microbatches=int(named["--microbatches"]),
        microbatch_size=int(named["--microbatch-size"]),
        schedule=named["--schedule"],
        recompute=named.get("--recompute", "never"),
        memory_bytes=int(named["--memory"]) if "--memory" in named else None,
    )
    assert f": {seconds_text(alone.prediction.step_s)} for" in note


def test_what_one_device_cannot_hold_it_is_not_said_to_do_faster() -> None:
    fits = gplan.balance(SLOW, num_devices=1, num_microbatches=4, schedule="1f1b").peak_bytes
    for memory_bytes, is_told in ((fits, True), (fits - 1, False)):
        plan = gplan.balance(SLOW, num_devices=2, num_microbatches=4, memory_bytes=memory_bytes)
        assert len(notes_of(plan)) == is_told


def test_a_profile_without_any_computing_has_no_error() -> None:
    nothing = replace(make_profile([0.0] * 4, output_bytes=4), link=SLOW.link)
    plan = gplan.balance(nothing, num_devices=2, num_microbatches=4)
    assert "0 s for the same batch" in one_device_notes(plan, nothing, OptionNames())[0]
