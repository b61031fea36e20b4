"""A search with all dials open, but for those that are given."""

from __future__ import annotations

from typing import Any

from gplan.core import Plan, Profile
from gplan.schedules.request import PlanRequest
from gplan.strategy_search.planner import balance

OPEN: dict[str, Any] = {"num_devices": "auto", "schedule": "auto", "recompute": "auto"}


def search(profile: Profile, **dials: Any) -> Plan:
    """The plan of a search; the dials are those of a `PlanRequest`, by default all open."""
    return balance(profile, **{**OPEN, **dials})


def search_machine(profile: Profile, machine: Any, **dials: Any) -> Plan:
    """The same on a machine."""
    return balance(profile, machine=machine, **{**OPEN, **dials})


def open_request(**dials: Any) -> PlanRequest:
    """A request with all dials open, but for those that are given."""
    return PlanRequest(**{**OPEN, **dials})
