"""`gplan verify`: run a plan and its rivals in turns, and compare all of them with their predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gplan.cli.arguments import (
    PLAN_FILE,
    VERIFICATION_FILE,
    engine_option,
    output_option,
    profile_option,
    timeout_option,
)
from gplan.cli.output import json_option, print_result, progress_bar

if TYPE_CHECKING:
    from gplan.core import Plan, Profile, Verification


@click.command()
@click.argument("subject", default=PLAN_FILE, metavar="[PLAN|MODEL]")
@profile_option
@click.option("--k", "num_devices", type=click.IntRange(min=1), help="Devices, with a model file.  [default: 2]")
@engine_option
@click.option("--steps", default=8, show_default=True, help="Training steps of every run, 6 or more.")
@click.option("--rounds", default=4, show_default=True, help="How often every plan is run.")
@click.option("--rivals", type=int, metavar="N", help="At most this many rivals.  [default: all]")
@timeout_option
@output_option(VERIFICATION_FILE)
@json_option
def verify(
    subject: str, profile_file: Path, num_devices: int | None, engine: Any, steps: int, rounds: int, rivals: int | None,
    timeout: float, output: Path, as_json: bool,
) -> None:  # fmt: skip
    """Run a plan and its rivals in turns, and compare the measurements with the predictions.

    \b
    Examples:
      gplan verify
      gplan verify gplan.plan.json --profile gplan.profile.json --engine virtual
      gplan verify --rounds 6 --rivals 3
      gplan verify model.py --k 2

    The rivals: equal numbers of layers, plans that the file names for comparison, one cut moved by a layer, another
    schedule, half and double the micro-batches (with the same batch if those sizes were profiled). A model file is first profiled and balanced.
    """
    from gplan import api
    from gplan.core import Plan, Profile
    from gplan.core.errors import UsageError
    from gplan.evaluate.verify import check_counts
    from gplan.files import json_files
    from gplan.reporting.text.verification import verification_view
    from gplan.runtime.run.launch import check_not_torchrun

    check_not_torchrun()  # before a model file is profiled
    check_counts(rounds, steps, rivals)
    json_files.check_writable(output)
    with progress_bar() as progress:
        if subject.partition(":")[0].endswith(".py"):
            plan, profile = _planned(subject, num_devices or 2, profile_file, progress=progress)
        elif num_devices is not None:
            raise UsageError(f"{subject} has its own devices; leave out --k, or name a model file")
        else:
            plan, profile = json_files.load(Plan, Path(subject)), json_files.load(Profile, profile_file)
        result = api.verify(
            plan,
            profile,
            engine=engine,
            num_steps=steps,
            num_rounds=rounds,
            num_rivals=rivals,
            timeout_s=timeout,
            progress=progress,
        )
    json_files.save(result, output)
    print_result(_summary(result), lambda: verification_view(result), as_json=as_json, written=output)


_SIZES, _SIZE, _NUM_MICROBATCHES = (2, 4, 8), 4, 8  # for a model file: half and double keep the batch


def _planned(model: str, num_devices: int, profile_file: Path, *, progress: Any) -> tuple[Plan, Profile]:
    """A new profile and plan of a model file, written where `gplan profile` and `gplan balance` write theirs."""
    from gplan import api
    from gplan.core.errors import UsageError
    from gplan.files import json_files

    plan_file = Path(PLAN_FILE)
    if profile_file.exists() and not plan_file.exists():
        raise UsageError(
            f"{profile_file} exists already, and no plan: make one with `gplan balance {profile_file} --k {num_devices} "
            f"--microbatches {_NUM_MICROBATCHES} --microbatch-size {_SIZE}` (K at most the number of its layers) and run "
            f"`gplan verify --profile {profile_file}`; or remove the file to start again"
        )
    for path in (profile_file, plan_file):
        if path.exists():
            raise UsageError(
                f"{path} exists already, and a new profile and plan of {model} would replace it: run `gplan verify` to "
                "verify the existing plan, or remove the file to start again"
            )
        json_files.check_writable(path)
    _check_stages(model, num_devices)
    profile = api.profile(model, microbatch_sizes=_SIZES, progress=progress)
    json_files.save(profile, profile_file)
    plan = api.balance(profile, num_devices=num_devices, num_microbatches=_NUM_MICROBATCHES, microbatch_size=_SIZE)
    json_files.save(plan, plan_file)
    return plan, profile


def _check_stages(model: str, num_devices: int) -> None:
    """Raise UsageError, before anything is measured, for more devices than the model has layers.

    A model that cannot be captured without its weights passes; the profiler checks it later.
    """
    from gplan.core.errors import ModelError, UsageError
    from gplan.core.units import counted
    from profiler.model.given_model import num_layers_of

    try:
        num_layers = num_layers_of(model, microbatch_size=_SIZE)
    except ModelError:
        return
    if num_devices > num_layers:
        raise UsageError(
            f"--k {num_devices}: {model} has {counted(num_layers, 'layer')}, and every stage holds at least one; try --k "
            f"{num_layers} or fewer"
        )


def _summary(result: Verification) -> dict[str, Any]:
    """The numbers of the tables; the file that is written holds the runs themselves."""
    from gplan.evaluate.attribution import attribute_error
    from gplan.evaluate.compare import compare, order_difference
    from gplan.evaluate.verify import ranking_of

    chosen = result.chosen
    return {
        "engine": result.engine,
        "standing": ranking_of(result),
        "comparison": compare(chosen.run).rows,
        "attribution": None if order_difference(chosen.run.plan, chosen.run.timeline) else attribute_error(chosen.run),
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
