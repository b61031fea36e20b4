"""Plans out to other trainers: pure functions from a plan to text, a module for each receiving project.

A plan that the receiver cannot express is refused with the reason. The profile that the plan was made from is needed to
see what passes between layers; where it is not given, a note says what was not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from gplan.errors import UsageError
from gplan.interop.export.actions import to_csv
from gplan.interop.export.deepspeed import to_deepspeed
from gplan.interop.export.exported import Export
from gplan.interop.export.megatron import to_megatron
from gplan.interop.export.pipelining import to_pytorch
from gplan.interop.export.plain import to_json
from gplan.interop.export.torchgpipe import to_torchgpipe
from gplan.interop.export.torchtitan import to_torchtitan
from gplan.nouns import Plan, Profile

Exporter: TypeAlias = Callable[[Plan, Profile | None], Export]

FORMATS: dict[str, Exporter] = {
    "torchtitan": to_torchtitan,
    "megatron": to_megatron,
    "deepspeed": to_deepspeed,
    "torchgpipe": to_torchgpipe,
    "pytorch": to_pytorch,
    "csv": to_csv,
    "json": to_json,
}

_OF_ANY_PLAN = ("csv", "json")


def export(plan: Plan, *, to: str, profile: Profile | None = None) -> Export:
    """The plan in the syntax of another project; raises UsageError for what that project cannot express."""
    if to not in FORMATS:
        raise UsageError(f"format {to!r} is not known; expected one of {', '.join(FORMATS)}")
    made = FORMATS[to](plan, profile)
    return replace(made, notes=made.notes + _common_notes(plan, profile, to))


def _common_notes(plan: Plan, profile: Profile | None, to: str) -> tuple[str, ...]:
    if to in _OF_ANY_PLAN:
        return ()
    notes = []
    places = [plan.stages_of(device)[0].place for device in range(plan.num_devices)]
    names = [x.name for x in places if x is not None]
    if names:
        notes.append(f"the ranks are meant for these devices, in this order: {', '.join(names)}")
    if profile is None:
        notes.append(
            "without the profile, the order of the layers, what skips layers and shared weights were not checked"
        )
    return tuple(notes)


__all__ = ["FORMATS", "Export", "export"]
