"""What a verb says of an option that it does not have: where a file's name goes, or what is spelt alike."""

from __future__ import annotations

import re

import click

_HELP = "gplan --help"
_OF_PROFILES = {"--set", "--granularity"}  # options that a plan has from its profile
_ANY_KIND, _KINDS = {"file", "subject"}, {"profile", "plan", "run", "verification", "calibration"}


def told_of(error: click.NoSuchOption) -> str:
    """One line: what was given, and what the verb has instead.

    A file, such as a plan, is an argument of most verbs, and its name then goes without an option.
    """
    context, found = error.ctx, error.option_name
    if context is None:
        return f"there is no option {found}; see {_HELP}"
    verb = context.command_path
    if found in _OF_PROFILES:
        return (
            f"{verb} has no option {found}: it belongs to the profile; run `gplan profile MODEL {found} ...` and balance "
            "again, and the plan has it"
        )
    for argument in context.command.params:
        if isinstance(argument, click.Argument) and found.lstrip("-") in _words(argument, context):
            return (
                f"{verb} has no option {found}: the file's name goes without one, as in `{verb} {_example(argument)}`"
            )
    meant = error.possibilities or _beginning_with(found, context)
    alike = f"did you mean {' or '.join(meant)}? " if meant else ""
    return f"{verb} has no option {found}; {alike}see {verb} --help"


def _beginning_with(found: str, context: click.Context) -> list[str]:
    """For a letter, such as -o, the options that begin with it."""
    names = [name for parameter in context.command.params for name in parameter.opts]
    return [name for name in names if name.startswith(f"-{found}")] if len(found) == 2 else []


def _words(argument: click.Argument, context: click.Context) -> set[str]:
    """What the argument is called, in the code and on the help page; a file of any kind by every kind's name.

    A file is of any kind where the help page names none, so where the argument has no metavar of its own.
    """
    words = {argument.name or "", *re.findall("[a-z]+", argument.make_metavar(context).lower())}
    return words | _KINDS if argument.metavar is None and words & _ANY_KIND else words


def _example(argument: click.Argument) -> str:
    """The file that is read where none is named; else some name."""
    return argument.default if isinstance(argument.default, str) else "FILE"
