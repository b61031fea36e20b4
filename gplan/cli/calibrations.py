"""Where a calibration lies, and whether it is used: beside its profile, under the profile's name."""

from __future__ import annotations

from pathlib import Path

from gplan import files
from gplan.errors import FileError
from gplan.nouns import Calibration, Profile
from gplan.verifier import calibrated

NONE = "none"


def calibration_file(profile: Path) -> Path:
    """`gplan.calibration.json` for `gplan.profile.json`, `NAME.calibration.json` for `NAME.json`."""
    return profile.with_name(f"{profile.name.removesuffix('.json').removesuffix('.profile')}.calibration.json")


def beside(profile: Path) -> Calibration | None:
    """The calibration that lies beside a profile, whether it is its or another's;
    raises FileError for a damaged one."""
    path = calibration_file(profile)
    try:
        return files.load(Calibration, path) if path.exists() else None
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
        found = files.load(Calibration, Path(given))
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
