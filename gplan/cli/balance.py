"""`gplan balance`: the best partition, proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gplan import api, files
from gplan.cli.output import json_option, print_result
from gplan.cli.places import PLAN_FILE, PROFILE_FILE
from gplan.errors import UsageError
from gplan.nouns import OBJECTIVES, RECOMPUTE_MODES, Profile
from gplan.schedules import SCHEDULES
from gplan.units import parse_bytes

_EXAMPLES = """
\b
Examples:
  gplan balance --k 2
  gplan balance --k 4 --microbatches 16 --schedule 1f1b --memory 16GiB --recompute always
  gplan balance --k 4 --minimize max-stage --solver milp"""


@click.command(help="Find the best partition of the layers into K stages, and prove it.\n" + _EXAMPLES)
@click.argument("profile", default=PROFILE_FILE, type=click.Path(path_type=Path))
@click.option("--k", "num_stages", type=int, required=True, help="Stages: how many devices the model is cut over.")
@click.option("--microbatches", type=int, help="Micro-batches a step.  [default: 4 K]")
@click.option("--microbatch-size", type=int, help="Samples in a micro-batch.  [default: the largest profiled]")
@click.option("--batch-size", type=int, help="Samples a step, instead of --microbatch-size.")
@click.option("--schedule", default="gpipe", show_default=True, type=click.Choice(list(SCHEDULES)))
@click.option("--recompute", default="never", show_default=True, type=click.Choice(RECOMPUTE_MODES))
@click.option("--memory", metavar="SIZE", help="Memory of each device, such as 16GiB.  [default: no limit]")
@click.option("--minimize", default="step-time", show_default=True, type=click.Choice(OBJECTIVES))
@click.option("--solver", default="dp", show_default=True, type=click.Choice(["dp", "milp"]))
@click.option("--output", default=PLAN_FILE, show_default=True, type=click.Path(path_type=Path))
@json_option
def balance(
    profile: Path, num_stages: int, microbatches: int | None, microbatch_size: int | None, batch_size: int | None,
    schedule: str, recompute: Any, memory: str | None, minimize: Any, solver: Any, output: Path, as_json: bool,
) -> None:  # fmt: skip
    from gplan.tables import plan_view

    num_microbatches = 4 * num_stages if microbatches is None else microbatches
    result = api.balance(
        files.load(Profile, profile),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        microbatch_size=_microbatch_size(microbatch_size, batch_size, num_microbatches),
        schedule=schedule,
        recompute=recompute,
        memory_bytes=parse_bytes(memory) if memory is not None else None,
        minimize=minimize,
        solver=solver,
    )
    files.save(result, output)
    print_result(result, lambda: plan_view(result), output, as_json=as_json)


def _microbatch_size(microbatch_size: int | None, batch_size: int | None, num_microbatches: int) -> int | None:
    for option, value in (("--microbatch-size", microbatch_size), ("--batch-size", batch_size)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value}: expected at least 1 sample")
    if batch_size is None:
        return microbatch_size
    if microbatch_size is not None:
        raise UsageError(f"got --batch-size {batch_size} and --microbatch-size {microbatch_size}; give one of them")
    if num_microbatches < 1 or batch_size % num_microbatches:
        fitting = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
        raise UsageError(
            f"a batch of {batch_size} cannot be cut into {num_microbatches} equal micro-batches; "
            f"--microbatches {' or '.join(map(str, fitting[-6:]))} would do"
        )
    return batch_size // num_microbatches
