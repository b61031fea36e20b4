"""`gplan show`: any of gplan's files as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gplan.cli.arguments import PATH, PROFILE_FILE
from gplan.cli.output import json_option, print_result

_EXAMPLES = """
\b
Examples:
  gplan show
  gplan show --sort memory --all
  gplan show gplan.run.json"""


@click.command(help="Print a profile, plan, run, verification or calibration that was written before.\n" + _EXAMPLES)
@click.argument("file", default=PROFILE_FILE, type=PATH)
@click.option("--sort", type=click.Choice(["cost", "order", "memory"]),
              help="Which layers of a profile come first.  [default: cost]")  # fmt: skip
@click.option(
    "--microbatch-size", type=int, help="Which size of a profile.  [default: the largest, as in gplan balance]"
)
@click.option("--all", "show_all", is_flag=True, help="One row for every layer of a profile, even if layers are alike.")
@json_option
def show(file: Path, sort: Any, microbatch_size: int | None, show_all: bool, as_json: bool) -> None:
    from gplan.files import json_files
    from gplan.reporting.text.views import file_view

    value = json_files.load_any(file)
    view = file_view(value, name=str(file), sort=sort, microbatch_size=microbatch_size, show_all=show_all)
    print_result(value, lambda: view, as_json=as_json)
