"""`gplan explain`: what limits a plan, and what would change it."""

from __future__ import annotations

from pathlib import Path

import click

from gplan.cli.arguments import PATH, PLAN_FILE, profile_option
from gplan.cli.output import json_option, print_result, progress_bar


@click.command()
@click.argument("plan", default=PLAN_FILE, type=PATH)
@profile_option
@json_option
def explain(plan: Path, profile_file: Path, as_json: bool) -> None:
    """Explain a plan: what limits its step, what would make it faster, and what simpler rules would give.

    \b
    Examples:
      gplan explain
      gplan explain gplan.plan.json --profile gplan.profile.json
      gplan explain --json
    """
    from gplan.core import Plan, Profile
    from gplan.evaluate.explain import explain as explain_plan
    from gplan.files import json_files
    from gplan.reporting.text.explanation import explanation_view

    chosen, profile = json_files.load(Plan, plan), json_files.load(Profile, profile_file)
    with progress_bar() as progress:
        explanation = explain_plan(chosen, profile, progress=progress)
    print_result(explanation, lambda: explanation_view(explanation), as_json=as_json)
