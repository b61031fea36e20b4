"""Where a calibration lies, and whether it is used: beside its profile, under the profile's name."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from gplan.core import Calibration, Profile
from gplan.core.errors import FileError, UsageError
from gplan.evaluate.calibration import calibrated
from gplan.files import json_files
from gplan.schedules.custom import is_custom_order, read_custom_order
from gplan.schedules.dependencies import execution_order
from gplan.schedules.registry import SCHEDULES, canonical, check_custom_counts, make_schedule, schedule_info

# The files that join the verbs: each reads what the one before it wrote.


PROFILE_FILE, PLAN_FILE, RUN_FILE = "gplan.profile.json", "gplan.plan.json", "gplan.run.json"
VERIFICATION_FILE = "gplan.verification.json"
REPORT_FOLDER = "gplan-report"
CHECKPOINTS = "gplan-checkpoints"


# Schedules as a user names them: by name, or by a file with an order.


SCHEDULE_HELP = f"{', '.join(SCHEDULES)}; name:4 has 4 chunks a device; or a file with an order."


def schedule_named(text: str) -> str:
    """The schedule of that name, or in that file; raises UsageError for what is neither or can never finish."""
    path = Path(text)
    is_file = text.partition(":")[0] not in SCHEDULES and not is_custom_order(text) and (path.suffix or _is_file(path))
    name = read_custom_order(path) if is_file else text
    try:
        said = schedule_info(name)
        if said.num_devices is not None and said.num_microbatches is not None:
            execution_order(make_schedule(name, num_devices=said.num_devices, num_microbatches=said.num_microbatches))
    except ValueError as error:
        raise UsageError(f"{text if is_file else '--schedule'}: {error}") from error
    return canonical(name)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


NumberT = TypeVar("NumberT", int | None, int | str | None)


def agreed(schedule: str, num_devices: NumberT, num_microbatches: NumberT) -> tuple[NumberT, NumberT]:
    """The numbers (or "auto") that were given, or else those of a custom order; raises UsageError where they differ."""
    check_custom_counts(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    said = schedule_info(schedule)
    return (
        said.num_devices if num_devices is None else num_devices,
        said.num_microbatches if num_microbatches is None else num_microbatches,
    )


NONE = "none"


def calibration_file(profile: Path) -> Path:
    """`gplan.calibration.json` for `gplan.profile.json`, `NAME.calibration.json` for `NAME.json`."""
    return profile.with_name(f"{profile.name.removesuffix('.json').removesuffix('.profile')}.calibration.json")


def beside(profile: Path) -> Calibration | None:
    """The calibration that lies beside a profile, whether it is its or another's;
    raises FileError for a damaged one."""
    path = calibration_file(profile)
    try:
        return json_files.load(Calibration, path) if path.exists() else None
    except FileError as error:
        raise FileError(f"{error}, or remove {path} to use the profile as it was measured") from error


def with_calibration(known: Profile, profile: Path, given: str | None) -> tuple[Profile, tuple[str, ...]]:
    """The profile as it is to be planned with, and what to say of it.

    By default the calibration beside it is used if it was learned for it and helps; `given` names another file, or
    "none". Raises FileError for a file that was named and was learned for another profile.
    """
    if given == NONE:
        return known, ()
    if given is not None:
        found = json_files.load(Calibration, Path(given))
        return calibrated(known, found), ()
    lying = beside(profile)
    if lying is None:
        return known, ()
    path = calibration_file(profile)
    if not lying.belongs_to(known):
        return known, (
            f"{path} was learned for another profile and is not used; `gplan verify --calibrate` makes it anew",
        )
    if not lying.held_out:
        return known, (
            f"{path} is not used: no other plan was run to check it by; calibrate again with `gplan verify --calibrate` and "
            "at least one rival, or name it with --calibration",
        )
    if not lying.helps:
        return known, (f"{path} is not used: plans that it was not learned from are predicted no better with it",)
    return calibrated(known, lying), ()
