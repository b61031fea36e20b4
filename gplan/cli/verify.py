"""`gplan verify`: the plan and its rivals run in turns, and the prediction held against all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gplan import api
from gplan.cli.arguments import PLAN_FILE, PROFILE_FILE, VERIFICATION_FILE, beside, calibration_file
from gplan.cli.output import json_option, print_only, progress_bar
from gplan.core import Calibration, Plan, Profile, Verification
from gplan.core.errors import FileError, ModelError, UsageError
from gplan.core.units import counted
from gplan.evaluate.attribution import attributed
from gplan.evaluate.calibration import calibrate, check_teachable, profile_of
from gplan.evaluate.compare import compare
from gplan.evaluate.rival_rounds import standing_of
from gplan.evaluate.verify import LEAST_STEPS, NUM_ROUNDS, NUM_STEPS, check_counts
from gplan.files import json_files

_EXAMPLES = """
\b
Examples:
  gplan verify
  gplan verify gplan.plan.json --profile gplan.profile.json --engine virtual
  gplan verify --rounds 6 --rivals 3
  gplan verify --calibrate
  gplan verify model.py --k 2

The rivals: equal layer counts, the plan's runner-up, a cut moved by a layer, the other schedule, half and double the
micro-batches (of the same batch where those sizes were profiled). A model file is first profiled and balanced."""

_SIZES, _SIZE, _NUM_MICROBATCHES = (2, 4, 8), 4, 8  # for a model file: half and double keep the batch


@click.command(help="Run a plan and its rivals in turns, and see how far the predictions were off.\n" + _EXAMPLES)
@click.argument("subject", default=PLAN_FILE, metavar="[PLAN|MODEL]")
@click.option("--profile", "profile_file", default=PROFILE_FILE, show_default=True, type=click.Path(path_type=Path),
              help="That the plan was made from.")  # fmt: skip
@click.option("--k", "num_devices", type=click.IntRange(min=1), help="Devices, with a model file.  [default: 2]")
@click.option("--engine", default="torch", show_default=True, type=click.Choice(["torch", "virtual"]),
              help="torch: one process per device; virtual: all in this process, devices on the clock only.")  # fmt: skip
@click.option(
    "--steps", default=NUM_STEPS, show_default=True, help=f"Training steps of every run, {LEAST_STEPS} or more."
)
@click.option("--rounds", default=NUM_ROUNDS, show_default=True, help="How often every plan is run.")
@click.option("--rivals", type=int, metavar="N", help="At most so many beside the plan.  [default: all]")
@click.option("--calibrate", "is_calibrating", is_flag=True,
              help="Write what every second plan teaches beside the profile; `gplan balance` uses it.")  # fmt: skip
@click.option("--timeout", default=120.0, show_default=True,
              help="Give up when nothing moves for so long, in seconds.")  # fmt: skip
@click.option("--output", default=VERIFICATION_FILE, show_default=True, type=click.Path(path_type=Path))
@json_option
def verify(
    subject: str, profile_file: Path, num_devices: int | None, engine: Any, steps: int, rounds: int, rivals: int | None,
    is_calibrating: bool, timeout: float, output: Path, as_json: bool,
) -> None:  # fmt: skip
    from rich.console import Group
    from rich.text import Text

    from gplan.reporting.text.verification import calibration_view, verification_view

    check_counts(rounds, steps, rivals)
    place, learned = calibration_file(profile_file), None
    for path in (output, *([place] if is_calibrating else [])):
        json_files.check_writable(path)
    with progress_bar() as (show, _):
        if _is_model(subject):
            plan, profile = _planned(subject, num_devices or 2, profile_file, progress=show)
        elif num_devices is not None:
            raise UsageError(f"{subject} has its own devices; leave out --k, or name a model file")
        else:
            plan, profile = json_files.load(Plan, Path(subject)), json_files.load(Profile, profile_file)
        if is_calibrating:
            check_teachable(plan)
        result = api.verify(
            plan,
            profile_of(plan, profile, _calibration(profile_file, is_calibrating=is_calibrating)),
            engine=engine,
            num_steps=steps,
            num_rounds=rounds,
            num_rivals=rivals,
            timeout_s=timeout,
            progress=show,
        )
    json_files.save(result, output)
    views = [verification_view(result)]
    if is_calibrating:
        learned = calibrate(result, profile)
        json_files.save(learned, place)
        views += [Text(), calibration_view(learned), Text(f"wrote {place}", style="dim")]
    print_only(lambda: _json(result, learned), lambda: Group(*views), as_json=as_json, written=output)


def _is_model(subject: str) -> bool:
    return subject.partition(":")[0].endswith(".py")


def _calibration(profile_file: Path, *, is_calibrating: bool) -> Calibration | None:
    """What lies beside the profile; a damaged file, where it is to be made again, is none."""
    try:
        return beside(profile_file)
    except FileError:
        if not is_calibrating:
            raise
        return None


def _planned(model: str, num_devices: int, profile_file: Path, *, progress: Any) -> tuple[Plan, Profile]:
    """A profile and a plan of a model file, written where `gplan profile` and `gplan balance` write theirs."""
    plan_file = Path(PLAN_FILE)
    if profile_file.exists() and not plan_file.exists():
        raise UsageError(
            f"{profile_file} is there already, and no plan: make one with `gplan balance {profile_file} --k {num_devices} "
            f"--microbatches {_NUM_MICROBATCHES} --microbatch-size {_SIZE}` (K at most the number of its layers) and run "
            f"`gplan verify --profile {profile_file}`; or remove the file to begin again"
        )
    for path in (profile_file, plan_file):
        if path.exists():
            raise UsageError(
                f"{path} is there already, and {model} would be profiled and planned anew: `gplan verify` runs the plan that "
                "is there; remove the file to begin again"
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

    What is wrong with a model that cannot be captured without its weights is for the profiler to say.
    """
    from profiler import layer_count

    try:
        num_layers = layer_count.num_layers_of(model, microbatch_size=_SIZE)
    except ModelError:
        return
    if num_devices > num_layers:
        raise UsageError(
            f"--k {num_devices}: {model} has {counted(num_layers, 'layer')}, and every stage holds at least one; try --k "
            f"{num_layers} or fewer"
        )


def _json(result: Verification, learned: Calibration | None) -> str:
    """What the tables show, as numbers; the file that is written holds the runs themselves."""
    import msgspec

    chosen = result.chosen
    content = {
        "engine": result.engine,
        "standing": standing_of(result),
        "comparison": compare(chosen.run).rows,
        "attribution": attributed(chosen.run),
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
                "num_refused": x.num_refused,
                "num_disturbed": x.num_disturbed,
            }
            for x in result.contenders
        ],
        "left_out": result.left_out,
        "notes": result.notes,
        "calibration": learned,
    }
    return json.dumps(msgspec.to_builtins(content), indent=1, ensure_ascii=False) + "\n"
