"""What earlier verbs wrote, as tables and charts: `gplan show`, `explain` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gplan.cli.arguments import (
    PATH,
    PLAN_FILE,
    PROFILE_FILE,
    REPORT_FOLDER,
    RUN_FILE,
    Verb,
    output_option,
    profile_of_plan,
    profile_option,
)
from gplan.cli.output import json_option, print_result, progress_bar

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command(cls=Verb)
@click.argument("file", default=PROFILE_FILE, type=PATH)
@click.option("--sort", type=click.Choice(["cost", "order", "memory"]),
              help="Which layers of a profile come first.  [default: cost]")  # fmt: skip
@click.option(
    "--microbatch-size", type=int, help="Which size of a profile.  [default: the largest, as in gplan balance]"
)
@click.option("--all", "show_all", is_flag=True, help="One row for every layer of a profile, even if layers are alike.")
@json_option
def show(file: Path, sort: Any, microbatch_size: int | None, show_all: bool, as_json: bool) -> None:
    """Print a profile, plan, run or verification that was written before.

    \b
    Examples:
      gplan show
      gplan show --sort memory --all
      gplan show gplan.run.json
    """
    from gplan.core import Plan, Profile, Run
    from gplan.core.errors import UsageError
    from gplan.files import json_files
    from gplan.reporting.text.plan import plan_view
    from gplan.reporting.text.profile import profile_view
    from gplan.reporting.text.run import run_view
    from gplan.reporting.text.verification import verification_view

    value = json_files.load_any(file)
    if not isinstance(value, Profile) and (sort or microbatch_size is not None or show_all):
        noun = type(value).__name__.lower()
        raise UsageError(f"{file} is a {noun}; --sort, --microbatch-size and --all are for profiles: leave them out")
    view: RenderableType
    if isinstance(value, Profile):
        sizes = value.microbatch_sizes
        size = sizes[-1] if microbatch_size is None else microbatch_size
        if size not in sizes:
            known = " or ".join(map(str, sizes))
            raise UsageError(f"{file} has no micro-batch size {size}; expected --microbatch-size {known}")
        view = profile_view(value, sort=sort or "cost", microbatch_sizes=(size,), is_folded=not show_all)
    elif isinstance(value, Plan):
        view = plan_view(value)
    elif isinstance(value, Run):
        view = run_view(value)
    else:
        view = verification_view(value)
    print_result(value, lambda: view, as_json=as_json)


@click.command(cls=Verb)
@click.argument("plan", default=PLAN_FILE, type=PATH)
@profile_option
@json_option
def explain(plan: Path, profile_file: Path, as_json: bool) -> None:
    """Explain a plan: what limits its step, and what would make it faster.

    \b
    Examples:
      gplan explain
      gplan explain gplan.plan.json --profile gplan.profile.json
      gplan explain --json
    """
    from gplan.core import Plan, Profile
    from gplan.evaluate.explain import explain as explain_plan
    from gplan.files import json_files
    from gplan.reporting.text.explanation import explanation_view

    chosen, profile = json_files.load(Plan, plan), json_files.load(Profile, profile_file)
    with progress_bar() as progress:
        explanation = explain_plan(chosen, profile, progress=progress)
    print_result(explanation, lambda: explanation_view(explanation), as_json=as_json)


@click.command(cls=Verb)
@click.argument("subject", required=False, type=PATH)
@click.option(
    "--profile", "profile_file", type=PATH,
    help="The profile that the plan was made from. With it the page also explains the plan and compares other numbers of "
    f"devices.  [default: {PROFILE_FILE}, if the plan was made from it]",
)  # fmt: skip
@output_option(REPORT_FOLDER)
@json_option
def report(subject: Path | None, profile_file: Path | None, output: Path, as_json: bool) -> None:
    """Draw a run beside its prediction, or a plan alone: one HTML page, its charts and a Chrome trace. Without a file, the
    newer of gplan.run.json and gplan.plan.json is drawn.

    \b
    Examples:
      gplan report
      gplan report gplan.plan.json --output charts
      gplan report demo.run.json --profile demo.profile.json
    """
    from gplan import api
    from gplan.core import Plan, Run, Verification
    from gplan.core.errors import UsageError

    source, skipped = (subject, "") if subject is not None else _newest_subject()
    value = api.load(source)
    if isinstance(value, Verification):
        value = value.chosen.run
    if not isinstance(value, Plan | Run):
        kind = type(value).__name__.lower()
        raise UsageError(f"{source} is a {kind}; expected a run or a plan: make one with `gplan balance --k 2`")
    profile, why_not = profile_of_plan(value.plan if isinstance(value, Run) else value, profile_file)
    remark = f"; {why_not}, so the page does not explain the plan (see --profile)" if why_not else ""
    if profile is not None:
        remark = f" and {profile_file or PROFILE_FILE}"
    with progress_bar() as progress:
        paths = api.report(value, output, profile=profile, progress=progress)
    lines = (f"read {source}{remark}{skipped}", *(f"wrote {path}" for path in paths))
    print_result([str(path) for path in paths], lambda: "\n".join(lines), as_json=as_json)


def _newest_subject() -> tuple[Path, str]:
    """The newer of the default run and plan files, and a remark about the other one."""
    from gplan.core.errors import UsageError

    found = [Path(name) for name in (RUN_FILE, PLAN_FILE) if Path(name).exists()]
    if not found:
        raise UsageError(f"there is neither {RUN_FILE} nor {PLAN_FILE} here; run `gplan balance` or `gplan run` first")
    newest = max(found, key=lambda path: path.stat().st_mtime)
    is_run_older = newest == Path(PLAN_FILE) and len(found) > 1
    return newest, f"; {RUN_FILE} is older and was not read" if is_run_older else ""
