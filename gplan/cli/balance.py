"""`gplan balance`: the best partition, proven."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gplan import api, files
from gplan.balancer import RECOMPUTE_CHOICES, SOLVERS
from gplan.cli.output import json_option, print_result
from gplan.cli.places import PLAN_FILE, PROFILE_FILE
from gplan.errors import UsageError
from gplan.machine_file import load_machine
from gplan.nouns import OBJECTIVES, Pin, Profile, Wishes
from gplan.schedules import SCHEDULES
from gplan.units import parse_bytes

_EXAMPLES = """
\b
Examples:
  gplan balance --k 2
  gplan balance --k 4 --microbatches 16 --schedule 1f1b --memory 16GiB --recompute always
  gplan balance --k 4 --minimize max-stage --solver milp
  gplan balance --k 4 --cut-after blocks.5 --keep-together blocks.0..blocks.2 --pin head=3
  gplan balance --k 8 --machine cluster.toml"""


@click.command(help="Find the best partition of the layers into K stages, and prove it.\n" + _EXAMPLES)
@click.argument("profile", default=PROFILE_FILE, type=click.Path(path_type=Path))
@click.option("--k", "num_stages", type=int, required=True, help="Stages: how many devices the model is cut over.")
@click.option("--microbatches", type=int, help="Micro-batches a step.  [default: 4 K]")
@click.option("--microbatch-size", type=int, help="Samples in a micro-batch.  [default: the largest profiled]")
@click.option("--batch-size", type=int, help="Samples a step, instead of --microbatch-size.")
@click.option("--schedule", default="gpipe", show_default=True, type=click.Choice(list(SCHEDULES)))
@click.option("--recompute", default="never", show_default=True, type=click.Choice(RECOMPUTE_CHOICES))
@click.option("--memory", metavar="SIZE", help="Memory of each device, such as 16GiB.  [default: no limit]")
@click.option("--minimize", default="step-time", show_default=True, type=click.Choice(OBJECTIVES))
@click.option("--solver", default="auto", show_default=True, type=click.Choice(SOLVERS))
@click.option("--time-limit", type=float, metavar="SECONDS", help="Longest search.  [default: 10; of a MILP 60]")
@click.option("--machine", metavar="FILE", type=click.Path(path_type=Path), help="Devices that differ: a TOML file.")
@click.option("--cut-after", multiple=True, metavar="LAYER", help="End a stage there; K-1 of them are a whole plan.")
@click.option("--keep-together", multiple=True, metavar="A..B", help="Keep these layers on one stage.")
@click.option("--pin", multiple=True, metavar="LAYER=STAGE", help="Put a layer on a stage, counted from 0.")
@click.option("--output", default=PLAN_FILE, show_default=True, type=click.Path(path_type=Path))
@json_option
def balance(
    profile: Path, num_stages: int, microbatches: int | None, microbatch_size: int | None, batch_size: int | None,
    schedule: str, recompute: Any, memory: str | None, minimize: Any, solver: Any, time_limit: float | None,
    machine: Path | None, cut_after: tuple[str, ...], keep_together: tuple[str, ...], pin: tuple[str, ...], output: Path,
    as_json: bool,
) -> None:  # fmt: skip
    from gplan.tables import plan_view

    num_microbatches = 4 * num_stages if microbatches is None else microbatches
    known = files.load(Profile, profile)
    result = api.balance(
        known,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        microbatch_size=_microbatch_size(microbatch_size, batch_size, num_microbatches),
        schedule=schedule,
        recompute=recompute,
        memory_bytes=parse_bytes(memory) if memory is not None else None,
        minimize=minimize,
        solver=solver,
        time_limit_s=time_limit,
        machine=load_machine(machine, default_link=known.link) if machine is not None else None,
        wishes=_wishes(cut_after, keep_together, pin),
    )
    files.save(result, output)
    print_result(result, lambda: plan_view(result), output, as_json=as_json)


def _wishes(cut_after: Sequence[str], keep_together: Sequence[str], pin: Sequence[str]) -> Wishes:
    return Wishes(
        cut_after=tuple(cut_after),
        keep_together=tuple(_pair(text) for text in keep_together),
        pins=tuple(_pin(text) for text in pin),
    )


def _pair(text: str) -> tuple[str, str]:
    one, dots, other = text.partition("..")
    if not (one and dots and other):
        raise UsageError(f"--keep-together {text}: expected two layers, such as --keep-together blocks.2..blocks.5")
    return one, other


def _pin(text: str) -> Pin:
    layer, _, stage = text.rpartition("=")
    if not layer or not stage.isdecimal():
        raise UsageError(f"--pin {text}: expected a layer and a stage counted from 0, such as --pin head=3")
    return Pin(layer=layer, stage=int(stage))


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
