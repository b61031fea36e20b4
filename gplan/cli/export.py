"""`gplan export`: a plan in the format of another trainer."""

from __future__ import annotations

from pathlib import Path

import click

from gplan.cli.arguments import PATH, PLAN_FILE, PROFILE_FILE, RECEIVERS, profile_of_plan
from gplan.cli.output import json_option, print_result

_FORMATS = [*RECEIVERS, "csv", "json"]


@click.command()
@click.argument("plan", default=PLAN_FILE, type=PATH)
@click.option("--to", required=True, type=click.Choice(_FORMATS), help="The trainer or format.")
@click.option("-o", "--output", type=PATH, help="The file to write.  [default: print it]")
@click.option(
    "--profile", "profile_file", type=PATH, metavar="FILE",
    help="The profile that the plan was made from; with it the export also checks skip connections and shared weights.  "
    f"[default: {PROFILE_FILE} if it is of this model]",
)  # fmt: skip
@json_option
def export(plan: Path, to: str, output: Path | None, profile_file: Path | None, as_json: bool) -> None:
    """Write a plan in the format of another trainer, or explain why it cannot run the plan.

    \b
    Examples:
      gplan export --to torchgpipe
      gplan export --to megatron > arguments.sh
      gplan export plan.json --to torchtitan --output pipeline_plan.py
    """
    from gplan.core import Plan
    from gplan.core.errors import UsageError
    from gplan.files import json_files
    from gplan.interop.export.exporters import export as export_plan
    from gplan.interop.planning import nearest_plan_text

    chosen = json_files.load(Plan, plan)
    profile = profile_of_plan(chosen, profile_file)
    try:
        made = export_plan(chosen, to=to, profile=profile)
    except UsageError as error:
        nearest = nearest_plan_text(chosen, profile, receiver=to) if profile is not None else ""
        if not nearest:
            raise
        raise UsageError(f"{error}; {nearest}") from error
    if output is not None:
        json_files.write_bytes(output, made.text.encode())
    text = made.text.removesuffix("\n") if output is None else f"wrote {output}"
    print_result(made, lambda: text, as_json=as_json)
    for note in () if as_json else made.notes:
        click.echo(f"note: {note}", err=True)
