"""A comparison of two profiles as text: what is shown, in which order, and what is left for --all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import Profile
from gplan.evaluate.profile_difference import profile_difference
from gplan.reporting.text.fitted_table import MOST_LINES
from gplan.reporting.text.profile_difference import difference_view
from tests.made import make_profile
from tests.reporting.text.printed import printed


def told(old: Profile, new: Profile, *, width: int = 120, only_changed: bool = True) -> list[str]:
    return printed(difference_view(profile_difference(old, new), only_changed=only_changed), width=width)


def test_the_largest_change_of_seconds_comes_first_and_what_did_not_change_is_left_out() -> None:
    lines = told(make_profile([1.0, 2.0, 3.0], [0.0] * 3), make_profile([1.1, 2.0, 2.5], [0.0] * 3))
    start = next(i for i, line in enumerate(lines) if line.startswith("c "))
    assert lines[start].split() == ["c", "forward", "3.00", "s", "2.50", "s", "-16.7", "%", "±", "0.0", "%", "faster", "-500", "ms"]  # fmt: skip
    assert lines[start + 1].split()[:2] == ["a", "forward"]
    assert lines[start + 1].endswith("slower   +100 ms")
    assert not any(line.startswith("b ") for line in lines)
    assert any(line.startswith("2 of 3 layers changed beyond the noise, 1 did not") for line in lines)


def test_everything_is_shown_when_asked_for() -> None:
    lines = told(make_profile([1.0, 2.0]), make_profile([1.0, 2.0]), only_changed=False)
    assert {"a", "b", "whole"} <= {line.split()[0] for line in lines}
    assert sum(" exact " in line for line in lines) == 5 + 2 * 5
    assert any(line.startswith("0 of 2 layers changed beyond the noise, 2 did not") for line in lines)


def test_layers_alike_are_one_row_with_the_change_of_one_and_of_all() -> None:
    old, new = (make_profile([x] * 93, [0.0] * 93) for x in (0.002, 0.003))
    folded = [replace(p, layers=(p.layers[0], *(replace(x, same_as=0) for x in p.layers[1:]))) for p in (old, new)]
    (row,) = [line for line in told(*folded) if line.startswith("a and 92 like it")]
    assert "2.00 ms  3.00 ms  +50.0 %" in row
    assert row.endswith("+93.0 ms")


def test_a_change_of_bytes_alone_is_shown_as_exact() -> None:
    lines = told(make_profile([1.0], stash_bytes=1024), make_profile([1.0], stash_bytes=512))
    row = next(line for line in lines if line.startswith("a "))
    assert row.split() == ["a", "stash", "1.00", "KiB", "512", "B", "-50.0", "%", "exact", "less", "-512", "B"]


def test_a_model_of_500_changed_layers_prints_in_a_page() -> None:
    old, new = (make_profile([x + i for i in range(500)]) for x in (1000.0, 2000.0))
    lines = told(old, new)
    assert len(lines) < MOST_LINES + 10
    assert any("more rows: gplan diff --all" in line for line in lines)
    assert sum(" backward " in line for line in told(old, new, only_changed=False)) == 501


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_verdict_and_the_change_are_there_in_every_width(width: int) -> None:
    made = make_profile([0.001, 0.002])
    named = [replace(x, name=f"transformer.encoder.layer.{i}.attention") for i, x in enumerate(made.layers)]
    old = replace(made, layers=tuple(named))
    new = replace(old, layers=(named[0], replace(named[1], costs=make_profile([0.003]).layers[0].costs)))
    lines = told(old, new, width=width)
    assert all(len(line) <= width for line in lines)
    (row,) = [line for line in lines if line.startswith("trans")]
    assert "3.00 ms  +50.0 %" in row or "2.00 ms  3.00 ms  +50.0 %" in row
    assert "slower" in row


def test_layers_that_came_and_went_and_another_machine_are_notes() -> None:
    old = make_profile([1.0, 2.0])
    new = replace(
        old, layers=(old.layers[0], replace(old.layers[1], name="z")), device=replace(old.device, num_threads=2)
    )
    lines = told(old, new)
    assert lines[-3:] == [
        "note: layers that were added: z",
        "note: layers that were removed: b",
        "note: threads: 1 → 2",
    ]


def test_where_all_layers_move_alike_the_machine_is_suspected() -> None:
    slow, fast = make_profile([1.0, 2.0, 3.0]), make_profile([0.9, 1.8, 2.7])
    text = " ".join(told(slow, fast))
    assert "changed by -10.0 %: if all layers change alike, check the machine before the model" in text
    assert "look at the machine" not in " ".join(told(slow, slow))
