"""The pictures in the docstrings show what the schedules do: each is drawn again and compared line by line."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module

import pytest

from gplan.core import Action, Schedule, Span, StageCost
from gplan.schedules.registry import SCHEDULES, make_schedule
from gplan.simulation.simulator import timeline_of

FREE = StageCost(
    forward_s=0.0, backward_s=0.0, recompute_s=0.0, optimizer_s=0.0, activation_bytes=0, gradient_bytes=0,
    activation_s=0.0, gradient_s=0.0, input_gradient_s=0.0, weight_gradient_s=0.0,
)  # fmt: skip
"""Actions take what the picture says, transfers nothing."""

Label = Callable[[Action, Schedule], str]


def by_number(action: Action, schedule: Schedule) -> str:
    """The micro-batch; in letters on the device's second chunk."""
    return str(action.microbatch) if is_first_chunk(action, schedule) else "abcdefgh"[action.microbatch]


def by_kind(action: Action, schedule: Schedule) -> str:
    """F0, I0, W0; small on the first of two chunks."""
    text = f"{action.kind.value}{action.microbatch}"
    return text if is_alone(action, schedule) or not is_first_chunk(action, schedule) else text.lower()


def is_first_chunk(action: Action, schedule: Schedule) -> bool:
    return action.stage < schedule.num_devices


def is_alone(action: Action, schedule: Schedule) -> bool:
    return schedule.num_stages == schedule.num_devices


def drawn(schedule: Schedule, label: Label, seconds: dict[str, int]) -> list[str]:
    """A line for each device, a cell for each second."""
    costs = [FREE] * schedule.num_stages
    timeline = timeline_of(schedule, costs, duration_s=lambda x: float(seconds.get(x.kind, 0)), origin="given")
    lines = []
    for device in range(schedule.num_devices):
        cells = ["."] * round(timeline.loop_end_s)
        for span in (x for x in timeline.loop_spans if x.device == device):
            cells[cells_of(span)] = [label(span.action, schedule)] * round(span.duration_s)
        width = max(map(len, cells))
        lines.append(f"device {device} | " + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return lines


def cells_of(span: Span) -> slice:
    return slice(round(span.start_s), round(span.end_s))


def pictures_in(module: str) -> list[list[str]]:
    """Runs of lines of a docstring that begin with a device."""
    runs: list[list[str]] = [[]]
    for line in (import_module(f"gplan.schedules.{module}").__doc__ or "").splitlines():
        if re.match(r" +device \d+ \|", line):
            runs[-1].append(line.strip())
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


WHOLE, HALVES = {"F": 1, "B": 2}, {"F": 1, "I": 1, "W": 1}
SHOWN = {
    "gpipe": ("gpipe", 0, 3, 4, by_number, WHOLE),
    "looped-bfs:2": ("gpipe", 1, 2, 2, by_number, WHOLE),
    "1f1b": ("one_f_one_b", 0, 3, 4, by_number, WHOLE),
    "1f1b-cap:2": ("one_f_one_b", 1, 3, 4, by_number, WHOLE),
    "eager-1f1b": ("one_f_one_b", 2, 3, 4, by_number, WHOLE),
    "interleaved-1f1b:2": ("one_f_one_b", 3, 2, 4, by_number, WHOLE),
    "zb-h1": ("zero_bubble", 0, 3, 4, by_kind, HALVES),
    "zb-v": ("zero_bubble", 1, 2, 4, by_kind, HALVES),
}
"""Of each schedule the module, the place of its picture there, K, M,
what is in the cells and how many each action takes."""


@pytest.mark.parametrize("name", SHOWN)
def test_the_docstring_shows_what_the_schedule_does(name: str) -> None:
    module, place, num_devices, num_microbatches, label, seconds = SHOWN[name]
    schedule = make_schedule(name, num_devices=num_devices, num_microbatches=num_microbatches)
    assert pictures_in(module)[place] == drawn(schedule, label, seconds)


def test_every_schedule_has_a_picture() -> None:
    """A new one: an entry in SHOWN, and in the docstring of its module what `drawn` returns for it."""
    assert {name.partition(":")[0] for name in SHOWN} == set(SCHEDULES)


@pytest.mark.parametrize("module", sorted({module for module, *_ in SHOWN.values()}))
def test_no_picture_is_left_unchecked(module: str) -> None:
    places = [place for owner, place, *_ in SHOWN.values() if owner == module]
    assert places == list(range(len(pictures_in(module))))
