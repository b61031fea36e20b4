"""The user's line of an error: not of torch, the standard library or gplan."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
import torch

from gplan.core.units import parse_bytes
from gplan_profiler.capture.sequence import as_sequential
from gplan_profiler.model.error_location import author_line, describe


def error_of(code: str, path: Path) -> BaseException:
    """What running `code`, as if it stood in a file, raises."""
    path.write_text(code)
    with pytest.raises(Exception) as caught:
        known = {"torch": torch, "json": json, "as_sequential": as_sequential, "parse_bytes": parse_bytes}
        exec(compile(code, str(path), "exec"), known)
    # without the frame of this test, which is an author's too
    return caught.value.with_traceback(caught.tb.tb_next)


@pytest.mark.parametrize(
    "line",
    ["torch.nn.Linear(2, 2)(torch.ones(3))", "json.loads('{')", "as_sequential([7])", "parse_bytes('x')"],
    ids=["in torch", "in the standard library", "in the profiler", "in gplan"],
)
def test_an_error_below_the_authors_line_names_that_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    error = error_of(f"x = 1\n{line}\n", path)
    assert author_line(error) == f"{path}, line 2: {line}"
    assert describe(error).endswith(f" ({path}, line 2)")
    assert describe(error).startswith(f"{type(error).__name__}: {str(error).splitlines()[0][:50]}")


def test_user_code_in_a_folder_named_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "python-projects" / "model.py"
    path.parent.mkdir()
    monkeypatch.syspath_prepend(str(path.parent))
    assert author_line(error_of("1 / 0", path)) == f"{path}, line 1: 1 / 0"


def test_error_without_user_line() -> None:
    with pytest.raises(ValueError) as caught:
        json.loads("{")
    inside: types.TracebackType | None = caught.tb.tb_next
    error = caught.value.with_traceback(inside)
    assert author_line(error) is None
    assert describe(error) == f"JSONDecodeError: {error}"


def test_an_error_without_words_says_so() -> None:
    assert describe(KeyError()) == "KeyError: no message"
