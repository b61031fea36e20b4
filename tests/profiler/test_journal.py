"""The journal restores measurements of the same model and options only."""

from __future__ import annotations

from pathlib import Path

import pytest

from gplan.core.errors import FileError
from profiler.timing.clock import Samples
from profiler.timing.journal import Journal


def test_samples_and_values_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal(path, key="one")
    forward, backward = (first.samples(f"4/all/0/{name}") for name in ("forward", "backward"))
    forward.add(0.5, 0.5)
    backward.clean_s.append(0.25)
    backward.launch_s.append(0.125)
    first.keep("4/all", ("a note",))
    first.save()
    again = Journal(path, key="one")
    assert again.samples("4/all/0/forward") == forward
    assert again.samples("4/all/0/backward") == Samples(clean_s=[0.25], launch_s=[0.125])
    assert again.value("4/all") == ["a note"]
    assert again.num_resumed == 2


def test_another_model_or_way_of_measuring_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, key="one")
    journal.keep("4/all", ())
    journal.save()
    assert Journal(path, key="other").value("4/all") is None


def test_a_closed_journal_leaves_no_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", key="one")
    journal.keep("x", 1)
    journal.save()
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_where_nothing_was_measured(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", key="one")
    journal.save()
    assert list(tmp_path.iterdir()) == []
    assert not journal


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b'{"format": "gplan.journal/6", "key": "one"}',
        b'{"format": "gplan.journal/6", "key": "one", "samples": {"4/all/0/forward": {"clean_s": "soon"}}, "values": {}}',
        b'{"format": "\xff"}',
    ],
    ids=["cut off", "no object", "no samples", "samples that are no numbers", "no text"],
)
def test_a_damaged_journal_is_named_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(FileError, match="remove it"):
        Journal(path, key="one")


def test_without_a_path_it_lives_in_memory() -> None:
    journal = Journal(None, key="one")
    journal.samples("a").add(1.0, 1.0)
    journal.save()
    assert journal.samples("a").clean_s == [1.0]
