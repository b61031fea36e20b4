"""`gplan diff`: two profiles, beyond the noise."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gplan.cli.output import json_option, print_only
from gplan.files import json_files

_EXAMPLES = """
\b
Examples:
  gplan diff before.json gplan.profile.json
  gplan diff before.json gplan.profile.json --microbatch-size 4 --all"""


@click.command(help="What became slower or faster from one profile to another, beyond the noise.\n" + _EXAMPLES)
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--microbatch-size", type=int, help="Samples in a micro-batch.  [default: every size that both have]")
@click.option("--all", "show_all", is_flag=True, help="Also what did not change, however many rows.")
@json_option
def diff(old: Path, new: Path, microbatch_size: int | None, show_all: bool, as_json: bool) -> None:
    import msgspec

    from gplan.evaluate.profile_difference import difference, profile_in
    from gplan.reporting.text.profile_difference import difference_view

    profiles = [profile_in(json_files.load_any(path), name=str(path)) for path in (old, new)]
    result = difference(*profiles, microbatch_size=microbatch_size)
    print_only(
        lambda: json.dumps(msgspec.to_builtins(result), indent=1, ensure_ascii=False) + "\n",
        lambda: difference_view(result, only_changed=not show_all),
        as_json=as_json,
    )
