"""`gplan run`: train with a plan, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gplan import api
from gplan.cli.arguments import CHECKPOINTS, PLAN_FILE, RUN_FILE
from gplan.cli.output import json_option, print_result, progress_bar
from gplan.core import Plan
from gplan.core.errors import RunError, UsageError
from gplan.files import json_files

_EXAMPLES = """
\b
Examples:
  gplan run --steps 60 --check
  gplan run --engine virtual
  gplan run --steps 1000 --save-every 100
  gplan run --steps 1000 --save-every 100 --resume
  torchrun --nproc-per-node 2 -m gplan run --steps 60"""


@click.command(help="Train with a plan and hold what happens against the prediction.\n" + _EXAMPLES)
@click.argument("model", required=False)
@click.option("--plan", "plan_file", default=PLAN_FILE, show_default=True, type=click.Path(path_type=Path))
@click.option("--engine", default="torch", show_default=True, type=click.Choice(["torch", "virtual"]),
              help="torch: one process per device; virtual: all in this process, devices on the clock only.")  # fmt: skip
@click.option("--steps", default=20, show_default=True, help="Training steps; after --resume those before count.")
@click.option("--check", is_flag=True, help="Compare the first gradients with the plain model's.")
@click.option("--seed", default=0, show_default=True, help="Seed of the weights.")
@click.option("--weights", type=click.Path(path_type=Path), metavar="PATH",
              help="Begin with these values: a safetensors or torch file, or a folder of them.")  # fmt: skip
@click.option("--save-every", type=int, metavar="N", help="Write a checkpoint after every N steps.")
@click.option("--checkpoints", default=CHECKPOINTS, show_default=True, type=click.Path(path_type=Path),
              help="The folder of checkpoints.")  # fmt: skip
@click.option("--resume", is_flag=False, flag_value="", metavar="[PATH]", default=None,
              help="Go on from PATH, or from the latest checkpoint of the folder, if it has one yet; the plan may be "
                   "another one.")  # fmt: skip
@click.option("--timeout", default=120.0, show_default=True,
              help="Give up when nothing moves for so long, in seconds.")  # fmt: skip
@click.option("--output", default=RUN_FILE, show_default=True, type=click.Path(path_type=Path))
@json_option
def run(
    model: str | None, plan_file: Path, engine: Any, steps: int, check: bool, seed: int, weights: Path | None,
    save_every: int | None, checkpoints: Path, resume: str | None, timeout: float, output: Path, as_json: bool,
) -> None:  # fmt: skip
    from gplan.reporting.text.run import run_view

    if model is not None and model.endswith(".json"):
        raise UsageError(f"{model} stands where the model file may; for a plan: gplan run --plan {model}")
    plan = json_files.load(Plan, plan_file)
    json_files.check_writable(output)
    with progress_bar(num_steps=steps) as (_, step):
        result = api.run(
            plan,
            model=model,
            engine=engine,
            num_steps=steps,
            check=check,
            seed=seed,
            weights=weights,
            save_every=save_every,
            checkpoints=checkpoints,
            resume=None if resume is None else resume or True,
            timeout_s=timeout,
            progress=step,
        )
    if not api.speaks():
        return
    json_files.save(result, output)
    print_result(result, lambda: run_view(result), output, as_json=as_json)
    if result.check is not None and not result.check.passed:
        raise RunError(
            f"gradients differ from the plain model's by {result.check.max_relative_error:.1e} in "
            f"{result.check.worst_parameter}; expected at most {result.check.tolerance:.0e}; {output} holds the run"
        )
