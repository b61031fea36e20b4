"""`gplan verify`: run a plan and its rivals in turns, and compare all of them with their predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gplan.cli.arguments import (
    PATH,
    PLAN_FILE,
    VERIFICATION_FILE,
    Verb,
    engine_option,
    output_option,
    profile_option,
    timeout_option,
)
from gplan.cli.output import json_option, print_result, progress_bar

if TYPE_CHECKING:
    from gplan.core import Verification


@click.command(cls=Verb)
@click.argument("plan", default=PLAN_FILE, type=PATH)
@profile_option
@engine_option
@click.option("--steps", "num_steps", default=8, show_default=True, help="Training steps of every run, 6 or more.")
@click.option("--rounds", "num_rounds", default=4, show_default=True, help="How often every plan is run.")
@click.option("--rivals", "num_rivals", type=int, metavar="N", help="At most this many rivals.  [default: all]")
@timeout_option
@output_option(VERIFICATION_FILE)
@json_option
def verify(plan: Path, profile_file: Path, output: Path, as_json: bool, **options: Any) -> None:
    """Run a plan and its rivals in turns, and compare the measurements with the predictions.

    \b
    Examples:
      gplan verify
      gplan verify gplan.plan.json --profile gplan.profile.json --engine virtual
      gplan verify --rounds 6 --rivals 3

    The rivals: equal numbers of layers, plans that the file names for comparison, one cut moved by a layer, another
    schedule, half and double the micro-batches (with the same batch if those sizes were profiled).
    """
    from gplan import api
    from gplan.core import Plan, Profile, Verification
    from gplan.files import json_files
    from gplan.reporting.text.verification import verification_view

    chosen, profile = json_files.load(Plan, plan), json_files.load(Profile, profile_file)
    json_files.check_writable(output, Verification)
    with progress_bar() as progress:
        result = api.verify(chosen, profile, progress=progress, **options)
    json_files.save(result, output)
    print_result(_summary(result), lambda: verification_view(result), as_json=as_json, written=output)


def _summary(result: Verification) -> dict[str, Any]:
    """The numbers of the tables; the file that is written holds the runs themselves."""
    from gplan.evaluate.attribution import attribute_error
    from gplan.evaluate.compare import compare
    from gplan.evaluate.verify import ranking_of

    chosen = result.chosen
    return {
        "engine": result.engine,
        "standing": ranking_of(result),
        "comparison": compare(chosen.run).rows,
        "attribution": attribute_error(chosen.run),
        "plans": [
            {
                "label": x.label,
                "schedule": x.plan.schedule,
                "cuts": x.plan.cuts,
                "num_microbatches": x.plan.num_microbatches,
                "microbatch_size": x.plan.microbatch_size,
                "predicted_s": x.predicted_s,
                "measured_s": x.measured_s,
                "error": x.error,
                "steps_s": x.steps_s,
            }
            for x in result.contenders
        ],
        "left_out": result.left_out,
        "notes": result.notes,
    }
