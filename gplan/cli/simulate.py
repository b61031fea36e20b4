"""`gplan simulate`: a schedule tried with times given by hand or with those of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from gplan.cli.arguments import PATH, PLAN_FILE, SCHEDULE_HELP, Verb, schedule_named
from gplan.cli.output import json_option, print_result

if TYPE_CHECKING:
    from gplan.simulation.schedule_trial import GivenCosts, Trial

    ScheduleTrial: TypeAlias = Callable[[str | None], Trial]
    """Tries a schedule by its name; None: the default one."""

_ALL = "all"
_DEFAULT = "gpipe"


@click.command(cls=Verb)
@click.argument("plan", required=False, type=PATH)
@click.option("--k", "num_devices", metavar="N", type=click.IntRange(min=1), help="Devices.")
@click.option("--schedule", metavar="NAME|FILE|all", help=f"{SCHEDULE_HELP}  [default: {_DEFAULT}, or the plan's]")
@click.option(
    "--microbatches",
    metavar="N",
    type=click.IntRange(min=1),
    help="Micro-batches per step.  [default: 4 K, or the plan's]",
)
@click.option("--forward", metavar="TIME[,TIME...]", help="Forward of one micro-batch.  [default: 1]")
@click.option("--backward", metavar="TIME[,TIME...]",
              help="Backward of one micro-batch, or its two halves as 1+1.  [default: 2]")  # fmt: skip
@click.option("--link", metavar="TIME", help="Each transfer between devices.  [default: 0]")
@click.option("--optimizer", metavar="TIME[,TIME...]", help="Optimizer, after the last backward.  [default: 0]")
@click.option("--recompute", type=click.Choice(["never", "always", "except-last"]),
              help="Backwards that run their forward again; a plan has its own setting.  [default: never]")  # fmt: skip
@json_option
def simulate(
    plan: Path | None, num_devices: int | None, schedule: str | None, microbatches: int | None, as_json: bool,
    **costs: str | None,
) -> None:  # fmt: skip
    """Simulate a schedule and explain its idle time, with times given by hand or those of PLAN.

    \b
    Examples:
      gplan simulate --k 8 --schedule 1f1b --microbatches 16
      gplan simulate --forward 1,1,2 --backward 2,2,4 --link 0.1 --optimizer 1
      gplan simulate --k 4 --schedule interleaved-1f1b:2
      gplan simulate --k 4 --schedule zb-h1 --backward 1.5+0.5
      gplan simulate --k 4 --schedule all
      gplan simulate --schedule my_order.csv
      gplan simulate gplan.plan.json

    Times given by hand can be in any unit. Each is the time of one micro-batch on one device: one value for all devices, or
    one per device. A device with several stages divides its time among them, unless there is one value per stage. A file
    with an order has one line per device, such as 0F0 0F1 0B0 0B1: stage, forward (F) or backward (B, or its halves I and
    W), micro-batch.
    """
    from gplan.core import Plan
    from gplan.core.errors import UsageError
    from gplan.core.units import seconds_text
    from gplan.files import json_files
    from gplan.reporting.text.steps import plain_text, trial_view, trials_view
    from gplan.schedules.custom import is_custom_order
    from gplan.schedules.registry import every_schedule, schedule_info
    from gplan.simulation.schedule_trial import plan_trial

    name = schedule if schedule in (None, _ALL) else schedule_named(schedule)
    given = {option: text for option, text in costs.items() if text is not None}
    if num_devices is None and not given and (name in (None, _ALL) or schedule_info(name).num_devices is None):
        plan = plan or Path(PLAN_FILE)
        if plan == Path(PLAN_FILE) and not plan.exists():
            raise UsageError(f"how many devices? give --k 4, or a plan; there is no {PLAN_FILE} here")
    time_text: Callable[[float], str] = plain_text if plan is None else seconds_text
    loaded = None if plan is None else json_files.load(Plan, plan)
    not_of_plan = next(iter(given), None) if num_devices is None else "k"
    if plan is not None and not_of_plan is not None:
        raise UsageError(f"{plan} has its own devices and costs; leave out --{not_of_plan}, or the plan")

    def trial_of(name: str | None) -> Trial:
        if loaded is not None:
            return plan_trial(loaded, schedule=name, num_microbatches=microbatches)
        return _given_trial(name or _DEFAULT, num_devices, microbatches, given)

    if name == _ALL:
        names = every_schedule(1 if loaded is None else loaded.num_stages // loaded.num_devices)
        own = [loaded.schedule] if loaded is not None and is_custom_order(loaded.schedule) else []
        trials, left_out = _every(trial_of, [*names, *own])
        print_result(
            {"trials": trials, "left_out": left_out},
            lambda: trials_view(trials, left_out=left_out, time_text=time_text),
            as_json=as_json,
        )
    else:
        trial = trial_of(name)
        print_result(trial, lambda: trial_view(trial, time_text=time_text), as_json=as_json)


def _given_trial(name: str, num_devices: int | None, microbatches: int | None, given: Mapping[str, str]) -> Trial:
    from gplan.core.errors import UsageError
    from gplan.schedules.registry import custom_counts, default_num_microbatches
    from gplan.simulation.schedule_trial import given_trial

    costs = _costs(given)
    longest = max(map(len, (costs.forward, costs.backward, costs.optimizer)))
    k, m = custom_counts(name, num_devices=num_devices, num_microbatches=microbatches)
    k = (longest if longest > 1 else None) if k is None else k
    if k is None:
        raise UsageError("how many devices? give --k 4")
    recompute: Any = given.get("recompute", "never")
    return given_trial(
        name, costs, num_devices=k, num_microbatches=m or default_num_microbatches(k), recompute=recompute
    )


def _every(trial_of: ScheduleTrial, names: Sequence[str]) -> tuple[list[Trial], list[str]]:
    """A trial of every schedule that can be tried, the shortest step first, and why the others cannot."""
    from gplan.core.errors import UsageError
    from gplan.schedules.registry import schedule_info

    trials, left_out = [], []
    for name in names:
        try:
            trials.append(trial_of(name))
        except UsageError as error:
            left_out.append(f"{schedule_info(name).title}: {error}")
    if not trials:
        raise UsageError(f"no schedule can be tried: {left_out[0]}")
    return sorted(trials, key=lambda x: (x.step_s, x.most_in_flight)), left_out


def _costs(given: Mapping[str, str]) -> GivenCosts:
    from gplan.simulation.schedule_trial import GivenCosts

    found: dict[str, Any] = {}
    for option in ("forward", "optimizer"):
        if option in given:
            found[option] = tuple(_time(option, x) for x in given[option].split(","))
    if "backward" in given:
        found["backward"] = tuple(_halves(x) for x in given["backward"].split(","))
    if "link" in given:
        found["link"] = _time("link", given["link"])
    return GivenCosts(**found)


def _halves(text: str) -> tuple[float, float]:
    first, plus, second = text.partition("+")
    if plus:
        return _time("backward", first), _time("backward", second)
    half = _time("backward", text) / 2
    return half, half


_LONGEST = 1e15  # sums of times stay exact enough below it


def _time(option: str, text: str) -> float:
    """A time given by hand: above 0 for forward and backward, 0 or more for the others."""
    from gplan.core.errors import UsageError

    try:
        value = float(text)
    except ValueError:
        value = math.nan
    is_positive = option in ("forward", "backward")
    if not 0 <= value < _LONGEST or (value == 0 and is_positive):
        expected = "a number above 0" if is_positive else "a number of 0 or more"
        raise UsageError(f"--{option} {text!r}: expected {expected}, without a unit, such as 1.5")
    return value
