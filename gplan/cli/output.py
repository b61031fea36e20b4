"""What the verbs print: a result as tables or as JSON, and progress on standard error."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gplan.core.progress import Progress

_FILE_WIDTH = 120  # columns of tables printed to a file or a pipe, unless COLUMNS is set
_LINE_S = 30.0  # between lines of progress

_STDOUT = "gplan.stdout"  # in a context's `meta`: where the result goes if nothing else may be on standard output


@contextmanager
def _stdout_kept_for_result() -> Iterator[TextIO]:
    """Inside, what a model file or a child process prints goes to standard error; yields standard output."""
    stdout = sys.stdout
    stdout.flush()
    try:
        stdout.fileno()
    except OSError:  # a stream in memory
        with redirect_stdout(sys.stderr):
            yield stdout
        return
    kept = os.dup(1)
    os.dup2(2, 1)  # for child processes and libraries in C
    try:
        with redirect_stdout(sys.stderr):
            yield open(kept, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - flushed by what prints
    finally:
        stdout.flush()  # of code that kept the stream before
        os.dup2(kept, 1)
        os.close(kept)


def _with_stdout_kept(context: click.Context, _parameter: click.Parameter, as_json: bool) -> bool:
    if as_json:
        context.meta[_STDOUT] = context.with_resource(_stdout_kept_for_result())
    return as_json


json_option = click.option(
    "--json", "as_json", is_flag=True, callback=_with_stdout_kept, help="Print the result as JSON instead of tables."
)


def print_result(
    result: object, view: Callable[[], RenderableType], *, as_json: bool, written: Path | None = None
) -> None:
    """Print a result as JSON, or as the text or tables of `view` with a line about the file that was `written`.

    A profile, plan, run or verification is printed as in its file, anything else as plain JSON.
    """
    import msgspec

    from gplan.files.json_files import FORMATS, to_json

    with closed_pipe_ignored():
        if as_json:
            context = click.get_current_context(silent=True)
            stdout = context.meta.get(_STDOUT) if context is not None else None
            if type(result) in FORMATS:
                click.echo(to_json(result), nl=False, file=stdout)  # type: ignore[arg-type]
            else:
                content = msgspec.to_builtins(result, str_keys=True)
                click.echo(msgspec.json.format(msgspec.json.encode(content), indent=1), file=stdout)
            return
        shown = view()
        if isinstance(shown, str):
            click.echo(shown)
            return
        console = _console()
        console.print(shown)
        if written is not None:
            console.print(f"wrote {written}", style="dim", markup=False)


def _console() -> Console:
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich itself would exit with code 1

    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) else _FILE_WIDTH
    return Output(highlight=False, width=None if sys.stdout.isatty() else width)


@contextmanager
def closed_pipe_ignored() -> Iterator[None]:
    """Stop printing, without an error, when the reader of a pipe has gone (`| head -1`)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the flush at exit


@contextmanager
def progress_bar(*, interrupted: str = "no file was left half-written") -> Iterator[Progress]:
    """Shows progress on standard error: a bar on a terminal, else lines. Under torchrun only rank 0 shows it.

    Yields a function that shows a text and the share done. An interrupt says what was done last, and the text `interrupted`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from gplan.core.progress import no_progress
    from gplan.core.units import seconds_text

    console, last = Console(stderr=True), list[str]()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    begun_s = line_s = time.monotonic()

    def progress(text: str, share: float) -> None:
        nonlocal line_s
        last[:] = [f"{share:.0%} done: {text}"]
        if console.is_terminal:
            bar.update(task, description=text, completed=share)
        elif (now_s := time.monotonic()) - line_s >= _LINE_S:
            line_s = now_s
            click.echo(f"{share:.0%} done after {seconds_text(now_s - begun_s)}: {text}", err=True)

    try:
        if os.environ.get("RANK", "0") != "0":
            yield no_progress
        elif not console.is_terminal:
            yield progress
        else:
            with Bar(*columns, console=console, transient=True) as bar:
                task = bar.add_task("starting", total=1.0)
                yield progress
    except KeyboardInterrupt as interrupt:
        if interrupt.args or not last:
            raise
        raise KeyboardInterrupt(f"{last[0]}; {interrupted}") from None


@contextmanager
def warnings_noted() -> Iterator[list[str]]:
    """Yields the texts of the warnings that are shown inside."""
    texts, show = list[str](), warnings.showwarning

    def note(message: Warning | str, *rest: Any, **named: Any) -> None:
        texts.append(str(message))
        show(message, *rest, **named)

    warnings.showwarning = note
    try:
        yield texts
    finally:
        warnings.showwarning = show
