"""`gplan diff`: what changed between two profiles, beyond the noise."""

from __future__ import annotations

from pathlib import Path

import click

from gplan.cli.arguments import PATH
from gplan.cli.output import json_option, print_result


@click.command()
@click.argument("old", type=PATH)
@click.argument("new", type=PATH)
@click.option("--microbatch-size", type=int, help="Samples per micro-batch.  [default: every size in both profiles]")
@click.option("--all", "show_all", is_flag=True, help="Also show what did not change, and never cut the table.")
@json_option
def diff(old: Path, new: Path, microbatch_size: int | None, show_all: bool, as_json: bool) -> None:
    """Show what became slower or faster between two profiles, beyond the noise.

    \b
    Examples:
      gplan diff before.json gplan.profile.json
      gplan diff before.json gplan.profile.json --microbatch-size 4 --all
    """
    from gplan.core import Profile
    from gplan.evaluate.profile_difference import profile_difference
    from gplan.files import json_files
    from gplan.reporting.text.profile_difference import difference_view

    before, after = (json_files.load(Profile, path) for path in (old, new))
    result = profile_difference(before, after, microbatch_size=microbatch_size)
    print_result(result, lambda: difference_view(result, only_changed=not show_all), as_json=as_json)
