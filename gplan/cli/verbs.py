"""All verbs as one command, and what is said where one fails. Heavy imports happen inside the verbs."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from gplan.cli import INTERRUPTED
from gplan.cli.balance import balance
from gplan.cli.diff import diff
from gplan.cli.explain import explain
from gplan.cli.export import export
from gplan.cli.import_ import import_
from gplan.cli.import_trace import import_trace
from gplan.cli.profile import profile
from gplan.cli.report import report
from gplan.cli.run import run
from gplan.cli.show import show
from gplan.cli.simulate import simulate
from gplan.cli.suggestions import told_of
from gplan.cli.verify import verify
from gplan.core.errors import GplanError, is_interrupt


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="gplan")
def cli() -> None:
    """Plan pipeline-parallel training in PyTorch, run the plan, and see how far the prediction was off.

    \b
      gplan profile model.py     measure every layer            -> gplan.profile.json
      gplan balance --k 8        the best partition, proven     -> gplan.plan.json
      gplan run                  train with it, measure it      -> gplan.run.json
      gplan verify               the plan and its rivals run in turns -> gplan.verification.json
      gplan report               charts and one offline page    -> gplan-report/
      gplan show                 any of these files, as text
      gplan simulate --k 8       a schedule drawn, without any of them, or of a plan
      gplan diff OLD NEW         two profiles: what became slower, beyond the noise
      gplan explain              what holds the plan up, and what would help
      gplan export --to NAME     the plan as another trainer reads it
      gplan import FILE          a profile published with another planner -> gplan.profile.json
      gplan import-trace FILES   a pipeline that trained elsewhere, measured by its torch.profiler traces

    Each verb reads what the one before it wrote; only the model needs naming.
    """


for verb in (profile, balance, run, verify, report, show, simulate, diff, explain, export, import_, import_trace):
    cli.add_command(verb)


def exit_code(arguments: Sequence[str] | None) -> int:
    """Run a verb; the exit code of what came of it, which is said."""
    try:
        code = cli.main(args=list(arguments) if arguments is not None else None, standalone_mode=False)
    except GplanError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except click.NoSuchOption as error:
        click.echo(f"error: {told_of(error)}", err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        said = str(error.__cause__ or error)  # click raises Abort from the interrupt
        click.echo(f"interrupted; {said or 'every file that was written is whole'}", err=True)
        return INTERRUPTED
    except Exception as error:
        if is_interrupt(error):
            click.echo("interrupted", err=True)
            return INTERRUPTED
        if os.environ.get("GPLAN_DEBUG"):
            raise
        click.echo(f"error: a bug in gplan: {type(error).__name__}: {error}; set GPLAN_DEBUG=1 to see where", err=True)
        return 1
    return code if isinstance(code, int) else 0
