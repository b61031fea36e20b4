"""A custom order: files that are read, and files and names that are refused with what is wrong in which line."""

from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Schedule
from gplan.core.errors import UsageError
from gplan.schedules.custom import custom_order, read_custom_order
from gplan.schedules.registry import make_schedule, num_stages_of, schedule_info
from tests.schedules.made import schedules

TWO_DEVICES = "custom:0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1"
DEADLOCK = "0F0 0B0 0F1 0B1 / 1F1 1F0 1B0 1B1"


def read(folder: Path, content: str | bytes) -> str:
    path = folder / "order.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_custom_order(path)


READ = {
    "spaces": "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n",
    "no line end at the end": "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1",
    "commas, and empty cells where torch's CSV has a device wait": "0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1,,\r\n",
    "torch's CSV": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "semicolons": "0F0;0F1;0B0;0B1\n1F0;1B0;1F1;1B1\n",
    "tabs": "\t0F0\t0F1 \t0B0\t0B1\n1F0\t1B0\t1F1\t1B1\t\n",
    "Windows line ends": "0F0 0F1 0B0 0B1\r\n1F0 1B0 1F1 1B1\r\n",
    "old line ends": "0F0 0F1 0B0 0B1\r1F0 1B0 1F1 1B1\r",
    "a byte order mark": "\ufeff0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n",
    "empty lines anywhere": "\n\n0F0 0F1 0B0 0B1\n  \n\n1F0 1B0 1F1 1B1\n\n\n",
    "comments": "# two devices\n0F0 0F1 0B0 0B1  # the first\n#\n1F0 1B0 1F1 1B1#the last",
    "zeros before a number": "0F0 00F1 0B00 0B1\n01F0 1B0 1F01 1B1\n",
}


@pytest.mark.parametrize("case", READ)
def test_an_order_is_read_however_it_is_written(tmp_path: Path, case: str) -> None:
    assert read(tmp_path, READ[case]) == TWO_DEVICES


REFUSED = {
    "nothing": ("", "order.txt has no actions; expected one line of actions for each device"),
    "comments alone": ("# nothing\n\n  # here\n", "order.txt has no actions"),
    "a wrong letter": ("0F0 0B0\n1F0 1X0\n", "line 2: '1X0' is not an action; expected stage, F, B, I or W"),
    "a small letter": ("0f0 0b0\n", "line 1: '0f0' is not an action"),
    "what is no action at all": ("# mine\n\nforward backward\n", "line 3: 'forward' is not an action"),
    "a negative number": ("0F-1 0B-1\n", "line 1: '0F-1' is not an action"),
    "a fraction": ("0F0.5\n", "line 1: '0F0.5' is not an action"),
    "digits that are not ASCII": ("0F\u0663 0B\u0663\n", "is not an action"),
    "a number that is too large": ("0F99999999999 0B99999999999\n", "line 1: '0F99999999999' is not an action"),
    "a number of very many digits": (f"0F{'9' * 9999}\n", f"'0F{'9' * 28}...' is not an action"),
    "a large number": ("0F999999999 0B999999999\n", "line 1: 0F0 is missing"),
    "torch's CSV with transfers": ("0F0,0SEND_F0\n1RECV_F0,1F0\n", "line 1: '0SEND_F0' is not an action; .*; list only computation"),
    "torch's overlapped actions": ("(0F0;1B0)OVERLAP_F_B\n", r"line 1: '\(0F0' is not an action"),
    "a repeated action": ("\n0F0 0B0 0B0\n", "line 2: 0B0 appears 2 times"),
    "a missing action": ("0F0 0B0\n\n1F0 1F1 1B0 1B1\n", "line 1: 0F1 is missing"),
    "a device that always waits": ("0F0 0B0\n,,,\n", "line 2: device 1 has no actions"),
    "a stage on two devices": ("0F0\n# second\n0B0\n", "line 3: 0B0 is on device 1"),
    "halves the wrong way round": ("0F0 0W0 0I0\n", "line 1: 0W0 comes before 0I0"),
    "a stage that is left out": ("0F0 0B0\n2F0 2B0\n", "order.txt: stage 1 has no actions"),
    "a deadlock": (DEADLOCK.replace("/", "\n"), "order.txt: the order can never finish: device 0 waits at 0B0 for 1B0, device 1 waits at 1F1 for 0F1"),
    "a picture": (b"\x89PNG\r\n\x1a\n\x00\x00\xff\xfe", "order.txt is not text"),
    "zeros": (b"\x00" * 100, "is not an action"),
    "UTF-16": ("0F0 0B0".encode("utf-16"), "order.txt is not text"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_no_order_is_refused(tmp_path: Path, case: str) -> None:
    content, message = REFUSED[case]
    with pytest.raises(UsageError, match=message) as caught:
        read(tmp_path, content)
    assert "order.txt" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_folder_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read as an order: Is a directory; expected one line of actions"):
        read_custom_order(tmp_path)
    with pytest.raises(UsageError, match="gone.txt cannot be read as an order: No such file or directory"):
        read_custom_order(tmp_path / "gone.txt")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a file without an end")
def test_a_file_without_an_end_is_not_read_to_its_end() -> None:
    with pytest.raises(UsageError, match="/dev/zero has more than 20000000 characters"):
        read_custom_order(Path("/dev/zero"))


def test_huge_numbers_take_no_memory(tmp_path: Path) -> None:
    """A list of the stages or micro-batches up to them would take gigabytes."""
    tracemalloc.start()
    for order in ("0F999999999 0B999999999", "999999999F0 999999999B0", "0F0 0B0 0F999999999 0B999999999"):
        with pytest.raises(UsageError):
            read(tmp_path, order)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100_000_000


@given(schedules)
def test_every_schedule_can_be_written_down_and_read_back(schedule: Schedule) -> None:
    name = "custom:" + " / ".join(" ".join(map(str, order)) for order in schedule.orders)
    again = make_schedule(name, num_devices=schedule.num_devices, num_microbatches=schedule.num_microbatches)
    assert (again.orders, again.devices) == (schedule.orders, schedule.devices)
    assert num_stages_of(name, schedule.num_devices) == schedule.num_stages


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("custom:", "custom order, device 0: device 0 has no actions"),
        ("custom:0F0 0B0 /", "custom order, device 1: device 1 has no actions"),
        ("custom:0F0 0X0", "custom order, device 0: '0X0' is not an action"),
        ("custom:0F0 0B0 / 2F0 2B0", "custom order: stage 1 has no actions"),
        (f"custom:{DEADLOCK}", "custom order: the order can never finish: device 0 waits at 0B0 for 1B0"),
        ("custom:0F99999999999 0B99999999999", "is not an action"),
    ],
)
def test_a_name_that_is_a_broken_order_is_refused_wherever_it_is_used(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        schedule_info(name)
    with pytest.raises(UsageError, match=message):
        num_stages_of(name, 2)
    with pytest.raises(UsageError, match=message):
        make_schedule(name, num_devices=2, num_microbatches=1)


def test_what_the_name_of_a_custom_order_says() -> None:
    said = schedule_info("custom:0F0 0F1 2F0 2B0 2F1 2I1 2W1 0B0 0I1 0W1 / 1F0 1F1 1I0 1B1 1W0")
    assert (said.title, said.num_chunks, said.splits_backward) == ("custom order", 2, True)
    assert (said.num_devices, said.num_microbatches) == (2, 2)
    assert not schedule_info(TWO_DEVICES).splits_backward


def test_a_custom_order_serves_fewer_micro_batches_and_no_other_numbers() -> None:
    one = make_schedule(TWO_DEVICES, num_devices=2, num_microbatches=1)
    assert [[str(x) for x in order] for order in one.orders] == [["0F0", "0B0"], ["1F0", "1B0"]]
    for k, m, asked in ((3, 2, "3 devices"), (1, 2, "1 device"), (2, 3, "3 micro-batches")):
        with pytest.raises(
            UsageError, match=f"asked for {asked}, but the custom order has 2 [a-z-]*; leave the number out"
        ):
            make_schedule(TWO_DEVICES, num_devices=k, num_microbatches=m)


@given(st.data(), schedules)
def test_a_custom_order_of_fewer_micro_batches_can_be_carried_out(data: st.DataObject, schedule: Schedule) -> None:
    name = "custom:" + " / ".join(" ".join(map(str, order)) for order in schedule.orders)
    fewer = data.draw(st.integers(1, schedule.num_microbatches))
    cut = make_schedule(name, num_devices=schedule.num_devices, num_microbatches=fewer)
    text = "custom:" + " / ".join(" ".join(map(str, order)) for order in cut.orders)
    assert custom_order(text).num_microbatches == fewer


def test_a_schedule_can_be_sent_to_another_process() -> None:
    schedule = make_schedule("zb-v", num_devices=2, num_microbatches=3)
    assert schedule.devices == (0, 1, 1, 0)
    again = pickle.loads(pickle.dumps(schedule))
    assert again != schedule
    assert (again.orders, again.devices, again.name) == (schedule.orders, schedule.devices, schedule.name)
