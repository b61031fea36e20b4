"""`gplan balance`: the best partition of a model's layers, with a proof."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gplan.cli.arguments import (
    PATH,
    PLAN_FILE,
    PROFILE_FILE,
    SCHEDULE_HELP,
    Advanced,
    TrainerChoice,
    Verb,
    memory_option,
    output_option,
    schedule_named,
)
from gplan.cli.output import json_option, print_result, progress_bar
from gplan.interop.receiver_table import RECEIVERS

if TYPE_CHECKING:
    from gplan.core import Constraints


def _count(_context: click.Context, _parameter: click.Parameter, text: str | None) -> int | str | None:
    """A number or "auto"; the planner checks whether the number can be used."""
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a whole number nor auto") from None


@click.command(cls=Verb)
@click.argument("profile", default=PROFILE_FILE, type=PATH)
@click.option("--k", "num_devices", metavar="N|auto", callback=_count, help="Devices in one pipeline.")
@click.option("--devices", "total_devices", type=int, help="Devices in all: stages times replicas.  [--k is then auto]")
@click.option("--microbatches", "num_microbatches", metavar="N|auto", callback=_count,
              help="Micro-batches per step.  [default: 4 K; auto if --k is]")  # fmt: skip
@click.option("--microbatch-size", type=int, help="Samples per micro-batch.  [default: the largest profiled]")
@click.option("--batch-size", type=int, help="Samples per step over all replicas, instead of --microbatch-size.")
@click.option(
    "--schedule", metavar="NAME|FILE|auto", help=f"{SCHEDULE_HELP}  [default: gpipe; with --for the receiver's]"
)
@click.option("--recompute", default="never", show_default=True, metavar="MODE",
              type=click.Choice(["never", "always", "except-last", "selected", "auto"]),
              help="Which activations to recompute instead of keeping them: never, always (whole stages), except-last (not for the last micro-batch), "
                   "selected (layers that the planner selects), or auto.")  # fmt: skip
@click.option("--shard", "sharding", default="none", show_default=True, metavar="WHAT", type=click.Choice(["none", "optimizer", "weights", "auto"]),
              help="What the replicas of a stage (--devices) divide among them: none, optimizer (its state: ZeRO-1), weights (these too: FSDP), or auto.")  # fmt: skip
@memory_option("that of the profile or machine; no limit if it has none")
@click.option("--minimize", cls=Advanced, default="step-time", show_default=True, metavar="GOAL", type=click.Choice(["step-time", "max-stage"]),
              help="step-time: the simulated step; max-stage: the slowest stage with its transfers.")  # fmt: skip
@click.option("--solver", cls=Advanced, default="auto", show_default=True, metavar="NAME", type=click.Choice(["auto", "dp", "milp", "cbc"]),
              help="dp: dynamic programming with branch and bound; milp or cbc: a mixed-integer program by HiGHS or CBC; auto.")  # fmt: skip
@click.option("--time-limit", "time_limit_s", cls=Advanced, type=float, metavar="SECONDS",
              help="Longest search.  [default: 10; with auto 18, --machine 20, MILP 60]")  # fmt: skip
@click.option(
    "--machine", cls=Advanced, metavar="FILE", type=PATH, help="A TOML file with hosts, their devices and links."
)
@click.option("--cut-after", cls=Advanced, multiple=True, metavar="LAYER", help="End a stage after this layer; given K-1 times, it fixes the "
              "partition.")  # fmt: skip
@click.option(
    "--keep-together", cls=Advanced, multiple=True, metavar="A..B", help="Keep the layers from A to B on one stage."
)
@click.option(
    "--pin", cls=Advanced, multiple=True, metavar="LAYER=STAGE", help="Put a layer on a stage, counted from 0."
)
@click.option("--for", "receiver", metavar="TRAINER", type=TrainerChoice(RECEIVERS),
              help=f"The best plan that this trainer can run: {', '.join(RECEIVERS)}.")  # fmt: skip
@output_option(PLAN_FILE)
@json_option
def balance(
    profile: Path, schedule: str | None, machine: Path | None, cut_after: tuple[str, ...], keep_together: tuple[str, ...],
    pin: tuple[str, ...], receiver: str | None, output: Path, as_json: bool, **dials: Any,
) -> None:  # fmt: skip
    """Find and prove the best partition of a model's layers over K devices; options set to auto are searched.

    \b
    Examples:
      gplan balance --k 2
      gplan balance --k 4 --microbatches 16 --schedule 1f1b --memory 16GiB --recompute always
      gplan balance --k 4 --cut-after blocks.5 --keep-together blocks.0..blocks.2 --pin head=3
      gplan balance --k 2 --machine cluster.toml --batch-size 32 --microbatches auto --schedule auto
      gplan balance --devices 64 --memory 80GiB --schedule auto --recompute auto --shard auto
      gplan balance --k 8 --schedule interleaved-1f1b:2 --for megatron
    """
    from gplan import api
    from gplan.core import Plan, Profile
    from gplan.files import json_files
    from gplan.files.machine_file import load_machine
    from gplan.interop.planning import ForReceiver
    from gplan.reporting.text.plan import plan_view
    from gplan.schedules.request import PlanRequest

    known = json_files.load(Profile, profile)
    json_files.check_writable(output, Plan)
    rules = ForReceiver.of(receiver, known) if receiver is not None else None
    schedule = schedule or (rules.default_schedule() if rules is not None else "gpipe")
    request = PlanRequest(
        schedule=schedule if schedule == "auto" else schedule_named(schedule),
        constraints=_constraints(cut_after, keep_together, pin),
        machine=load_machine(machine, default_link=known.link) if machine is not None else None,
        **dials,
    )
    if rules is not None:
        request = rules.applied(request)
    with progress_bar() as progress:
        result = api.plan(known, request, progress=progress)
    json_files.save(result, output)
    print_result(result, lambda: plan_view(result), as_json=as_json, written=output)


def _constraints(cut_after: Sequence[str], keep_together: Sequence[str], pin: Sequence[str]) -> Constraints:
    from gplan.core import Constraints, Pin
    from gplan.core.errors import UsageError

    pairs, pins = list[tuple[str, str]](), list[Pin]()
    for text in keep_together:
        first, dots, last = text.partition("..")
        if not (first and dots and last):
            raise UsageError(f"--keep-together {text}: expected two layers, such as --keep-together blocks.2..blocks.5")
        pairs.append((first, last))
    for text in pin:
        layer, _, stage = text.rpartition("=")
        if not layer or not stage.isdecimal():
            raise UsageError(f"--pin {text}: expected a layer and a stage counted from 0, such as --pin head=3")
        pins.append(Pin(layer=layer, stage=int(stage)))
    return Constraints(cut_after=tuple(cut_after), keep_together=tuple(pairs), pins=tuple(pins))
