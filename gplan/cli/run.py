"""`gplan run`: train with a plan, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gplan import api, files
from gplan.cli.output import json_option, print_result, progress_bar
from gplan.cli.places import PLAN_FILE, RUN_FILE
from gplan.errors import RunError
from gplan.nouns import Plan

_EXAMPLES = """
\b
Examples:
  gplan run --steps 60 --check
  gplan run --engine virtual
  torchrun --nproc-per-node 2 -m gplan run --steps 60"""


@click.command(help="Train with a plan and hold what happens against the prediction.\n" + _EXAMPLES)
@click.argument("model", required=False)
@click.option("--plan", "plan_file", default=PLAN_FILE, show_default=True, type=click.Path(path_type=Path))
@click.option("--engine", default="torch", show_default=True, type=click.Choice(["torch", "virtual"]),
              help="torch: one process per stage; virtual: all stages in this process, devices on the clock only.")  # fmt: skip
@click.option("--steps", default=20, show_default=True, help="Training steps.")
@click.option("--check", is_flag=True, help="Compare the first gradients with the plain model's.")
@click.option("--seed", default=0, show_default=True, help="Seed of the weights.")
@click.option("--timeout", default=120.0, show_default=True, help="Longest silence of the processes, in seconds.")
@click.option("--output", default=RUN_FILE, show_default=True, type=click.Path(path_type=Path))
@json_option
def run(
    model: str | None, plan_file: Path, engine: Any, steps: int, check: bool, seed: int, timeout: float, output: Path,
    as_json: bool,
) -> None:  # fmt: skip
    from gplan.tables import run_view

    plan = files.load(Plan, plan_file)
    files.check_writable(output)
    with progress_bar(num_steps=steps) as (_, step):
        result = api.run(
            plan,
            model=model,
            engine=engine,
            num_steps=steps,
            check=check,
            seed=seed,
            timeout_s=timeout,
            progress=step,
        )
    if not api.speaks():
        return
    files.save(result, output)
    print_result(result, lambda: run_view(result), output, as_json=as_json)
    if result.check is not None and not result.check.passed:
        raise RunError(
            f"gradients differ from the plain model's by {result.check.max_relative_error:.1e} in "
            f"{result.check.worst_parameter}; expected at most {result.check.tolerance:.0e}; {output} holds the run"
        )
