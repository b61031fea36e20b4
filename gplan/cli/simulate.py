"""`gplan simulate`: a schedule drawn, with costs by hand or those of a plan."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import click

from gplan.cli.arguments import PLAN_FILE, SCHEDULE_HELP, agreed, schedule_named
from gplan.cli.output import json_option, print_only
from gplan.core import Plan
from gplan.core.errors import UsageError
from gplan.core.units import seconds_text
from gplan.files import json_files
from gplan.schedules.custom import is_custom_order
from gplan.schedules.registry import SCHEDULES, canonical, schedule_info
from gplan.simulation.schedule_trial import GivenCosts, Trial, given_trial, plan_trial

_EXAMPLES = """
\b
Examples:
  gplan simulate --k 8 --schedule 1f1b --microbatches 16
  gplan simulate --forward 1,1,2 --backward 2,2,4 --link 0.1 --optimizer 1
  gplan simulate --k 4 --schedule interleaved-1f1b:2
  gplan simulate --k 4 --schedule zb-h1 --backward 1.5+0.5
  gplan simulate --k 4 --schedule all
  gplan simulate --schedule my_order.csv
  gplan simulate gplan.plan.json

Times by hand have any unit. They are a device's for one micro-batch, all the same or one for each; a device with
several stages divides its time among them, unless there is one for each stage. The file of an order has a line for
each device, such as 0F0 0F1 0B0 0B1: stage, forward (F) or backward (B, or its halves I and W), micro-batch."""

_ALL = "all"
_USUAL = "gpipe"


@click.command(help="Draw a schedule and say why its devices wait, with times by hand or those of PLAN.\n" + _EXAMPLES)
@click.argument("plan", required=False, type=click.Path(path_type=Path))
@click.option("--k", "num_devices", metavar="N", type=click.IntRange(min=1), help="Devices.")
@click.option("--schedule", metavar="NAME|FILE|all", help=f"{SCHEDULE_HELP}  [default: {_USUAL}; the plan's own]")
@click.option(
    "--microbatches", metavar="N", type=click.IntRange(min=1), help="Micro-batches a step.  [default: 4 K; the plan's]"
)
@click.option("--forward", metavar="TIME[,TIME...]", help="Of a micro-batch.  [default: 1]")
@click.option("--backward", metavar="TIME[,TIME...]", help="Whole, or its two halves as 1+1.  [default: 2]")
@click.option("--link", metavar="TIME", help="Of every transfer between devices.  [default: 0]")
@click.option("--optimizer", metavar="TIME[,TIME...]", help="After the last backward.  [default: 0]")
@click.option("--recompute", type=click.Choice(["never", "always", "except-last"]),
              help="Backwards that run their forward again; not with a plan, which has its own.  [default: never]")  # fmt: skip
@json_option
def simulate(
    plan: Path | None, num_devices: int | None, schedule: str | None, microbatches: int | None, as_json: bool,
    **costs: str | None,
) -> None:  # fmt: skip
    from gplan.reporting.text.schedule_trial import plain_text, trial_view, trials_view

    name = schedule if schedule in (None, _ALL) else schedule_named(schedule)
    by_hand = {option: text for option, text in costs.items() if text is not None}
    if num_devices is None and not by_hand and (name in (None, _ALL) or schedule_info(name).num_devices is None):
        plan = _plan_here() if plan is None else plan
    time_text: Callable[[float], str] = plain_text if plan is None else seconds_text
    known = None if plan is None else _plan_at(plan, num_devices, by_hand)
    attempt = _by_hand(num_devices, microbatches, by_hand) if known is None else _of_plan(known, microbatches)
    if name == _ALL:
        trials, left_out = _every(attempt, _names(known))
        print_only(
            lambda: _json({"trials": trials, "left_out": left_out}),
            lambda: trials_view(trials, left_out=left_out, time_text=time_text),
            as_json=as_json,
        )
    else:
        trial = attempt(name)
        print_only(lambda: _json(trial), lambda: trial_view(trial, time_text=time_text), as_json=as_json)


Attempt: TypeAlias = Callable[[str | None], Trial]
"""Tries a schedule by its name, or the usual one."""


def _plan_here() -> Path:
    if not Path(PLAN_FILE).exists():
        raise UsageError(f"how many devices? give --k 4, or a plan; there is no {PLAN_FILE} here")
    return Path(PLAN_FILE)


def _plan_at(path: Path, num_devices: int | None, by_hand: Mapping[str, str]) -> Plan:
    plan = json_files.load(Plan, path)
    own = ["k"] if num_devices is not None else []
    for option in (*own, *by_hand):
        raise UsageError(f"{path} has its own devices and costs; leave out --{option}, or the plan")
    return plan


def _of_plan(plan: Plan, microbatches: int | None) -> Attempt:
    return lambda name: plan_trial(plan, schedule=name, num_microbatches=microbatches)


def _names(plan: Plan | None) -> list[str]:
    """Every schedule; where a device may hold any number of stages, as many as in the plan;
    and the plan's own order."""
    num_chunks = 1 if plan is None else plan.num_stages // plan.num_devices
    chunks = f":{num_chunks}" if num_chunks > 1 else ""
    names = [canonical(word + chunks if rule.num_chunks is None else word) for word, rule in SCHEDULES.items()]
    return [*names, plan.schedule] if plan is not None and is_custom_order(plan.schedule) else names


def _by_hand(num_devices: int | None, microbatches: int | None, by_hand: Mapping[str, str]) -> Attempt:
    given = _given(by_hand)
    longest = max(map(len, (given.forward, given.backward, given.optimizer)))
    recompute: Any = by_hand.get("recompute", "never")

    def attempt(name: str | None) -> Trial:
        name = name or _USUAL
        k, m = agreed(name, num_devices, microbatches)
        k = (longest if longest > 1 else None) if k is None else k
        if k is None:
            raise UsageError("how many devices? give --k 4")
        return given_trial(name, given, num_devices=k, num_microbatches=m or 4 * k, recompute=recompute)

    return attempt


def _every(attempt: Attempt, names: Sequence[str]) -> tuple[list[Trial], list[str]]:
    """A trial of every schedule that can be tried, the shortest step first, and why the others cannot."""
    trials, left_out = [], []
    for name in names:
        try:
            trials.append(attempt(name))
        except UsageError as error:
            left_out.append(f"{schedule_info(name).title}: {error}")
    if not trials:
        raise UsageError(f"no schedule can be tried: {left_out[0]}")
    return sorted(trials, key=lambda x: (x.step_s, x.most_in_flight)), left_out


def _given(by_hand: Mapping[str, str]) -> GivenCosts:
    found: dict[str, Any] = {}
    for option in ("forward", "optimizer"):
        if option in by_hand:
            found[option] = tuple(_time(option, x) for x in by_hand[option].split(","))
    if "backward" in by_hand:
        found["backward"] = tuple(_halves(x) for x in by_hand["backward"].split(","))
    if "link" in by_hand:
        found["link"] = _time("link", by_hand["link"])
    return GivenCosts(**found)


def _halves(text: str) -> tuple[float, float]:
    first, plus, second = text.partition("+")
    if plus:
        return _time("backward", first), _time("backward", second)
    half = _time("backward", text) / 2
    return half, half


_LONGEST = 1e15  # so that sums of times stay exact enough


def _time(option: str, text: str) -> float:
    """A time by hand: above 0, but that nothing may be 0 where it is the default."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    least = "a number above 0" if option in ("forward", "backward") else "a number of 0 or more"
    if not 0 <= value < _LONGEST or (value == 0 and option in ("forward", "backward")):
        raise UsageError(f"--{option} {text!r}: expected {least}, without a unit, such as 1.5")
    return value


def _json(value: object) -> str:
    import msgspec

    return json.dumps(msgspec.to_builtins(value, str_keys=True), indent=1, ensure_ascii=False) + "\n"
