"""What several verbs share: default file names, options, and how a schedule is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gplan.core import Plan, Profile

PROFILE_FILE, PLAN_FILE, RUN_FILE = "gplan.profile.json", "gplan.plan.json", "gplan.run.json"
MACHINE_FILE = "cluster.toml"
VERIFICATION_FILE = "gplan.verification.json"
REPORT_FOLDER = "gplan-report"
CHECKPOINTS = "gplan-checkpoints"

PATH: Any = click.Path(path_type=Path)


class Advanced(click.Option):
    """An option that most users never need: the help lists it below the others."""


class Verb(click.Command):
    """A verb, with its options in two sections of the help: those most users need, and those declared `Advanced`."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        options = [x for x in self.get_params(context) if isinstance(x, click.Option)]
        for title, is_advanced in (("Options", False), ("Advanced", True)):
            shown = [x.get_help_record(context) for x in options if isinstance(x, Advanced) is is_advanced]
            if records := [x for x in shown if x is not None]:
                with formatter.section(title):
                    formatter.write_dl(records)


class TrainerChoice(click.Choice):  # type: ignore[type-arg]
    """A trainer, or another format, by its name here; the error for a trainer's other name has the right one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from gplan.interop.receiver_table import OTHER_NAMES

        if own := OTHER_NAMES.get(str(value).lower()):
            self.fail(f"{value} is called {own} here", param, ctx)
        return super().convert(value, param, ctx)


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def output_option(default: str) -> Decorator:
    """`--output`, the file or folder that a verb writes."""
    return click.option(
        "-o", "--output", default=default, show_default=True, type=PATH, help="Where to write the result."
    )


profile_option = click.option(
    "--profile", "profile_file", default=PROFILE_FILE, show_default=True, type=PATH, help="The profile that the plan was made from."
)  # fmt: skip
engine_option = click.option(
    "--engine", default="torch", show_default=True, type=click.Choice(["torch", "virtual"]),
    help="torch: one process per device. virtual: one process computes everything, the devices are simulated.",
)  # fmt: skip
timeout_option = click.option(
    "--timeout", "timeout_s", cls=Advanced, default=120.0, show_default=True, metavar="SECONDS", type=click.FloatRange(min=0, min_open=True),
    help="Give up after this long without progress.",
)  # fmt: skip


def memory_option(default: str) -> Decorator:
    """`--memory`, passed on in bytes as `memory_bytes`; `default` is in words."""
    help_text = f"Memory of each device, such as 80GiB.  [default: {default}]"
    return click.option("--memory", "memory_bytes", metavar="SIZE", callback=_parsed_bytes, help=help_text)


def _parsed_bytes(_context: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
    from gplan.core.units import parse_memory

    return None if text is None else parse_memory(text)


SCHEDULE_HELP = (
    "gpipe, 1f1b, eager-1f1b, interleaved-1f1b, looped-bfs, zb-h1, zb-v, 1f1b-cap; name:4: 4 stages per device "
    "(1f1b-cap: 4 micro-batches in flight at most); or a file with an order."
)


def schedule_named(text: str) -> str:
    """The canonical name of a schedule given by name or as a file; raises UsageError if unknown or if it deadlocks."""
    from gplan.core.errors import UsageError
    from gplan.schedules.custom import is_custom_order, read_custom_order
    from gplan.schedules.dependencies import execution_order
    from gplan.schedules.registry import SCHEDULES, canonical, make_schedule, schedule_info

    path = Path(text)
    # os.path.isfile answers False for a name that is too long.
    is_file = (
        text.partition(":")[0] not in SCHEDULES and not is_custom_order(text) and (path.suffix or os.path.isfile(path))
    )
    name = read_custom_order(path) if is_file else text
    try:
        schedule = schedule_info(name)
        if schedule.num_devices is not None and schedule.num_microbatches is not None:
            counts = {"num_devices": schedule.num_devices, "num_microbatches": schedule.num_microbatches}
            execution_order(make_schedule(name, **counts))
    except ValueError as error:
        raise UsageError(f"{text if is_file else '--schedule'}: {error}") from error
    return canonical(name)


def profile_of_plan(plan: Plan, path: Path | None) -> tuple[Profile | None, str]:
    """The profile at `path`; without a path the default file if the plan was made from it, else None and the reason."""
    from gplan.core import Profile
    from gplan.core.errors import FileError
    from gplan.evaluate.replanning import profile_in_plan_order
    from gplan.files import json_files

    if path is not None:
        return json_files.load(Profile, path), ""
    if not Path(PROFILE_FILE).exists():
        return None, "there is no profile here"
    try:
        found = json_files.load(Profile, Path(PROFILE_FILE))
    except FileError as error:
        click.echo(f"note: {error}; went on without it", err=True)
        return None, f"{PROFILE_FILE} cannot be used"
    try:
        profile_in_plan_order(plan, found)
    except FileError:
        return None, f"the plan was not made from {PROFILE_FILE}"
    return found, ""
