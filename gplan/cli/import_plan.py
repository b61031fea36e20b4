"""`gplan import-plan`: the layout that a trainer runs today, priced beside the best one."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import click

from gplan.cli.arguments import PATH, PLAN_FILE, PROFILE_FILE, RECEIVERS, memory_option, output_option, schedule_named
from gplan.cli.output import json_option, print_result


@click.command(name="import-plan")
@click.argument("layout")
@click.option("--from", "receiver", required=True, type=click.Choice(RECEIVERS), help="The trainer.")
@click.option(
    "--profile", "profile_file", default=PROFILE_FILE, show_default=True, type=PATH, help="The profile of the model."
)
@click.option(
    "--k", "num_devices", type=int, help="Devices in one pipeline.  [default: as the file says, or one a stage]"
)
@click.option("--microbatches", type=int, help="Micro-batches per step.  [default: 4 K]")
@click.option("--microbatch-size", type=int, help="Samples per micro-batch.  [default: the largest profiled]")
@click.option(
    "--schedule", metavar="NAME|FILE", help="The schedule.  [default: 1f1b, interleaved with several stages a device]"
)
@click.option("--recompute", default="never", show_default=True, type=click.Choice(["never", "always", "except-last"]),
              help="What the trainer recomputes.")  # fmt: skip
@memory_option("that of the profile")
@output_option(PLAN_FILE)
@json_option
def import_plan(
    layout: str, receiver: str, profile_file: Path, num_devices: int | None, microbatches: int | None,
    microbatch_size: int | None, schedule: str | None, recompute: Any, memory_bytes: int | None, output: Path, as_json: bool,
) -> None:  # fmt: skip
    """Price the layout of another trainer by a profile, and compare it with the best one.

    \b
    LAYOUT is what the trainer reads, or a file that holds it: Megatron's string, torchtitan's or Automodel's lists of modules,
    DeepSpeed's boundaries, the counts of vLLM, SGLang or torchgpipe, torch's split points.
    \b
    Examples:
      gplan import-plan 'Ettt|tt|tt|tL' --from megatron
      gplan import-plan pretrain.sh --from megatron --k 4 --microbatches 32 --memory 80GiB
      gplan import-plan pipeline_plan.py --from torchtitan
      gplan import-plan 0,5,11 --from deepspeed --recompute always
      gplan import-plan 6,5 --from vllm
    """
    from gplan.core import Profile
    from gplan.files import json_files
    from gplan.interop.planning import import_plan as imported
    from gplan.reporting.text.plan import plan_view

    profile = json_files.load(Profile, profile_file)
    plan = imported(
        _text(layout),
        profile,
        receiver=receiver,
        num_devices=num_devices,
        num_microbatches=microbatches,
        schedule=schedule_named(schedule) if schedule is not None else None,
        microbatch_size=microbatch_size,
        recompute=recompute,
        memory_bytes=memory_bytes,
    )
    json_files.save(plan, output)
    print_result(plan, lambda: plan_view(plan), as_json=as_json, written=output)


def _text(layout: str) -> str:
    """The text of a file, if there is one of this name, else the argument itself."""
    from gplan.core.errors import FileError

    path = Path(layout)
    try:
        if (layout and path.is_dir()) or (
            path.suffix in (".py", ".sh", ".json", ".yaml", ".toml", ".txt") and not path.exists()
        ):
            raise FileError(f"{layout} is no file; expected a layout, or a file with one")
        return path.read_text() if path.is_file() else layout
    except (OSError, ValueError) as error:
        too_long = errno.ENAMETOOLONG
        if not isinstance(error, UnicodeDecodeError) and getattr(error, "errno", too_long) == too_long:  # a layout
            return layout
        raise FileError(f"{layout} cannot be read: {error}; expected a text with the layout") from error
