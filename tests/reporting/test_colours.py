"""The table of colours: complete, and nothing in it can be mistaken for something else."""

from __future__ import annotations

from dataclasses import fields

from gplan.nouns import ActionKind, IdleCause, StageMemory
from gplan.reporting.colours import ACTIONS, COMMUNICATION, IDLE, MEASURED_PEAK, MEMORY, NEUTRALS, RECOMPUTE


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
