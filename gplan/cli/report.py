"""`gplan report`: charts and one page of a run or a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gplan.cli.arguments import (
    PATH,
    PLAN_FILE,
    PROFILE_FILE,
    REPORT_FOLDER,
    RUN_FILE,
    output_option,
)
from gplan.cli.output import json_option, print_result, progress_bar

if TYPE_CHECKING:
    from gplan.core import Plan, Profile, Run


@click.command()
@click.argument("subject", required=False, type=PATH)
@click.option(
    "--profile", "profile_file", type=PATH,
    help="The profile that the plan was made from. With it the page also explains the plan and compares other numbers of "
    f"devices.  [default: {PROFILE_FILE}, if the plan was made from it]",
)  # fmt: skip
@output_option(REPORT_FOLDER)
@json_option
def report(subject: Path | None, profile_file: Path | None, output: Path, as_json: bool) -> None:
    """Draw a run beside its prediction, or a plan alone: one HTML page, its charts and a Chrome trace. Without a file, the
    newer of gplan.run.json and gplan.plan.json is drawn.

    \b
    Examples:
      gplan report
      gplan report gplan.plan.json --output charts
      gplan report demo.run.json --profile demo.profile.json
    """
    from gplan import api
    from gplan.core import Plan, Run, Verification
    from gplan.core.errors import UsageError

    source, skipped = (subject, "") if subject is not None else _newest_subject()
    value = api.load(source)
    if isinstance(value, Verification):
        value = value.chosen.run
    if not isinstance(value, Plan | Run):
        kind = type(value).__name__.lower()
        raise UsageError(f"{source} is a {kind}; expected a run or a plan: make one with `gplan balance --k 2`")
    profile, remark = _profile_of(value, profile_file)
    with progress_bar() as progress:
        paths = api.report(value, output, profile=profile, progress=progress)
    lines = (f"read {source}{remark}{skipped}", *(f"wrote {path}" for path in paths))
    print_result([str(path) for path in paths], lambda: "\n".join(lines), as_json=as_json)


def _profile_of(value: Plan | Run, path: Path | None) -> tuple[Profile | None, str]:
    """The profile at `path`, by default the default file if the plan was made from it; and a remark about it."""
    from gplan.core import Profile, Run
    from gplan.core.errors import FileError
    from gplan.evaluate.replanning import profile_in_plan_order
    from gplan.files import json_files

    source = Path(PROFILE_FILE) if path is None else path
    if path is None and not source.exists():
        return None, "; without a profile (--profile) the page does not explain the plan"
    try:
        profile = json_files.load(Profile, source)
    except FileError as error:
        if path is not None:
            raise
        return None, f"; the page does not explain the plan (see --profile): {error}"
    try:
        profile_in_plan_order(value.plan if isinstance(value, Run) else value, profile)
    except FileError:
        if path is not None:
            raise
        return None, f"; the plan was not made from {source}, so the page does not explain it (see --profile)"
    return profile, f" and {source}"


def _newest_subject() -> tuple[Path, str]:
    """The newer of the default run and plan files, and a remark about the other one."""
    from gplan.core.errors import UsageError

    found = [Path(name) for name in (RUN_FILE, PLAN_FILE) if Path(name).exists()]
    if not found:
        raise UsageError(f"there is neither {RUN_FILE} nor {PLAN_FILE} here; run `gplan balance` or `gplan run` first")
    newest = max(found, key=lambda path: path.stat().st_mtime)
    is_run_older = newest == Path(PLAN_FILE) and len(found) > 1
    return newest, f"; {RUN_FILE} is older and was not read" if is_run_older else ""
