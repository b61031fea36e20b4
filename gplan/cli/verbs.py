"""All verbs as one command, and the message and exit code of a verb that fails.

A module of verbs is imported when one is used, and a verb imports the planner when it runs, so `--help` is quick.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

import click

from gplan.cli import INTERRUPTED

VERBS = {
    "profile": ("MODEL", "measure every layer -> gplan.profile.json"),
    "balance": ("--k N", "find and prove the best plan -> gplan.plan.json"),
    "run": ("", "train with the plan and measure it -> gplan.run.json"),
    "report": ("", "draw a run or a plan on a page -> gplan-report/"),
    "verify": ("", "run the plan and rivals -> gplan.verification.json"),
    "explain": ("", "what limits the plan, and what would make it faster"),
    "simulate": ("--k N", "simulate a schedule and explain its idle time"),
    "cluster": ("", "measure hosts and their links -> cluster.toml"),
    "show": ("FILE", "print any of these files as tables"),
    "export": ("--to FORMAT", "write the plan in the format of another trainer"),
    "layout": ("CONFIG --gpus N", "split a language model over a machine, by its sizes"),
    "import-plan": ("LAYOUT", "price another trainer's layout beside the best one"),
    "import-trace": ("TRACE...", "measure a pipeline by its torch.profiler traces"),
}
"""Each verb's usual arguments, and in a few words what it does and which file it writes."""

_MODULES = {
    **dict.fromkeys(("show", "explain", "report"), "results"),
    **dict.fromkeys(("export", "layout", "import-plan", "import-trace"), "exchange"),
}
"""Where verbs are that have no module of their own."""


class _Verbs(click.Group):
    """The verbs in the order of `VERBS`; each is imported when it is used."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            similar = [] if context.resilient_parsing else get_close_matches(name, VERBS)  # completion expects None
            if similar:
                raise click.UsageError(f"no such command '{name}'; similar: {' or '.join(similar)}", context)
            return None
        import logging

        logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # it would print the stack of caught errors
        module = import_module(f"gplan.cli.{_MODULES.get(name, name)}")
        command: click.Command = getattr(module, name.replace("-", "_"))
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(f"{name} {usage}".strip(), words) for name, (usage, words) in VERBS.items()])


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="gplan")
def cli() -> None:
    """Plan pipeline-parallel training in PyTorch, run the plan, and compare the prediction with the measurement.

    \b
    Quickstart:
      gplan profile model.py
      gplan balance --k 2
      gplan run
      gplan report

    Each verb reads the files that the verbs before it wrote, so only the model has to be named. `gplan VERB --help`
    has examples. Every verb prints JSON with --json.
    """


def _warning_line(message: Warning | str, category: type[Warning], *_: object, **__: object) -> str:
    """A warning without its place in the code, which tells a user nothing."""
    return f"{'warning' if category is UserWarning else category.__name__}: {message}\n"


def exit_code(arguments: Sequence[str] | None) -> int:
    """Run a verb; print its error, if any, and return its exit code."""
    warnings.formatwarning = _warning_line
    try:
        code = cli.main(
            args=list(arguments) if arguments is not None else None, prog_name="gplan", standalone_mode=False
        )
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"error: {_usage_error_text(error)}", err=True)
        return click.UsageError.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        detail = str(error.__cause__ or error)  # click raises Abort from the interrupt
        click.echo(f"interrupted; {detail or 'no file was left half-written'}", err=True)
        return INTERRUPTED
    except Exception as error:
        from gplan.core.errors import GplanError, is_interrupt, missing_module

        if isinstance(error, ModuleNotFoundError):
            error = missing_module("this verb", error) or error
        if isinstance(error, GplanError):
            click.echo(f"error: {error}", err=True)
            return error.exit_code
        if is_interrupt(error):
            click.echo("interrupted", err=True)
            return INTERRUPTED
        if os.environ.get("GPLAN_DEBUG"):
            raise
        click.echo(
            f"error: a bug in gplan: {type(error).__name__}: {error}; set GPLAN_DEBUG=1 for the traceback", err=True
        )
        return 1
    return code if isinstance(code, int) else 0


_OTHER_WORDS = {
    "--nodes": "give the devices of all nodes with --gpus, and those of one with --gpus-per-node",
    "--config": "the config.json is the first argument",
    "full": "write always for what Megatron-LM calls full",
    "selective": "write never: fused attention already recomputes what Megatron-LM's selective does",
}
"""What users of other trainers write for `gplan layout`, and what to write."""
_PROFILE_OPTIONS = {"--set", "--granularity"}  # a plan takes them over from its profile


def _usage_error_text(error: click.ClickException) -> str:
    """One line for an error in the arguments, in the style of gplan's own errors; of an unknown option those spelt alike."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    verb = context.command_path if context else "gplan"
    word = (
        error.option_name
        if isinstance(error, click.NoSuchOption)
        else error.message.partition("'")[2].partition("'")[0]
    )
    meant = f"; {_OTHER_WORDS[word]}" if context and context.info_name == "layout" and word in _OTHER_WORDS else ""
    if not isinstance(error, click.NoSuchOption):
        text = " ".join(error.format_message().split()).rstrip(".")
        return f"{text[:1].lower()}{text[1:]}{meant}; see {verb} --help"
    if error.option_name in _PROFILE_OPTIONS:
        return (
            f"{verb} has no option {error.option_name}: it belongs to the profile; run `gplan profile MODEL "
            f"{error.option_name} ...` and balance again, and the plan has it"
        )
    if meant:
        return f"{verb} has no option {word}{meant}"
    hint = f"did you mean {' or '.join(error.possibilities)}? " if error.possibilities else ""
    return f"{verb} has no option {error.option_name}; {hint}see {verb} --help"
