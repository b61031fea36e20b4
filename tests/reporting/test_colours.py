"""The table of colours: complete, and nothing in it can be mistaken for something else."""

from __future__ import annotations

from dataclasses import fields

import pytest

from gplan.core import ActionKind, IdleCause, StageMemory
from gplan.reporting.looks import ACTIONS, COMMUNICATION, IDLE, MEASURED_PEAK, MEMORY, NEUTRALS, RECOMPUTE, of_chunk


def test_every_action_idle_cause_and_memory_category_has_a_look() -> None:
    assert set(ACTIONS) == set(ActionKind)
    assert set(IDLE) == set(IdleCause)
    assert set(MEMORY) == {field.name for field in fields(StageMemory) if field.name.endswith("_bytes")}


def test_idle_causes_can_be_told_apart_without_colour() -> None:
    assert len({look.hatch for look in IDLE.values()}) == len(IDLE)


def test_colours_with_a_meaning_differ_and_are_no_neutrals() -> None:
    neutral = {colour for x in NEUTRALS for colour in (x.light, x.dark)}
    for looks in ([*ACTIONS.values(), RECOMPUTE, COMMUNICATION], [*MEMORY.values(), MEASURED_PEAK]):
        colours = [look.colour for look in looks]
        assert len(set(colours)) == len(colours)
        assert not neutral & set(colours)
        assert not neutral & {look.text for look in looks}


def test_neutrals_have_names_and_light_shades_of_their_own() -> None:
    assert len({x.name for x in NEUTRALS}) == len({x.light for x in NEUTRALS}) == len(NEUTRALS)


@pytest.mark.parametrize("kind", [x for x in ActionKind if x is not ActionKind.OPTIMIZER])
def test_the_shades_of_a_devices_stages_grow_lighter_and_are_never_those_of_another_action(kind: ActionKind) -> None:
    shades = [of_chunk(ACTIONS[kind], chunk, num_chunks=4).colour for chunk in range(4)]
    lightness = [sum(int(shade[i : i + 2], 16) for i in (1, 3, 5)) for shade in shades]
    assert lightness == sorted(set(lightness))
    others = {of_chunk(look, i, num_chunks=4).colour for x, look in ACTIONS.items() if x is not kind for i in range(4)}
    assert not others & set(shades)


def test_a_device_with_one_stage_has_the_usual_colours() -> None:
    assert of_chunk(ACTIONS[ActionKind.FORWARD], 0, num_chunks=1) == ACTIONS[ActionKind.FORWARD]


def test_numbers_in_dark_boxes_are_light_and_in_light_boxes_dark() -> None:
    first, last = (of_chunk(ACTIONS[ActionKind.FORWARD], chunk, num_chunks=8) for chunk in (0, 7))
    assert (first.text, last.text) == ("#fffffe", "#14202e")
