"""`gplan report`: charts and one page."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gplan import api
from gplan.cli.output import json_option, reader_may_leave
from gplan.cli.places import PLAN_FILE, REPORT_FOLDER, RUN_FILE
from gplan.errors import UsageError
from gplan.nouns import Profile

_EXAMPLES = """
\b
Examples:
  gplan report
  gplan report gplan.plan.json --output charts"""


@click.command(help="Draw a run beside its prediction, or a plan alone.\n" + _EXAMPLES)
@click.argument("subject", required=False, type=click.Path(path_type=Path))
@click.option("--output", default=REPORT_FOLDER, show_default=True, type=click.Path(path_type=Path))
@json_option
def report(subject: Path | None, output: Path, as_json: bool) -> None:
    source = subject or _newest_subject()
    value = api.load(source)
    if isinstance(value, Profile):
        raise UsageError(f"{subject} is a profile; expected a run or a plan: make one with `gplan balance --k 2`")
    paths = api.report(value, output)
    with reader_may_leave():
        if as_json:
            click.echo(json.dumps([str(path) for path in paths]))
            return
        click.echo(f"read {source}")
        for path in paths:
            click.echo(f"wrote {path}")


def _newest_subject() -> Path:
    found = [Path(name) for name in (RUN_FILE, PLAN_FILE) if Path(name).exists()]
    if not found:
        raise UsageError(f"there is neither {RUN_FILE} nor {PLAN_FILE} here; run `gplan balance` or `gplan run` first")
    return max(found, key=lambda path: path.stat().st_mtime)
