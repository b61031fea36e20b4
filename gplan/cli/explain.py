"""`gplan explain`: why a plan is as it is, and what would change it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gplan.cli.arguments import PLAN_FILE, PROFILE_FILE, beside
from gplan.cli.output import json_option, print_only, progress_bar
from gplan.core import Plan, Profile
from gplan.files import json_files

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

    from gplan.evaluate.calibration import profile_of
    from gplan.evaluate.explain.explain import explain as reasons_for
    from gplan.reporting.text.explanation import explanation_view

    known, measured = json_files.load(Plan, plan), json_files.load(Profile, profile)
    with progress_bar() as (show, _):
        found = reasons_for(known, profile_of(known, measured, beside(profile)), progress=show)
    print_only(
        lambda: json.dumps(msgspec.to_builtins(found), indent=1, ensure_ascii=False) + "\n",
        lambda: explanation_view(found),
        as_json=as_json,
    )
