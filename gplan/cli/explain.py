"""`gplan explain`: why a plan is as it is, and what would change it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gplan import files
from gplan.cli.calibrations import beside
from gplan.cli.output import json_option, print_only, progress_bar
from gplan.cli.places import PLAN_FILE, PROFILE_FILE
from gplan.nouns import Plan, Profile

_EXAMPLES = """
\b
Examples:
  gplan explain
  gplan explain gplan.plan.json --profile gplan.profile.json
  gplan explain --json"""


@click.command(help="Say what holds a plan up, what would help, and how far it is from changing.\n" + _EXAMPLES)
@click.argument("plan", default=PLAN_FILE, type=click.Path(path_type=Path))
@click.option(
    "--profile",
    default=PROFILE_FILE,
    show_default=True,
    type=click.Path(path_type=Path),
    help="That the plan was made from.",
)
@json_option
def explain(plan: Path, profile: Path, as_json: bool) -> None:
    import msgspec

    from gplan.explain import explain as reasons_for
    from gplan.tables.explanation import explanation_view
    from gplan.verifier import profile_of

    known, measured = files.load(Plan, plan), files.load(Profile, profile)
    with progress_bar() as (show, _):
        found = reasons_for(known, profile_of(known, measured, beside(profile)), progress=show)
    print_only(
        lambda: json.dumps(msgspec.to_builtins(found), indent=1, ensure_ascii=False) + "\n",
        lambda: explanation_view(found),
        as_json=as_json,
    )
