"""Any value that a gplan file can hold, as text."""

from __future__ import annotations

from rich.console import RenderableType

from gplan.core import Calibration, Plan, Profile, Verification
from gplan.core.errors import UsageError
from gplan.files.json_files import Value
from gplan.reporting.text.plan import plan_view
from gplan.reporting.text.profile import Sort, profile_view
from gplan.reporting.text.run import run_view
from gplan.reporting.text.verification import calibration_view, verification_view


def file_view(
    value: Value,
    *,
    name: str,
    sort: Sort | None,
    microbatch_size: int | None,
    show_all: bool,
) -> RenderableType:
    """The tables of a profile (at one micro-batch size, None: the largest; sorted by cost if `sort` is None), plan,
    run, verification or calibration.

    Raises UsageError, with `name` as the file's name, for a size that was not profiled, and for options of a profile
    with any other value.
    """
    if isinstance(value, Profile):
        sizes = value.microbatch_sizes
        size = sizes[-1] if microbatch_size is None else microbatch_size
        if size not in sizes:
            known = " or ".join(map(str, sizes))
            raise UsageError(f"{name} has no micro-batch size {size}; expected --microbatch-size {known}")
        return profile_view(value, sort=sort or "cost", microbatch_sizes=(size,), is_folded=not show_all)
    if sort or microbatch_size is not None or show_all:
        noun = type(value).__name__.lower()
        raise UsageError(f"{name} is a {noun}; --sort, --microbatch-size and --all are for profiles: leave them out")
    if isinstance(value, Verification):
        return verification_view(value)
    if isinstance(value, Calibration):
        return calibration_view(value)
    return plan_view(value) if isinstance(value, Plan) else run_view(value)
