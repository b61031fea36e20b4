"""`gplan import`: a profile that was published with another planner."""

from __future__ import annotations

from pathlib import Path

import click

from gplan.cli.arguments import PROFILE_FILE
from gplan.cli.output import json_option, print_result
from gplan.core import Link
from gplan.core.units import parse_link
from gplan.files import json_files

_EXAMPLES = """
\b
Examples:
  gplan import bert24_training.json
  gplan balance --k 4 --minimize max-device-load
  gplan import vgg16.graph.txt --link 10GB/s,5us --output vgg16.profile.json
  gplan balance vgg16.profile.json --k 4 --minimize max-compute"""


@click.command(
    name="import", help="Make a profile of FILE, dnn-partitioning's JSON or PipeDream's graph.txt.\n" + _EXAMPLES
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--link", metavar="RATE,LATENCY", help="The link between devices, such as 25GB/s,5us, for graph.txt, which "
              "has none.  [default: 1GB/s, as PipeDream]")  # fmt: skip
@click.option("--output", default=PROFILE_FILE, show_default=True, type=click.Path(path_type=Path))
@json_option
def import_(file: Path, link: str | None, output: Path, as_json: bool) -> None:
    from gplan.interop.published.importing import import_profile
    from gplan.reporting.text.views import file_view

    bytes_per_s, latency_s = parse_link(link) if link is not None else (0.0, 0.0)
    given = None if link is None else Link(latency_s=latency_s, bytes_per_s=bytes_per_s)
    result = import_profile(file, link=given)
    json_files.save(result, output)
    view = file_view(result, name=str(file), sort=None, microbatch_size=None, show_all=False)
    print_result(result, lambda: view, as_json=as_json, written=output)
