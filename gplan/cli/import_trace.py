"""`gplan import-trace`: a measured step from the torch.profiler traces of a pipeline that trained elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from gplan.cli.arguments import RUN_FILE, SCHEDULE_HELP, schedule_named
from gplan.cli.output import json_option, print_only
from gplan.core import Plan, Profile
from gplan.core.errors import UsageError
from gplan.files import json_files

_EXAMPLES = """
\b
TRACE is what prof.export_chrome_trace wrote, .json or .json.gz, one file of every rank of one pipeline.
\b
Examples:
  gplan import-trace rank0.json rank1.json
  gplan import-trace rank*.json.gz --schedule 1f1b
  gplan import-trace rank*.json --plan gplan.plan.json         -> gplan.run.json
  gplan report gplan.run.json
  gplan import-trace rank*.json --plan gplan.plan.json --profile gplan.profile.json --output new.profile.json
  gplan balance new.profile.json --k 4"""


@click.command(
    name="import-trace",
    help="Measure a torch.distributed.pipelining run by its torch.profiler traces.\n" + _EXAMPLES,
)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", type=click.Path(path_type=Path))
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="The plan that was run: compare with it.")
@click.option("--schedule", metavar="NAME|FILE", help="What the same stages would take with it.  " + SCHEDULE_HELP)
@click.option("--run", "run_file", type=click.Path(path_type=Path),
              help=f"Where the run goes, with --plan.  [default: {RUN_FILE}]")  # fmt: skip
@click.option("--profile", "profile_file", type=click.Path(path_type=Path),
              help="The profile that the plan was made from: write it anew with the measured times.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), help="Where the new profile goes, with --profile.")
@json_option
def import_trace(
    traces: tuple[Path, ...], plan_file: Path | None, schedule: str | None, run_file: Path | None, profile_file: Path | None,
    output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    from rich.console import Group

    from gplan.evaluate.retiming import retimed_profile
    from gplan.interop.traces.measured_run import read_traced, traced_json, traced_run
    from gplan.reporting.text.run import run_view
    from gplan.reporting.text.traces import traced_view

    _check_options(plan_file, run_file, profile_file, output)
    plan = json_files.load(Plan, plan_file) if plan_file is not None else None
    profile = json_files.load(Profile, profile_file) if profile_file is not None else None
    wanted = schedule_named(schedule) if schedule is not None else None
    traced = read_traced(traces)
    view = traced_view(traced, schedule=wanted)
    if plan is None:
        print_only(lambda: traced_json(traced), lambda: view, as_json=as_json)
        return
    run = traced_run(traced, plan)
    newer = retimed_profile(profile, run=run) if profile is not None else None
    run_file = run_file or Path(RUN_FILE)
    json_files.save(run, run_file)
    if newer is not None and output is not None:
        json_files.save(newer, output)
    group = Group(view, "", run_view(run), *([f"wrote {output}"] if newer is not None else []))
    print_only(lambda: json_files.to_json(run).decode(), lambda: group, as_json=as_json, written=run_file)


def _check_options(
    plan_file: Path | None, run_file: Path | None, profile_file: Path | None, output: Path | None
) -> None:
    """A profile is scaled by how a run compares with its plan, and is not written over."""
    if run_file is not None and plan_file is None:
        raise UsageError("--run needs the plan that was run: give --plan gplan.plan.json")
    if profile_file is not None and plan_file is None:
        raise UsageError("--profile needs the plan that was made from it and run: give --plan gplan.plan.json")
    if (profile_file is None) != (output is None):
        given, missing = ("--output", "--profile") if profile_file is None else ("--profile", "--output")
        raise UsageError(f"{given} goes with {missing}: give --profile gplan.profile.json --output new.profile.json")
    if profile_file is not None and output is not None and profile_file.resolve() == output.resolve():
        raise UsageError(
            f"--output {output} would write over the profile; give another file: --output new.profile.json"
        )
