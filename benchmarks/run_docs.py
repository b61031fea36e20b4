"""Run every command of README.md and docs/ in a temporary folder.

    python benchmarks/run_docs.py                      all pages; about 12 minutes on two idle cores
    python benchmarks/run_docs.py --pages plan run     some pages; those before them in the order are needed once
    python benchmarks/run_docs.py --skip verify        leaves out commands that contain the word
    python benchmarks/run_docs.py --output printed     also keeps what each command printed, one file per page

Commands are the lines that start with `$ ` in the ```console blocks of a page. A block whose first line is a comment with
a file name (`# model.py`) is written to that file. Sections about the reader's own model run in a folder of their own,
so that their profile and plan do not replace those of the other pages; the Python blocks of these sections run too.
`python3 go.py` sets up another environment and is left out. The exit code is 1 if any command failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = "README"
ORDER = (
    "profile", "plan", "run", "cluster", "schedules", "hardware", "traces", "exports", "files-and-python", "verify", README,
)  # fmt: skip
INPUTS = ("examples", "tests/interop/traces")
OWN_MODEL_SECTIONS = {
    "Your own model", "Your own training script", "The model file", "Python", "Train from your own script",
    "Record the traces", "Compare with a plan", "Correct a profile with it",
}  # fmt: skip
SKIPPED = "python3 go.py"
COMMAND_TIMEOUT_S = 1800

# Makes the fragment of docs/traces.md a whole script: what it leaves to the reader's own trainer.
TRACED_STEP = "...  # one step of the pipeline and the optimizer"
TRACED_SCRIPT = """
from itertools import islice
import torch, gplan, model as own
plan = gplan.load("gplan.plan.json")
pipe = gplan.pipeline(own.model, plan, loss=own.loss)
optimizer, rank, batches = own.optimizer(pipe.parameters()), pipe.rank, islice(own.batches(plan.batch_size), 9)
"""
TRACED_STEP_CODE = "pipe.step(inputs, targets); optimizer.step(); optimizer.zero_grad()"
TRACE_COMMANDS = (
    "gplan profile model.py --microbatch-size 16",
    "gplan balance --k 2 --microbatches 4",
    "OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 record.py",
)


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page; `language` is empty for an indented one."""

    page: str
    section: str
    language: str
    text: str

    @property
    def file_name(self) -> str | None:
        """The file that the block shows, by the comment in its first line."""
        found = re.match(r"# ([\w-]+\.\w+)", self.text)
        return found[1] if found else None

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands of a console block, or the lines of an indented block that begin with a program."""
        lines = self.text.splitlines()
        if self.language == "console":
            return tuple(x.removeprefix("$ ") for x in lines if x.startswith("$ "))
        return tuple(x for x in lines if re.match(r"(\w+=\S+ )*(gplan|python3?|torchrun) ", x))


def page_path(page: str) -> Path:
    """The file of a page."""
    return ROOT / "README.md" if page == README else ROOT / "docs" / f"{page}.md"


def blocks_of(page: str) -> Iterator[Block]:
    """The code blocks of a page, fenced and indented, in order."""
    section, language, lines = "", None, list[str]()
    for line in [*page_path(page).read_text(encoding="utf-8").splitlines(), ""]:
        if language not in (None, ""):  # within a fenced block
            if line.startswith("```"):
                yield Block(page, section, str(language), "\n".join(lines))
                language, lines = None, []
            else:
                lines.append(line)
        elif line.startswith("```"):
            language = line.removeprefix("```").strip() or "text"
        elif line.startswith("    "):
            language = ""
            lines.append(line.removeprefix("    "))
        else:
            if language == "":
                yield Block(page, section, "", "\n".join(lines))
                language, lines = None, []
            if line.startswith("#"):
                section = line.lstrip("# ")


@dataclass(frozen=True, slots=True)
class Done:
    """A command that was run."""

    page: str
    command: str
    exit_code: int
    seconds: float
    printed: str


def main() -> int:
    """Run the pages and print a table of exit codes; 1 if any is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", nargs="*", default=ORDER, choices=ORDER)
    parser.add_argument("--skip", nargs="*", default=[], help="leave out commands that contain one of these words")
    parser.add_argument("--output", type=Path, help="a folder for what the commands print")
    parser.add_argument("--folder", type=Path, help="work in this folder and keep it (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        environment = prepare(folder)
        done = list[Done]()
        for page in options.pages:
            ran = list(run_page(page, folder, environment, skip=options.skip))
            done += ran
            if options.output:
                options.output.mkdir(parents=True, exist_ok=True)
                text = "\n".join(f"$ {x.command}\n{x.printed}" for x in ran)
                (options.output / f"{page}.txt").write_text(text, encoding="utf-8")
    failed = [x for x in done if x.exit_code]
    print(f"{len(done)} commands in {sum(x.seconds for x in done):.0f} s, {len(failed)} failed")
    for x in failed:
        print(f"\n{x.page}: $ {x.command}\n{x.printed}exit code {x.exit_code}")
    return 1 if failed else 0


def prepare(folder: Path) -> dict[str, str]:
    """Copy the inputs into the folder; an environment whose `gplan` is this checkout, run by this Python."""
    for name in INPUTS:
        if not (folder / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    programs = folder / ".bin"
    programs.mkdir(exist_ok=True)
    (folder / "own").mkdir(exist_ok=True)
    for name, module in (("gplan", "-m gplan"), ("python", ""), ("torchrun", "-m torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (programs / name).chmod(0o755)
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT / 'profiler'}"}


def run_page(page: str, folder: Path, environment: dict[str, str], *, skip: list[str]) -> Iterator[Done]:
    """Write the files of a page and run its commands, in order."""
    for block in blocks_of(page):
        is_own = block.section in OWN_MODEL_SECTIONS
        where = folder / "own" if is_own else folder
        if block.file_name and block.language in ("python", "toml"):
            (where / block.file_name).write_text(block.text + "\n", encoding="utf-8")
            continue
        commands = block.commands if block.language == "console" else ()
        if is_own and block.language == "python":
            is_fragment = TRACED_STEP in block.text
            name = "record.py" if is_fragment else "block.py"
            text = TRACED_SCRIPT + block.text.replace(TRACED_STEP, TRACED_STEP_CODE) if is_fragment else block.text
            (where / name).write_text(text, encoding="utf-8")
            commands = TRACE_COMMANDS if is_fragment else (f"python {name}",)
        for command in commands:
            if not command.startswith(SKIPPED) and not any(word in command for word in skip):
                yield run_command(page, command, where, environment)


def run_command(page: str, command: str, folder: Path, environment: dict[str, str]) -> Done:
    """Run one command in a shell and print a line on how it went."""
    started_s = time.monotonic()
    try:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=COMMAND_TIMEOUT_S, text=True,
        )  # fmt: skip
        code, printed = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        code, printed = 124, f"no end after {COMMAND_TIMEOUT_S} s\n"
    seconds = time.monotonic() - started_s
    print(f"{page:17} {code:3} {seconds:6.1f} s  {command}", flush=True)
    return Done(page, command, code, seconds, printed)


if __name__ == "__main__":
    sys.exit(main())
