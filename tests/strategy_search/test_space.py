"""Which settings a search looks at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gplan.core.errors import UsageError
from gplan.strategy_search.space import AUTO_SCHEDULES, search_space
from tests.made import make_profile
from tests.partition.problems import in_halves
from tests.searching import open_request

OPEN = open_request(
    num_devices="auto", num_microbatches="auto", schedule="auto", recompute="auto", total_devices=8, batch_size=32,
    microbatch_size=None,
)  # fmt: skip
PROFILE = make_profile([1.0] * 6, microbatch_sizes=(1, 2, 4))
SPLIT = in_halves(PROFILE)


def test_settings_have_the_batch_and_fit_the_devices() -> None:
    space = search_space(PROFILE, OPEN)
    assert {x.num_devices for x in space.settings} == {1, 2, 3, 4, 5, 6}
    assert all(x.num_replicas * x.num_microbatches * x.microbatch_size == 32 for x in space.settings)
    assert all(x.total_devices <= 8 for x in space.settings)
    assert space.recompute == ("never", "selected", "except-last", "always")
    assert not space.per_device


def test_schedules_need_layers_and_halves() -> None:
    every = {k: {x.schedule for x in search_space(SPLIT, OPEN).settings if x.num_devices == k} for k in range(1, 7)}
    assert every[1] == {"gpipe", "1f1b"}
    assert every[2] == {*AUTO_SCHEDULES} - {"interleaved-1f1b:4"}
    assert every[4] == {"gpipe", "1f1b", "eager-1f1b", "zb-h1"}


def test_left_out_schedules_are_noted() -> None:
    assert search_space(PROFILE, OPEN).notes == (
        "zb-h1 and zb-v were left out: the profile does not say how long the halves of a backward take",
        "interleaved-1f1b:2 on more than 3 devices, interleaved-1f1b:3 on more than 2 devices, interleaved-1f1b:4 on more "
        "than 1 device, looped-bfs:2 on more than 3 devices, zb-v on more than 3 devices: left out, as the model has 6 layers",
    )
    assert search_space(SPLIT, replace(OPEN, num_devices=1)).notes == ()


def test_selected_recompute_limits_the_schedules() -> None:
    space = search_space(SPLIT, replace(OPEN, recompute="selected"))
    assert {x.schedule for x in space.settings} == {"gpipe", "1f1b", "eager-1f1b"}
    assert "select no layers" in space.notes[0]


OWN = "custom:0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1"


@pytest.mark.parametrize("num_devices", [2, "auto"])
def test_custom_order_has_its_microbatches(num_devices: Any) -> None:
    request = replace(
        OPEN, schedule=OWN, num_devices=num_devices, total_devices=None, num_microbatches=None, batch_size=None
    )
    (setting,) = search_space(PROFILE, request).settings
    assert (setting.num_devices, setting.num_microbatches, setting.microbatch_size) == (2, 2, 4)


def test_custom_order_limits_microbatches() -> None:
    space = search_space(PROFILE, replace(OPEN, schedule=OWN, batch_size=8, total_devices=4))
    assert {(x.num_devices, x.num_replicas, x.num_microbatches) for x in space.settings} == {(2, 2, 1), (2, 2, 2)}


def test_replicas_divide_the_batch() -> None:
    space = search_space(PROFILE, replace(OPEN, num_devices=1, total_devices=7))
    assert {x.num_replicas for x in space.settings} == {4}


def test_unprofiled_sizes_are_a_last_resort() -> None:
    profile = make_profile([1.0] * 6, microbatch_sizes=(2, 6))
    sizes = {
        x.microbatch_size for x in search_space(profile, replace(OPEN, num_devices=2, total_devices=None)).settings
    }
    assert sizes == {2}
    odd = search_space(profile, replace(OPEN, num_devices=2, total_devices=None, batch_size=15)).settings
    assert {x.microbatch_size for x in odd} == {3, 5}


def test_given_numbers_stay() -> None:
    request = replace(OPEN, num_devices=2, num_microbatches=4, schedule="1f1b", recompute="always", total_devices=4)
    space = search_space(PROFILE, request)
    (setting,) = space.settings
    assert (setting.num_devices, setting.num_replicas, setting.num_microbatches, setting.microbatch_size) == (
        2,
        2,
        4,
        4,
    )
    assert (setting.schedule, space.recompute) == ("1f1b", ("always",))


def test_default_batch_is_noted() -> None:
    space = search_space(PROFILE, replace(OPEN, num_devices=2, total_devices=8, batch_size=None))
    assert {x.num_replicas * x.num_microbatches * x.microbatch_size for x in space.settings} == {4 * 8 * 4}
    assert space.notes[0].startswith("the batch is 128 samples")


def test_default_microbatches() -> None:
    space = search_space(
        PROFILE, replace(OPEN, num_devices=2, num_microbatches=None, total_devices=None, batch_size=16)
    )
    assert {(x.num_microbatches, x.microbatch_size) for x in space.settings} == {(8, 2)}


def test_without_devices_throughput_per_device_is_maximised() -> None:
    space = search_space(PROFILE, replace(OPEN, total_devices=None))
    assert space.per_device
    assert {x.num_replicas for x in space.settings} == {1}
    assert "per device" in space.notes[0] or "and device" in space.notes[0]


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"num_devices": 0}, "asked for 0 stages"),
    ({"num_devices": 7}, "a model with 6 layers"),
    ({"total_devices": 0}, "asked for 0 devices"),
    ({"batch_size": -1}, "asked for -1 samples a batch"),
    ({"num_devices": 5, "total_devices": 4}, "try --k 4 or fewer"),
    (
        {"schedule": OWN, "total_devices": 1},
        "asked for, but --devices is 1; use --devices 2 or more, or an order of fewer devices",
    ),
    ({"schedule": "zigzag"}, "expected one of gpipe, "),
    ({"schedule": "zb-h1"}, "profile again"),
    ({"schedule": "looped-bfs:7", "num_devices": "auto"}, "1 device x 7 chunks = 7 stages, the model has 6 layers"),
    ({"schedule": "interleaved-1f1b:2", "recompute": "selected"}, "recompute on one depend on the others"),
    ({"recompute": "often"}, "never, selected, except-last, always, auto"),
    ({"batch_size": 7, "num_microbatches": 3}, "7 samples cannot be cut evenly into 3 micro-batches of 1 to 4 samples"),
    (
        {"schedule": OWN, "batch_size": 64},
        r"into micro-batches \(at most 2, which the custom order has\) of 1 to 4 samples",
    ),
    ({"microbatch_size": 8}, "--microbatch-size 8"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_leaves_nothing_to_search_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        search_space(PROFILE, replace(OPEN, **changes))  # type: ignore[arg-type]


def test_what_replicas_divide() -> None:
    space = search_space(PROFILE, replace(OPEN, sharding="auto", schedule="gpipe"))
    found = {(x.num_replicas > 1, x.sharding) for x in space.settings}
    assert found == {(False, "none"), (True, "none"), (True, "optimizer"), (True, "weights")}
    space = search_space(PROFILE, replace(OPEN, sharding="weights"))
    assert {(x.num_replicas > 1, x.sharding) for x in space.settings} == {(False, "none"), (True, "weights")}
