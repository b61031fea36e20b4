"""What the names of schedules say, and names that are refused."""

from __future__ import annotations

import pytest

from gplan.core import Action
from gplan.core.errors import UsageError
from gplan.schedules.registry import canonical, every_schedule, make_schedule, num_stages_of, schedule_info


def test_an_unknown_schedule_is_refused_with_the_choices() -> None:
    with pytest.raises(UsageError, match="'2f2b' is not known; expected one of gpipe, "):
        make_schedule("2f2b", num_devices=2, num_microbatches=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "'' is not known"),
        ("1F1B", "'1F1B' is not known"),
        ("1f1b:2", "1f1b has 1 chunks a device; expected no number"),
        ("zb-v:2", "zb-v has 2 chunks a device; expected no number"),
        ("interleaved-1f1b:", "has '' chunks a device; expected a number, such as interleaved-1f1b:2"),
        ("interleaved-1f1b:0", "has '0' chunks"),
        ("interleaved-1f1b:-1", "has '-1' chunks"),
        ("interleaved-1f1b:2.5", "has '2.5' chunks"),
        ("interleaved-1f1b:\u0662", "chunks a device; expected a number"),
        ("looped-bfs:99999999999", "has '99999999999' chunks"),
        ("looped-bfs:2:2", "has '2:2' chunks"),
        ("1f1b-cap", "does not say how many micro-batches in flight on a stage; expected a number, such as 1f1b-cap:2"),
    ],
)
def test_names_that_say_no_number_of_chunks_are_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        schedule_info(name)


def test_a_custom_order_that_is_misspelt_is_not_repeated_at_length() -> None:
    with pytest.raises(UsageError) as caught:
        schedule_info("Custom:" + "0F0 " * 10_000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", [*every_schedule(), "1f1b-cap:2"])
def test_a_name_says_how_many_stages_there_are(name: str) -> None:
    said = schedule_info(name)
    schedule = make_schedule(name, num_devices=3, num_microbatches=2)
    assert schedule.num_stages == num_stages_of(name, 3) == 3 * said.num_chunks
    assert schedule.name == said.title == canonical(canonical(name))
    assert (said.num_devices, said.num_microbatches) == (None, None)
    assert said.splits_backward == any(x.kind == "W" for x in schedule.orders[0])


def test_two_chunks_are_usual_and_one_name_serves_all_spellings() -> None:
    assert canonical("looped-bfs") == canonical("looped-bfs:2") == canonical("looped-bfs:02") == "looped-bfs:2"
    assert canonical("custom:0F0 0B0") == "custom:0F0 0B0"


@pytest.mark.parametrize(("k", "m"), [(0, 1), (1, 0), (-1, 4)])
def test_at_least_one_device_and_one_micro_batch_are_expected(k: int, m: int) -> None:
    with pytest.raises(UsageError, match=f"got {k} devices and {m} micro-batches; expected at least 1 of each"):
        make_schedule("1f1b", num_devices=k, num_microbatches=m)


@pytest.mark.parametrize(
    "text", ["3F", "F0", "3X0", "", "3F0 ", "-1F0", "3F-1", "3F0000000000", "3F\u0660", "3f0", "3O0"]
)
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="3F0"):
        Action.parse(text)


@pytest.mark.parametrize("name", ["gpipe", "zb-v"])
def test_a_schedule_that_would_fill_the_memory_is_refused_before_it_is_made(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} with 4 devices and 1000000000 micro-batches has \d+ actions"):
        make_schedule(name, num_devices=4, num_microbatches=10**9)
