"""Options against closed forms; GPipe: sum f + (M-1) max f + sum b + (M-1) max b + sum c."""

from __future__ import annotations

from typing import Any

import pytest

from gplan.core import Constraints, Pin, Plan, Profile
from gplan.core.errors import NoPlanError
from gplan.evaluate import options
from gplan.evaluate.options import MORE_MEMORY_BYTES, OUT_OF_TIME, Option, memory_gain_s
from gplan.evaluate.replanning import TIME_LIMIT_S, PlanSettings
from tests.evaluate.explain.settings import (
    CHUNKED,
    ONE_GB_PER_S,
    cut_bound,
    memory_bound,
    plan_of,
    recompute_bound,
    setting,
    split,
    tried,
    uneven,
)  # fmt: skip
from tests.made import make_profile


def step_of(option: Option) -> float:
    assert option.outcome is not None, option.reason
    return option.outcome.step_s


def test_more_memory_allows_the_better_cut() -> None:
    found = tried(memory_bound(), setting(memory_bytes=60))
    assert step_of(found["same"][0]) == 63.0
    assert [step_of(x) for x in (*found["more memory"], *found["no memory limit"])] == [54.0, 54.0]
    assert found["more memory"][0].setting.memory_bytes == 60 + MORE_MEMORY_BYTES
    assert memory_gain_s([*found["same"], *found["no memory limit"]]) == 9.0


@pytest.mark.parametrize(("limit", "gain_s"), [(25, 5.0), (1000, 0.0)])
def test_memory_gain_of_recompute(limit: int, gain_s: float) -> None:
    found = tried(make_profile([1.0, 1.0], stash_bytes=10), setting(memory_bytes=limit, recompute="always"))
    assert [x.setting.recompute for x in found["no memory limit"]] == ["always", "never"]
    assert (found["recompute"][0].outcome is None) == (limit == 25)
    assert memory_gain_s([x for kind in found.values() for x in kind]) == pytest.approx(gain_s)


def test_no_limit_has_no_memory_gain() -> None:
    found = tried(make_profile([1.0, 1.0]), setting())
    assert (found["more memory"][0].outcome, found["more memory"][0].reason) == (None, "the plan has no memory limit")
    assert "no memory limit" not in found
    assert memory_gain_s(found["same"]) == 0.0


def test_twice_the_microbatches() -> None:
    found = tried(make_profile([1.0, 1.0], microbatch_sizes=(1, 2)), setting(microbatch_size=2))
    smaller, more = found["smaller microbatches"][0], found["more microbatches"][0]
    assert (smaller.setting.num_microbatches, smaller.setting.microbatch_size, step_of(smaller)) == (8, 1, 27.0)
    assert (more.setting.num_microbatches, more.setting.microbatch_size, step_of(more)) == (8, 2, 54.0)
    assert smaller.outcome is not None and more.outcome is not None
    assert smaller.outcome.samples_per_s == more.outcome.samples_per_s == 8 / 27.0


def test_unprofiled_half_is_interpolated() -> None:
    found = tried(make_profile([1.0, 1.0], microbatch_sizes=(1, 4)), setting(microbatch_size=4))
    assert found["smaller microbatches"][0].is_interpolated
    assert not found["more microbatches"][0].is_interpolated


@pytest.mark.parametrize(
    ("size", "sizes", "reason"),
    [(3, (1, 3), "a micro-batch of 3 has no half"), (4, (4, 8), "the profile has micro-batch sizes 4, 8; asked for 2")],
)
def test_a_half_that_cannot_be_has_its_reason(size: int, sizes: tuple[int, ...], reason: str) -> None:
    found = tried(make_profile([1.0, 1.0], microbatch_sizes=sizes), setting(microbatch_size=size))
    assert found["smaller microbatches"][0].outcome is None
    smaller = found["smaller microbatches"][0]
    assert smaller.reason.startswith(reason)
    text = smaller.label
    assert text == ("micro-batches of half the size" if size == 3 else "8 micro-batches of 2 (the same batch)")


def test_one_device_more_and_one_fewer() -> None:
    found = tried(make_profile([1.0, 1.0, 1.0, 1.0]), setting())
    assert step_of(found["more devices"][0]) == 3 * (4 + 3 * 2)
    assert step_of(found["fewer devices"][0]) == 3 * 4 * 4


def test_impossible_device_counts_have_reasons() -> None:
    found = tried(make_profile([1.0, 1.0]), setting())
    assert "3 stages of a model with 2 layers" in found["more devices"][0].reason
    found = tried(make_profile([1.0, 1.0]), setting(num_devices=1))
    assert found["fewer devices"][0].reason == "there is only one device"
    assert found["faster link"][0].reason == found["free link"][0].reason == "one device sends nothing"


def test_faster_link() -> None:
    found = tried(cut_bound(), setting())
    assert [step_of(x[0]) for x in (found["same"], found["faster link"], found["free link"])] == [12.0, 11.0, 10.0]


def test_a_faster_link_may_move_the_cut() -> None:
    profile = make_profile([1.0, 1.0, 2.0], output_bytes=[10**8, 10**10, 0], link=ONE_GB_PER_S)
    found = tried(profile, setting())
    assert step_of(found["same"][0]) == pytest.approx(3 * (4 + 3 * 3) + 2 * 0.1)
    assert step_of(found["free link"][0]) == 3 * (4 + 3 * 2)


def test_other_schedules_and_recompute_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "AUTO_SCHEDULES", ("gpipe", "1f1b"))
    found = tried(make_profile([1.0, 1.0]), setting(recompute="except-last"))
    assert [x.setting.schedule for x in found["schedule"]] == ["1f1b"]
    assert [x.setting.recompute for x in found["recompute"]] == ["never", "always"]
    assert [step_of(x) for x in found["recompute"]] == [15.0, 20.0]


EVERY_RULE = ("gpipe", "1f1b", "interleaved-1f1b:2", "looped-bfs:3", "zb-h1", "zb-v")


def offered(profile: Profile, **given: object) -> dict[str, int]:
    """The other schedules and how many stages each would have, without balancing any."""
    found = tried(profile, setting(**given), options_s=-1.0).get("schedule", [])
    return {x.setting.schedule: x.setting.num_stages for x in found}


def test_only_possible_schedules_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "AUTO_SCHEDULES", EVERY_RULE)
    whole = make_profile([1.0] * 5)
    assert offered(whole) == {"1f1b": 2, "interleaved-1f1b:2": 4}
    assert offered(split(whole)) == {"1f1b": 2, "interleaved-1f1b:2": 4, "zb-h1": 2, "zb-v": 4}
    assert offered(make_profile([1.0] * 6), schedule="looped-bfs:3", num_devices=2) == {
        "gpipe": 2, "1f1b": 2, "interleaved-1f1b:2": 4,
    }  # fmt: skip
    assert offered(make_profile([1.0] * 3)) == {"1f1b": 2}


@pytest.mark.parametrize("given", CHUNKED, ids=lambda given: str(given["schedule"])[:8])
def test_options_of_chunked_plans(given: dict[str, Any]) -> None:
    profile = split(uneven(5))
    plan = plan_of(profile, **given)
    found = tried(profile, setting(**given, memory_bytes=2 * plan.peak_bytes))
    (same,) = found["same"]
    assert same.outcome is not None
    assert (step_of(same), same.outcome.peak_bytes) == (plan.prediction.step_s, plan.peak_bytes)
    assert step_of(found["free link"][0]) <= step_of(found["faster link"][0]) <= step_of(same)
    again = next(x for x in found["recompute"] if x.setting.recompute == "always")
    assert step_of(again) > step_of(same)
    (selected,) = (x for x in found["recompute"] if x.setting.recompute == "selected")
    assert selected.outcome is None and "expected --recompute never, always or except-last" in selected.reason


def test_options_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    time_limits_s: list[float] = []

    def replan(_profile: Profile, _setting: PlanSettings, *, time_limit_s: float) -> Plan:
        time_limits_s.append(time_limit_s)
        raise NoPlanError("not here")

    monkeypatch.setattr(options, "replan", replan)
    tried(make_profile([1.0] * 6), setting(), options_s=9.0)
    assert time_limits_s[0] == TIME_LIMIT_S
    assert time_limits_s[1] < 1.0 and time_limits_s[1:] == sorted(time_limits_s[1:])
    assert time_limits_s[-1] == TIME_LIMIT_S


def test_other_devices_keep_stages_per_device_unless_there_is_one() -> None:
    found = tried(make_profile([1.0] * 9), setting(schedule="looped-bfs:3", num_devices=2), options_s=-1.0)
    settings = [found[kind][0].setting for kind in ("more devices", "fewer devices")]  # type: ignore[index]
    assert [(x.schedule, x.num_devices, x.num_stages) for x in settings] == [("looped-bfs:3", 3, 9), ("1f1b", 1, 1)]


def test_a_custom_order_has_the_devices_that_it_has() -> None:
    asked = setting(schedule="custom:0F0 0B0 / 1F0 1B0", num_microbatches=1)
    assert asked.num_devices == 2
    found = tried(make_profile([1.0] * 3), asked, options_s=-1.0)
    for kind in ("more devices", "fewer devices"):
        (option,) = found[kind]  # type: ignore[index]
        assert (option.outcome, option.setting, option.reason) == (None, asked, "the custom order has 2 devices")


def test_options_keep_constraints() -> None:
    found = tried(make_profile([1.0, 1.0, 2.0]), setting(constraints=Constraints(cut_after=("a",))))
    assert [step_of(x[0]) for x in (found["same"], found["free link"], found["no constraints"])] == [39.0, 39.0, 30.0]
    assert "no constraints" not in tried(make_profile([1.0, 1.0, 2.0]), setting())


def test_unsatisfiable_constraint_is_the_reason() -> None:
    pinned = tried(make_profile([1.0, 1.0]), setting(constraints=Constraints(pins=(Pin(layer="b", stage=1),))))
    assert pinned["fewer devices"][0].reason == "b is pinned to stage 1; expected 0 to 0"
    cut = tried(make_profile([1.0, 1.0]), setting(constraints=Constraints(cut_after=("a",))))
    assert cut["fewer devices"][0].reason.startswith("--cut-after asks for 1 cut, so 2 stages")


def test_selected_recompute_needs_a_limit() -> None:
    found = tried(recompute_bound(), setting(memory_bytes=70, recompute="always"))
    steps = {x.setting.recompute: x.outcome and x.outcome.step_s for x in found["recompute"]}
    assert list(steps) == ["never", "except-last", "selected"]
    selected = steps["selected"]
    assert steps["never"] is None and selected is not None and selected < step_of(found["same"][0])


def test_memory_gain_of_selected_layers() -> None:
    found = tried(recompute_bound(), setting(memory_bytes=70, recompute="selected"))
    assert [len(found[kind]) for kind in ("more memory", "no memory limit")] == [1, 1]  # nothing is recomputed there
    gain_s = step_of(found["same"][0]) - step_of(found["no memory limit"][0])
    assert memory_gain_s([x for kind in found.values() for x in kind]) == gain_s > 0


def test_options_out_of_time() -> None:
    found = tried(memory_bound(), setting(memory_bytes=60), options_s=-1.0)
    assert step_of(found["same"][0]) == 63.0
    assert found["schedule"][0].reason == found["no memory limit"][0].reason == OUT_OF_TIME
    assert memory_gain_s([*found["same"], *found["no memory limit"]]) is None


def test_infeasible_option_names_the_memory() -> None:
    found = tried(make_profile([1.0, 1.0], weight_bytes=10), setting(memory_bytes=40))
    assert "the smallest memory that fits is --memory 80B" in found["fewer devices"][0].reason


def test_every_replica_has_its_share_of_the_batch() -> None:
    found = tried(make_profile([1.0, 1.0]), setting(num_replicas=3))
    assert found["same"][0].outcome is not None
    assert found["same"][0].outcome.samples_per_s == 3 * 4 / 15.0
