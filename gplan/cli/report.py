"""`gplan report`: charts and one page."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gplan import api
from gplan.cli.arguments import PLAN_FILE, PROFILE_FILE, REPORT_FOLDER, RUN_FILE, beside
from gplan.cli.output import json_option, progress_bar, reader_may_leave
from gplan.core import Plan, Profile, Run, Verification
from gplan.core.errors import FileError, UsageError
from gplan.evaluate.calibration import profile_of
from gplan.files import json_files

_EXAMPLES = """
\b
Examples:
  gplan report
  gplan report gplan.plan.json --output charts
  gplan report demo.run.json --profile demo.profile.json"""


@click.command(help="Draw a run beside its prediction, or a plan alone: a page, charts and a trace.\n" + _EXAMPLES)
@click.argument("subject", required=False, type=click.Path(path_type=Path))
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    help=f"That the plan was made from: for the reasons, and for other K and M.  [default: {PROFILE_FILE}, if it is its]",
)
@click.option("--output", default=REPORT_FOLDER, show_default=True, type=click.Path(path_type=Path))
@json_option
def report(subject: Path | None, profile: Path | None, output: Path, as_json: bool) -> None:
    source, passed_over = (subject, "") if subject is not None else _newest_subject()
    value = api.load(source)
    if isinstance(value, Verification):
        value = value.chosen.run
    if not isinstance(value, Plan | Run):
        what = type(value).__name__.lower()
        raise UsageError(f"{source} is a {what}; expected a run or a plan: make one with `gplan balance --k 2`")
    known, remark = _profile_of(value, profile)
    with progress_bar() as (show, _):
        paths = api.report(value, output, profile=known, progress=show)
    with reader_may_leave():
        if as_json:
            click.echo(json.dumps([str(path) for path in paths]))
            return
        click.echo(f"read {source}{remark}{passed_over}")
        for path in paths:
            click.echo(f"wrote {path}")


def _profile_of(value: Plan | Run, named: Path | None) -> tuple[Profile | None, str]:
    """The profile that was named, or else the one that lies here if the plan was made from it; what to say of it.

    Calibrated where the plan was priced so.
    """
    from gplan.evaluate.explain.bottleneck import profile_in_plan_order

    found = Path(PROFILE_FILE) if named is None else named
    plan, engine = (value.plan, value.engine) if isinstance(value, Run) else (value, "torch")
    if named is None and not found.exists():
        return None, "; without a profile (--profile) the page has no reasons and no other numbers of devices"
    try:
        known = json_files.load(Profile, found)
        profile_in_plan_order(plan, known)
    except FileError:
        if named is not None:
            raise
        return None, f"; {found} is not the profile of this plan, so the page has no reasons (--profile names another)"
    return profile_of(plan, known, beside(found), engine=engine), f" and {found}"


def _newest_subject() -> tuple[Path, str]:
    """The file to draw, and what to say of the other one."""
    found = [Path(name) for name in (RUN_FILE, PLAN_FILE) if Path(name).exists()]
    if not found:
        raise UsageError(f"there is neither {RUN_FILE} nor {PLAN_FILE} here; run `gplan balance` or `gplan run` first")
    newest = max(found, key=lambda path: path.stat().st_mtime)
    is_run_older = newest == Path(PLAN_FILE) and len(found) > 1
    return newest, f"; {RUN_FILE} is older than it and was not read" if is_run_older else ""
