"""`gplan show`: any of gplan's files as tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gplan.cli.arguments import PATH, PROFILE_FILE
from gplan.cli.output import json_option, print_result

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command()
@click.argument("file", default=PROFILE_FILE, type=PATH)
@click.option("--sort", type=click.Choice(["cost", "order", "memory"]),
              help="Which layers of a profile come first.  [default: cost]")  # fmt: skip
@click.option(
    "--microbatch-size", type=int, help="Which size of a profile.  [default: the largest, as in gplan balance]"
)
@click.option("--all", "show_all", is_flag=True, help="One row for every layer of a profile, even if layers are alike.")
@json_option
def show(file: Path, sort: Any, microbatch_size: int | None, show_all: bool, as_json: bool) -> None:
    """Print a profile, plan, run or verification that was written before.

    \b
    Examples:
      gplan show
      gplan show --sort memory --all
      gplan show gplan.run.json
    """
    from gplan.core import Plan, Profile, Run
    from gplan.core.errors import UsageError
    from gplan.files import json_files
    from gplan.reporting.text.plan import plan_view
    from gplan.reporting.text.profile import profile_view
    from gplan.reporting.text.run import run_view
    from gplan.reporting.text.verification import verification_view

    value = json_files.load_any(file)
    if not isinstance(value, Profile) and (sort or microbatch_size is not None or show_all):
        noun = type(value).__name__.lower()
        raise UsageError(f"{file} is a {noun}; --sort, --microbatch-size and --all are for profiles: leave them out")
    view: RenderableType
    if isinstance(value, Profile):
        sizes = value.microbatch_sizes
        size = sizes[-1] if microbatch_size is None else microbatch_size
        if size not in sizes:
            known = " or ".join(map(str, sizes))
            raise UsageError(f"{file} has no micro-batch size {size}; expected --microbatch-size {known}")
        view = profile_view(value, sort=sort or "cost", microbatch_sizes=(size,), is_folded=not show_all)
    elif isinstance(value, Plan):
        view = plan_view(value)
    elif isinstance(value, Run):
        view = run_view(value)
    else:
        view = verification_view(value)
    print_result(value, lambda: view, as_json=as_json)
