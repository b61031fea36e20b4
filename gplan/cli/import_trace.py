"""`gplan import-trace`: a measured step from the torch.profiler traces of a pipeline that trained elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from gplan.cli.arguments import PATH, RUN_FILE, SCHEDULE_HELP, schedule_named
from gplan.cli.output import json_option, print_result


@click.command(name="import-trace")
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", type=PATH)
@click.option("--plan", "plan_file", type=PATH, help="The plan that was run.")
@click.option("--schedule", metavar="NAME|FILE",
              help="Also show how long the same stages would take with this schedule: " + SCHEDULE_HELP)  # fmt: skip
@click.option("--run", "run_file", type=PATH, help=f"With --plan: where to write the run.  [default: {RUN_FILE}]")
@click.option("--profile", "profile_file", type=PATH,
              help="The profile that the plan was made from: write a copy with the measured times to --output.")  # fmt: skip
@click.option("-o", "--output", type=PATH, help="With --profile: where to write the new profile.")
@json_option
def import_trace(
    traces: tuple[Path, ...], plan_file: Path | None, schedule: str | None, run_file: Path | None, profile_file: Path | None,
    output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure a torch.distributed.pipelining run by its torch.profiler traces; with the plan that was run, compare it with
    the prediction.

    \b
    TRACE is a file that prof.export_chrome_trace wrote, .json or .json.gz: one for every rank of one pipeline.
    \b
    Examples:
      gplan import-trace rank0.json rank1.json
      gplan import-trace rank*.json.gz --schedule 1f1b
      gplan import-trace rank*.json --plan gplan.plan.json         -> gplan.run.json
      gplan report gplan.run.json
      gplan import-trace rank*.json --plan gplan.plan.json --profile gplan.profile.json --output new.profile.json
      gplan balance new.profile.json --k 4
    """
    from rich.console import Group
    from rich.text import Text

    from gplan.core import Plan, Profile
    from gplan.evaluate.retiming import retime_profile
    from gplan.files import json_files
    from gplan.interop.traces.measured_run import read_traced, traced_run
    from gplan.reporting.text.run import run_view
    from gplan.reporting.text.steps import traced_view

    _check_options(plan_file, run_file, profile_file, output)
    plan = json_files.load(Plan, plan_file) if plan_file is not None else None
    profile = json_files.load(Profile, profile_file) if profile_file is not None else None
    wanted = schedule_named(schedule) if schedule is not None else None
    traced = read_traced(traces)
    view = traced_view(traced, schedule=wanted)
    if plan is None:
        print_result(traced, lambda: view, as_json=as_json)
        return
    run = traced_run(traced, plan)
    retimed = retime_profile(profile, run=run) if profile is not None else None
    run_file = run_file or Path(RUN_FILE)
    json_files.save(run, run_file)
    if retimed is not None and output is not None:
        json_files.save(retimed, output)
    views = [view, "", run_view(run), *([Text(f"wrote {output}")] if retimed is not None else [])]
    print_result(run, lambda: Group(*views), as_json=as_json, written=run_file)


def _check_options(
    plan_file: Path | None, run_file: Path | None, profile_file: Path | None, output: Path | None
) -> None:
    """A new profile needs the plan and another file than the old one."""
    from gplan.core.errors import UsageError

    for option, path in (("--run", run_file), ("--profile", profile_file)):
        if path is not None and plan_file is None:
            raise UsageError(f"{option} needs the plan that was run: give --plan gplan.plan.json")
    if (profile_file is None) != (output is None):
        given, missing = ("--output", "--profile") if profile_file is None else ("--profile", "--output")
        raise UsageError(f"{given} goes with {missing}: give --profile gplan.profile.json --output new.profile.json")
    if profile_file is not None and output is not None and profile_file.resolve() == output.resolve():
        raise UsageError(f"--output {output} would overwrite the profile; give another file: --output new.profile.json")
