"""What the terminal shows: whole numbers in any width."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from gplan.nouns import Profile, Timing, WholeModel
from gplan.tables import profile_view
from tests.made import make_profile


def profile_with_long_names() -> Profile:
    made = make_profile([0.0012, 0.0034], weight_bytes=5000, stash_bytes=7000, output_bytes=900)
    layers = tuple(replace(x, name=f"encoder.layers.{i}.attention.output.dense") for i, x in enumerate(made.layers))
    seconds = Timing.exactly
    whole = WholeModel(microbatch_size=1, forward=seconds(0.0046), backward=seconds(0.0), recompute=seconds(0.0))
    return replace(made, layers=layers, loss=made.layers[0].costs, whole=(whole,))


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_numbers_keep_their_units_and_rows_their_names(width: int) -> None:
    console = Console(width=width, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(profile_view(profile_with_long_names(), width=width))
    lines = captured.get().splitlines()
    rows = [line for line in lines if "1.20 ms" in line or "3.40 ms" in line]
    assert len(rows) == 3
    assert any(line.startswith("(loss)") for line in rows)
    assert all("4.88 KiB" in line or "0 B" in line for line in rows)
    assert not any("1.20 …" in line or "m…" in line for line in lines)
