"""`gplan balance`: the best partition of a model's layers, with a proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gplan.cli.arguments import (
    PATH,
    PLAN_FILE,
    PROFILE_FILE,
    RECEIVERS,
    SCHEDULE_HELP,
    memory_option,
    output_option,
    schedule_counts,
    schedule_named,
)
from gplan.cli.output import json_option, print_result, progress_bar

if TYPE_CHECKING:
    from gplan.core import Constraints, Pin


def _count(_context: click.Context, _parameter: click.Parameter, text: str | None) -> int | str | None:
    """A number or "auto"; the planner checks whether the number can be used."""
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a whole number nor auto") from None


@click.command()
@click.argument("profile", default=PROFILE_FILE, type=PATH)
@click.option("--k", "num_devices", metavar="N|auto", callback=_count, help="Devices in one pipeline.")
@click.option("--devices", type=int, help="Devices in all: stages times replicas.  [--k is then auto]")
@click.option(
    "--microbatches", metavar="N|auto", callback=_count, help="Micro-batches per step.  [default: 4 K; auto if --k is]"
)
@click.option("--microbatch-size", type=int, help="Samples per micro-batch.  [default: the largest profiled]")
@click.option("--batch-size", type=int, help="Samples per step over all replicas, instead of --microbatch-size.")
@click.option(
    "--schedule", metavar="NAME|FILE|auto", help=f"{SCHEDULE_HELP}  [default: gpipe; with --for the receiver's]"
)
@click.option("--recompute", default="never", show_default=True,
              type=click.Choice(["never", "always", "except-last", "selected", "auto"]),
              help="Which activations to recompute in the backward instead of keeping them: none, those of whole stages "
                   "(also except for the last micro-batch), or of the layers that the planner selects.")  # fmt: skip
@click.option("--shard", default="none", show_default=True, type=click.Choice(["none", "optimizer", "weights", "auto"]),
              help="What the replicas of a stage (--devices) divide among them: nothing, the optimizer's state (ZeRO-1), or the "
                   "weights too (FSDP).")  # fmt: skip
@memory_option("that of the profile or machine; no limit if it has none")
@click.option("--minimize", default="step-time", show_default=True, type=click.Choice(["step-time", "max-stage"]),
              help="The objective: the simulated step, or the slowest stage with its transfers.")  # fmt: skip
@click.option("--solver", default="auto", show_default=True, type=click.Choice(["auto", "dp", "milp", "cbc"]),
              help="dp: dynamic programming with branch and bound. milp: a mixed-integer program, solved by HiGHS; cbc: the same "
    "program, solved by CBC.")  # fmt: skip
@click.option(
    "--time-limit",
    type=float,
    metavar="SECONDS",
    help="Longest search.  [default: 10; with auto 18, --machine 20, MILP 60]",
)
@click.option("--machine", metavar="FILE", type=PATH, help="A TOML file with devices and links that differ.")
@click.option("--cut-after", multiple=True, metavar="LAYER", help="End a stage after this layer; given K-1 times, it fixes the "
              "partition.")  # fmt: skip
@click.option("--keep-together", multiple=True, metavar="A..B", help="Keep the layers from A to B on one stage.")
@click.option("--pin", multiple=True, metavar="LAYER=STAGE", help="Put a layer on a stage, counted from 0.")
@click.option("--for", "receiver", type=click.Choice(RECEIVERS),
              help="The best plan that this trainer can run, beside the best one without its rules.")  # fmt: skip
@output_option(PLAN_FILE)
@json_option
def balance(
    profile: Path, num_devices: Any, devices: int | None, microbatches: Any, microbatch_size: int | None,
    batch_size: int | None, schedule: str | None, recompute: Any, shard: str, memory_bytes: int | None, minimize: Any, solver: Any, time_limit: float | None,
    machine: Path | None, cut_after: tuple[str, ...], keep_together: tuple[str, ...], pin: tuple[str, ...],
    receiver: str | None, output: Path,
    as_json: bool,
) -> None:  # fmt: skip
    """Find the best partition of a model's layers over K devices, and prove it. Options set to auto are searched together.

    \b
    Examples:
      gplan balance --k 2
      gplan balance --k 4 --microbatches 16 --schedule 1f1b --memory 16GiB --recompute always
      gplan balance --k 4 --schedule interleaved-1f1b:2
      gplan balance --schedule my_order.csv
      gplan balance --k 4 --minimize max-stage --solver milp
      gplan balance --k 4 --cut-after blocks.5 --keep-together blocks.0..blocks.2 --pin head=3
      gplan balance --k 8 --machine cluster.toml
      gplan balance --k 2 --machine cluster.toml --batch-size 32 --microbatches auto --schedule auto
      gplan balance --devices 64 --memory 80GiB --microbatches auto --schedule auto --recompute auto
      gplan balance --devices 64 --memory 80GiB --shard auto --schedule auto
      gplan balance --k 8 --batch-size 256 --microbatches auto --recompute selected
      gplan balance --k 8 --schedule interleaved-1f1b:2 --for megatron
    """
    from gplan import api
    from gplan.core import Profile
    from gplan.core.errors import UsageError
    from gplan.files import json_files
    from gplan.files.machine_file import load_machine
    from gplan.interop.planning import ForReceiver
    from gplan.reporting.text.plan import plan_view
    from gplan.schedules.registry import default_num_microbatches
    from gplan.strategy_search.machine_search import search_machine

    known = json_files.load(Profile, profile)
    json_files.check_writable(output)
    rules = ForReceiver.of(receiver, known) if receiver is not None else None
    schedule = schedule or (rules.default_schedule if rules is not None else "gpipe")
    if schedule != "auto":
        schedule = schedule_named(schedule)
        num_devices, microbatches = schedule_counts(schedule, num_devices, microbatches)
    if num_devices is None and devices is None:
        raise UsageError("how many devices? give --k 4, --k auto, or the devices in all: --devices 8")
    if shard not in ("none", "auto") and devices is None:
        raise UsageError(
            f"--shard {shard} divides stages among replicas, and one pipeline has none; give the devices in all, such as --devices 8"
        )
    num_devices = "auto" if num_devices is None else num_devices
    common: dict[str, Any] = {
        "schedule": schedule,
        "recompute": recompute,
        "sharding": shard,
        "memory_bytes": memory_bytes,
        "constraints": _constraints(cut_after, keep_together, pin),
    }
    if rules is not None:
        common["constraints"] = rules.with_constraints(common["constraints"])
    if time_limit is not None:
        common["time_limit_s"] = time_limit
    if devices is not None or "auto" in (num_devices, microbatches, schedule, recompute, shard):
        others = {"--devices": devices, "--for": receiver, "--shard": None if shard == "none" else shard}
        _check_searchable(minimize, solver, **others if machine is not None else {})
        common |= {"num_devices": num_devices, "num_microbatches": microbatches}
        common |= {"batch_size": batch_size, "microbatch_size": microbatch_size}
        with progress_bar() as progress:
            if machine is not None:
                on = load_machine(machine, default_link=known.link)
                result = search_machine(known, on, progress=progress, **common)
            else:
                allows: dict[str, Any] = {} if rules is None else {"allows": rules.allows}
                result = api.search(known, most_devices=devices, progress=progress, **common, **allows)
    else:
        num_microbatches = default_num_microbatches(num_devices) if microbatches is None else microbatches
        if rules is not None:
            rules.check(schedule, num_devices=num_devices, num_microbatches=num_microbatches, recompute=recompute)
        result = api.balance(
            known,
            num_devices=num_devices,
            num_microbatches=num_microbatches,
            microbatch_size=_microbatch_size(microbatch_size, batch_size, num_microbatches),
            minimize=minimize,
            solver=solver,
            machine=load_machine(machine, default_link=known.link) if machine is not None else None,
            **common,
        )
    json_files.save(result, output)
    print_result(result, lambda: plan_view(result), as_json=as_json, written=output)


def _check_searchable(minimize: str, solver: str, **without_machine: object) -> None:
    """Raise UsageError for options that a search does not have; `without_machine` are those it lacks with a machine."""
    from gplan.core.errors import UsageError

    clashes = {
        **{f"{name} with --machine": x is not None for name, x in without_machine.items()},
        f"--minimize {minimize}": minimize != "step-time",
        f"--solver {solver}": solver not in ("auto", "dp"),
    }
    for option, is_given in clashes.items():
        if is_given:
            raise UsageError(
                f"{option} cannot be used in a search: give --k and --microbatches as numbers, --schedule and --recompute "
                "by name, --shard none, and no --devices"
            )


def _constraints(cut_after: Sequence[str], keep_together: Sequence[str], pin: Sequence[str]) -> Constraints:
    from gplan.core import Constraints

    return Constraints(
        cut_after=tuple(cut_after),
        keep_together=tuple(_pair(text) for text in keep_together),
        pins=tuple(_pin(text) for text in pin),
    )


def _pair(text: str) -> tuple[str, str]:
    from gplan.core.errors import UsageError

    first, dots, last = text.partition("..")
    if not (first and dots and last):
        raise UsageError(f"--keep-together {text}: expected two layers, such as --keep-together blocks.2..blocks.5")
    return first, last


def _pin(text: str) -> Pin:
    from gplan.core import Pin
    from gplan.core.errors import UsageError

    layer, _, stage = text.rpartition("=")
    if not layer or not stage.isdecimal():
        raise UsageError(f"--pin {text}: expected a layer and a stage counted from 0, such as --pin head=3")
    return Pin(layer=layer, stage=int(stage))


def _microbatch_size(microbatch_size: int | None, batch_size: int | None, num_microbatches: int) -> int | None:
    """Samples per micro-batch from either option; None where neither was given."""
    from gplan.core.errors import UsageError

    for option, value in (("--microbatch-size", microbatch_size), ("--batch-size", batch_size)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value}: expected at least 1 sample")
    if batch_size is None:
        return microbatch_size
    if microbatch_size is not None:
        raise UsageError(f"got --batch-size {batch_size} and --microbatch-size {microbatch_size}; give one of them")
    if num_microbatches < 1 or batch_size % num_microbatches:
        small = [m for m in range(1, math.isqrt(batch_size) + 1) if batch_size % m == 0]
        fitting = sorted({*small, *(batch_size // m for m in small)}, key=lambda m: abs(m - num_microbatches))
        raise UsageError(
            f"a batch of {batch_size} cannot be cut into {num_microbatches} equal micro-batches; "
            f"try --microbatches {' or '.join(map(str, sorted(fitting[:6])))}"
        )
    return batch_size // num_microbatches
