"""`gplan export`: a plan in the syntax of another trainer."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gplan.cli.arguments import PLAN_FILE, PROFILE_FILE
from gplan.cli.output import json_option, reader_may_leave
from gplan.core import Plan, Profile
from gplan.files import json_files
from gplan.interop.export.exporters import FORMATS
from gplan.interop.export.exporters import export as export_plan

_EXAMPLES = """
\b
Examples:
  gplan export --to torchgpipe
  gplan export --to megatron > arguments.sh
  gplan export plan.json --to torchtitan --output pipeline.toml"""


@click.command(help="Write a plan as another trainer reads it, or say why that trainer cannot run it.\n" + _EXAMPLES)
@click.argument("plan", default=PLAN_FILE, type=click.Path(path_type=Path))
@click.option("--to", required=True, type=click.Choice(list(FORMATS)), help="Who is to read it.")
@click.option("--output", type=click.Path(path_type=Path), help="A file for it.  [default: print it]")
@click.option(
    "--profile", type=click.Path(path_type=Path), metavar="FILE",
    help=f"What the plan was made from: shows what passes between layers.  [default: {PROFILE_FILE} if it is of this model]",
)  # fmt: skip
@json_option
def export(plan: Path, to: str, output: Path | None, profile: Path | None, as_json: bool) -> None:
    value = json_files.load(Plan, plan)
    made = export_plan(value, to=to, profile=_profile_of(value, profile))
    if output is not None:
        json_files.write_bytes(output, made.text.encode())
    content = {"format": made.format, "text": made.text, "notes": made.notes}
    with reader_may_leave():
        if as_json:
            click.echo(json.dumps(content, indent=1, ensure_ascii=False))
            return
        click.echo(made.text if output is None else f"wrote {output}\n", nl=False)
        for note in made.notes:
            click.echo(f"note: {note}", err=True)


def _profile_of(plan: Plan, given: Path | None) -> Profile | None:
    """The profile that was given, or the one that lies here if it has the layers of the plan."""
    if given is not None:
        return json_files.load(Profile, given)
    if not Path(PROFILE_FILE).exists():
        return None
    found = json_files.load(Profile, Path(PROFILE_FILE))
    return found if (found.model, found.granularity) == (plan.model, plan.granularity) else None
