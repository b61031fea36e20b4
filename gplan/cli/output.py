"""What the verbs print: a result as tables or JSON, and a bar while something long runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gplan.core import Plan, Profile, Run
from gplan.files import json_files

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDTH_OF_FILES = 120  # of tables that go to a file or a pipe, unless COLUMNS says otherwise

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of tables.")


def print_result(
    value: Profile | Plan | Run, view: Callable[[], RenderableType], output: Path, *, as_json: bool
) -> None:
    """The result of a verb, which is also in the file that it wrote."""
    print_only(lambda: json_files.to_json(value).decode(), view, as_json=as_json, written=output)


def print_only(
    json_text: Callable[[], str], view: Callable[[], RenderableType], *, as_json: bool, written: Path | None = None
) -> None:
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # not rich's own exit with code 1

    console = Output(highlight=False, width=None if sys.stdout.isatty() else _width_of_files())
    with reader_may_leave():
        if as_json:
            click.echo(json_text(), nl=False)
            return
        console.print(view())
        if written is not None:
            console.print(f"wrote {written}", style="dim")


def _width_of_files() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else _WIDTH_OF_FILES


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Printing into a pipe whose reader has gone (`| head -1`) is no failure: the rest is not printed."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for whatever is flushed at the end


@contextmanager
def progress_bar(*, num_steps: int = 1) -> Iterator[tuple[Callable[[str, float], None], Callable[[int, float], None]]]:
    """A bar on standard error while something long runs: one function to show text and share, one for a step's loss."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=1.0)

        def show(text: str, share: float) -> None:
            progress.update(task, description=text, completed=share)

        def step(index: int, loss: float) -> None:
            show(f"step {index + 1} of {num_steps}, loss {loss:.4f}", (index + 1) / num_steps)

        yield show, step
