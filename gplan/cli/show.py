"""`gplan show`: any of the files as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gplan.cli.arguments import PROFILE_FILE
from gplan.cli.output import json_option, print_only
from gplan.files import json_files

_EXAMPLES = """
\b
Examples:
  gplan show
  gplan show --sort memory --all
  gplan show gplan.run.json"""


@click.command(help="Print a profile, plan or run that was written before.\n" + _EXAMPLES)
@click.argument("file", default=PROFILE_FILE, type=click.Path(path_type=Path))
@click.option("--sort", type=click.Choice(["cost", "order", "memory"]), help="Layers of a profile.  [default: cost]")
@click.option("--microbatch-size", type=int, help="Of a profile.  [default: the largest, as `gplan balance` takes]")
@click.option("--all", "show_all", is_flag=True, help="A row for every layer, alike or not, however many.")
@json_option
def show(file: Path, sort: Any, microbatch_size: int | None, show_all: bool, as_json: bool) -> None:
    from gplan.reporting.text.views import noun_view

    value = json_files.load_any(file)
    view = noun_view(value, name=str(file), sort=sort, microbatch_size=microbatch_size, show_all=show_all)
    print_only(lambda: json_files.to_json(value).decode(), lambda: view, as_json=as_json)
