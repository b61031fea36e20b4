"""`gplan run`: train with a plan and measure it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gplan.cli.arguments import (
    CHECKPOINTS,
    PATH,
    PLAN_FILE,
    RUN_FILE,
    Advanced,
    Verb,
    engine_option,
    output_option,
    profile_of_plan,
    timeout_option,
)
from gplan.cli.output import json_option, print_result, progress_bar, warnings_noted


@click.command(cls=Verb)
@click.argument("model", required=False)
@click.option("--plan", "plan_file", default=PLAN_FILE, show_default=True, type=PATH, help="The plan to run.")
@engine_option
@click.option("--steps", default=20, show_default=True, help="Training steps, those before --resume included.")
@click.option(
    "--check", is_flag=True, help="Compare the first step's gradients with those of the model without a pipeline."
)
@click.option(
    "--seed",
    cls=Advanced,
    default=0,
    show_default=True,
    help="Seed of the initial weights, of dropout and of random batches; a resumed run keeps the saved one.",
)
@click.option("--weights", type=PATH, metavar="PATH",
              help="Start from these values: a safetensors or torch file, or a folder of them.")  # fmt: skip
@click.option("--save-every", type=int, metavar="N", help="Write a checkpoint after every N steps.")
@click.option(
    "--checkpoints", cls=Advanced, default=CHECKPOINTS, show_default=True, type=PATH, help="The folder of checkpoints."
)
@click.option("--resume", is_flag=False, flag_value="", metavar="[PATH]", default=None,
              help="Continue from PATH, or from the latest checkpoint in the folder if there is one. The plan may "
                   "differ from the one that wrote it.")  # fmt: skip
@click.option("--profile", "profile_file", cls=Advanced, type=PATH, metavar="FILE",
              help="The profile that the plan was made from.  [default: gplan.profile.json, if it is that]")  # fmt: skip
@timeout_option
@output_option(RUN_FILE)
@json_option
def run(
    model: str | None, plan_file: Path, engine: Any, steps: int, resume: str | None, profile_file: Path | None,
    output: Path, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Train with a plan and compare the measured step with the prediction. MODEL is by default the plan's own model file.

    \b
    Examples:
      gplan run --steps 60 --check
      gplan run --engine virtual
      gplan run --steps 1000 --save-every 100
      gplan run --steps 1000 --save-every 100 --resume
      torchrun --nproc-per-node 2 -m gplan run --steps 60
    """
    from gplan import api
    from gplan.core import Plan, Run
    from gplan.core.errors import RunError, UsageError, needs_torch
    from gplan.files import json_files
    from gplan.reporting.text.run import run_view

    if model is not None and model.endswith(".json"):
        raise UsageError(f"{model} is in the place of the model file; to run a plan: gplan run --plan {model}")
    plan = json_files.load(Plan, plan_file)
    json_files.check_writable(output, Run)
    profile, _ = profile_of_plan(plan, profile_file)
    with needs_torch("gplan.run"):
        from gplan.runtime.run.launch import is_main_process, notes_at_start
    shown_notes = notes_at_start(plan, engine) if is_main_process() else ()
    for note in shown_notes:
        click.echo(f"note: {note}", err=True)
    with progress_bar() as progress, warnings_noted() as warned:
        result = api.run(
            plan,
            model=model,
            engine=engine,
            profile=profile,
            num_steps=steps,
            resume=None if resume is None else resume or True,
            **options,
            progress=lambda i, loss: progress(f"step {i + 1} of {steps}, loss {loss:.4f}", (i + 1) / steps),
        )
    if not is_main_process():
        return
    json_files.save(result, output)
    print_result(result, lambda: run_view(result, shown_notes=(*shown_notes, *warned)), as_json=as_json, written=output)
    if result.check is not None and not result.check.passed:
        raise RunError(
            f"gradients differ from the plain model's by {result.check.max_relative_error:.1e} in "
            f"{result.check.worst_parameter}; expected at most {result.check.tolerance:.0e}; {output} holds the run"
        )
